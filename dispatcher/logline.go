package dispatcher

import (
	"encoding/json"
	"strconv"

	"evenkeel/dispatcher/policy"
)

// LogLine is one line of the decision log, in the form that `evenkeel decide` and `evenkeel
// simulate --log` read. Its member "in" has the form of the golden vectors of the tests.
type LogLine struct {
	Tick     uint64
	TimeMs   int64 // Unix time, in ms
	Group    string
	Policy   string // canonical name of the policy that decided
	Snapshot *policy.Snapshot
	// Outputs are the answer lengths that Snapshot.MeanOutput comes from, ascending; empty: the policy
	// saw no mean.
	Outputs []int32
	Assign  []policy.Assignment
}

// lineBegin begins each line. By this text, decisionLog.open recognises an incomplete line.
const lineBegin = `{"tick":`

// AppendJSON appends the line and a newline. It leaves out a member if the reader assumes its value
// anyway.
func (l *LogLine) AppendJSON(dst []byte) []byte {
	s := l.Snapshot
	dst = strconv.AppendUint(append(dst, lineBegin...), l.Tick, 10)
	dst = strconv.AppendInt(append(dst, `,"t_ms":`...), l.TimeMs, 10)
	dst = appendQuoted(append(dst, `,"group":`...), l.Group)
	dst = appendQuoted(append(dst, `,"in":{"policy":`...), l.Policy)
	dst = appendFloat(append(dst, `,"max_age_ms":`...), s.MaxAgeMs)
	dst = appendNonzero(dst, `,"step_ms":`, s.StepMs)
	dst = appendNonzero(dst, `,"c0_ms":`, s.C0Ms)
	dst = appendNonzero(dst, `,"c1_ms":`, s.C1Ms)
	if s.Early {
		dst = append(dst, `,"early":true`...)
	}
	if s.Aggregated {
		dst = append(dst, `,"mixed":true`...)
		dst = appendNonzero(dst, `,"own_prefill_ms":`, s.OwnPromptMs)
		dst = appendFloat(append(dst, `,"unbegun":`...), s.NotStarted)
		dst = appendFloat(append(dst, `,"prompt_rate":`...), s.PromptRate)
	}
	if s.RequestTokens != 0 {
		dst = strconv.AppendInt(append(dst, `,"request_tokens":`...), s.RequestTokens, 10)
	}
	if s.RowTokens != 0 {
		dst = strconv.AppendInt(append(dst, `,"row_tokens":`...), s.RowTokens, 10)
	}
	if s.Budget != 0 {
		dst = appendInt(append(dst, `,"budget":`...), s.Budget)
	}
	dst = append(dst, `,"workers":[`...)
	for i := range s.Workers {
		dst = appendWorker(appendComma(dst, i), &s.Workers[i])
	}
	dst = append(dst, `],"pool":[`...)
	for i := range s.Pool {
		dst = appendEntry(appendComma(dst, i), s, i)
	}
	if len(l.Outputs) > 0 {
		dst = append(dst, `],"outputs":[`...)
		for i, o := range l.Outputs {
			dst = appendInt(appendComma(dst, i), o)
		}
	}
	dst = append(dst, `]},"assign":[`...) // the first bracket ends the outputs or, without them, the pool
	for i, a := range l.Assign {
		dst = strconv.AppendUint(append(appendComma(dst, i), '['), a.Entry, 10)
		dst = append(appendInt(append(dst, ','), a.Worker), ']')
	}
	return append(dst, "]}\n"...)
}

func appendWorker(dst []byte, w *policy.Worker) []byte {
	dst = appendInt(append(dst, `{"id":`...), w.ID)
	dst = appendInt(append(dst, `,"free":`...), w.Free)
	if !w.Up {
		dst = append(dst, `,"up":false`...)
	}
	dst = strconv.AppendInt(append(dst, `,"capacity_tokens":`...), w.Capacity, 10)
	dst = appendNonzero(dst, `,"cost":`, w.Cost)
	if w.Others > 0 {
		dst = strconv.AppendInt(append(dst, `,"others_tokens":`...), w.Others, 10)
	}
	if w.Backlog > 0 {
		dst = strconv.AppendInt(append(dst, `,"backlog_tokens":`...), w.Backlog, 10)
	}
	dst = append(dst, `,"running":[`...)
	for i := range w.Running {
		r := &w.Running[i]
		dst = strconv.AppendUint(append(appendComma(dst, i), `{"id":`...), r.ID, 10)
		dst = appendInt(append(dst, `,"prompt":`...), r.Prompt)
		dst = appendInt(append(dst, `,"generated":`...), r.Generated)
		if r.Age != r.Generated { // the request was resumed: its first tokens came from another rank
			dst = appendInt(append(dst, `,"age":`...), r.Age)
		}
		if r.KVElsewhere > 0 {
			dst = appendInt(append(dst, `,"away":`...), r.KVElsewhere)
		}
		dst = appendNonzero(dst, `,"rhat":`, r.Rhat)
		dst = appendKey(dst, r.Key)
		dst = append(appendInt(append(dst, `,"slot":`...), r.Slot), '}')
	}
	return append(dst, "]}"...)
}

func appendEntry(dst []byte, s *policy.Snapshot, i int) []byte {
	e := &s.Pool[i]
	dst = strconv.AppendUint(append(dst, `{"id":`...), e.ID, 10)
	dst = appendInt(append(dst, `,"prompt":`...), e.Prompt)
	if e.Age != 0 {
		dst = appendInt(append(dst, `,"age":`...), e.Age)
	}
	dst = appendFloat(append(dst, `,"age_ms":`...), e.WaitMs)
	if e.Urgent {
		dst = append(dst, `,"urgent":true`...)
	}
	if e.Express {
		dst = append(dst, `,"express":true`...)
	}
	if len(s.Waits) > 0 {
		dst = appendWait(dst, &s.Waits[i])
	}
	return append(appendKey(dst, e.Key), '}')
}

// appendWait appends the members that matter only if ranks prefill. HeldMs below 0 and UrgentInMs 0
// are left out.
func appendWait(dst []byte, e *policy.EntryDetails) []byte {
	if e.HeldMs >= 0 {
		dst = strconv.AppendFloat(append(dst, `,"held_ms":`...), e.HeldMs, 'g', -1, 64)
	}
	if e.UrgentInMs > 0 {
		dst = strconv.AppendFloat(append(dst, `,"urgent_in_ms":`...), e.UrgentInMs, 'g', -1, 64)
	}
	if len(e.Hits) == 0 {
		return dst
	}
	dst = append(dst, `,"hits":[`...)
	for i, h := range e.Hits {
		dst = append(appendInt(append(appendComma(dst, i), '['), h.Worker), ',')
		dst = append(strconv.AppendInt(dst, int64(h.Tokens), 10), ']')
	}
	return append(dst, ']')
}

func appendKey(dst []byte, k uint64) []byte {
	if k == 0 {
		return dst
	}
	return strconv.AppendUint(append(dst, `,"key":`...), k, 10)
}

// appendNonzero leaves out 0, which the reader assumes for a missing member.
func appendNonzero(dst []byte, name string, x float32) []byte {
	if x == 0 {
		return dst
	}
	return appendFloat(append(dst, name...), x)
}

// appendFloat writes as many digits as are needed to read the same float32 back.
func appendFloat(dst []byte, x float32) []byte {
	return strconv.AppendFloat(dst, float64(x), 'g', -1, 32)
}

func appendInt(dst []byte, n int32) []byte { return strconv.AppendInt(dst, int64(n), 10) }

func appendComma(dst []byte, i int) []byte {
	if i > 0 {
		dst = append(dst, ',')
	}
	return dst
}

func appendQuoted(dst []byte, s string) []byte {
	text, err := json.Marshal(s)
	if err != nil { // cannot happen with a string
		return append(dst, `""`...)
	}
	return append(dst, text...)
}
