package sse

import (
	"errors"
	"math"

	"evenkeel/internal/rawjson"
)

// Ask is what the client asked for, where it differs from what decode was asked,
// and what a fan-out changes in the events of one of its legs.
type Ask struct {
	Form Form // the form of the engine's events

	Usage           bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats; means nothing without Usage
	TokenIDs        bool // return_token_ids
	Whole           bool // the answer comes in one piece, as its only event

	// Cached is the prefill engine's cached_tokens. It replaces the decode engine's count,
	// which counts the KV that it pulled as cached. -1: not known, the decode engine's
	// count is removed; OwnCached: the decode engine computed the prompt, so its count is right.
	Cached int

	// TokensPerChunk is what this decode engine's streams had on average; it
	// counts tokens where an engine reports none. 0: not known, taken as 1.
	TokensPerChunk float64

	// MaxTokens is how many tokens the answer may have, Context how many it may have
	// together with its prompt. An event beyond them is a fault of the engine, and no
	// count of that event is taken. 0: any number.
	MaxTokens, Context int

	// A fan-out (n > 1, or a list of prompts) makes one stream out of several.
	ID             []byte // replaces the id; nil: leave it
	Created        int64  // replaces created; 0: leave it
	Choice         int    // replaces choices[].index; -1: leave it
	DropFinalUsage bool   // one UsageEvent will stand for all legs
	DropDone       bool

	Aborted func() bool // says that the client has aborted the answer, so that finish_reason abort is a proper end; nil: no client can

	Trail *Trail // keeps what another leg would need to go on; nil: nothing is kept
	Seam  *Seam  // set if the leg goes on with an interrupted answer; nil: the leg begins the answer
}

// Found sets Ask.Cached, in tokens, for a leg that began before the prefill engine had reported how much of the prompt
// it found in its prefix cache.
func (m *Mirror) Found(cached int) { m.ask.Cached = cached }

// OwnCached leaves cached_tokens as decode counts them.
const OwnCached = -2

// Verdict is what an event means for its stream.
type Verdict uint8

// The verdicts.
const (
	Forward    Verdict = iota // send out to the client
	Drop                      // nothing in it is for the client
	Failed                    // decode failed: see Failure; out is its event, for a client that already has bytes
	Recomputed                // the decode engine gave up the KV and wants a new prefill; out is the event if it has content, else nil
	Ended                     // [DONE] came; unless Finished is true, the answer has failed
	Overrun                   // the event exceeds a limit, or does not fit the events before: see Fault; the client gets nothing of it
	Unreadable                // the event is not a JSON object: see Fault; the client gets nothing of it
)

func (v Verdict) String() string {
	return [...]string{"forward", "drop", "failed", "recomputed", "ended", "overrun", "unreadable"}[v]
}

// NewMirror returns a mirror for one leg.
func NewMirror(a Ask) *Mirror {
	m := &Mirror{marks: make([]mark, 0, 16)}
	m.Reset(a)
	return m
}

// Reset makes the mirror ready for another leg; it keeps its memory.
func (m *Mirror) Reset(a Ask) {
	id, marks, owed, details, held := m.id[:0], m.marks[:0], m.owed[:0], m.details[:0], m.held[:0]
	if cap(held) > keepBuffer {
		held = nil
	}
	if cap(marks) > 256 {
		marks = make([]mark, 0, 16)
	}
	switch {
	case a.ID != nil:
		id = rawjson.AppendString(id, a.ID)
	case a.Seam != nil:
		id = append(id, a.Seam.Head.ID...)
	}
	*m = Mirror{ask: a, byIDs: a.Form == Tokens, continuous: a.Usage && a.ContinuousUsage, id: id, marks: marks, owed: owed, details: details,
		held: held}
}

// Event takes the next event of the stream and returns the bytes the client
// gets for it: e.Raw itself if nothing in it changes, else appended to dst; nil
// if it gets none. It does not allocate once dst has room.
//
// Event drops the final usage if the client did not ask for it, and a chunk with an
// empty delta that the engine sends only because evenkeel asked for token ids.
func (m *Mirror) Event(e Event, dst []byte) (out []byte, v Verdict) {
	switch e.Kind {
	case KindComment:
		return e.Raw, Forward
	case KindDone:
		if m.ask.DropDone {
			return nil, Ended
		}
		if m.ask.Form == Verbatim {
			return m.verbatim(e)
		}
		return e.Raw, Ended
	}
	if e.Kind == KindOpaque && m.ask.DropDone { // in one of several answers: its id and its index could not be replaced
		m.fault = ErrLargeEvent
		return nil, Overrun
	}
	if !m.ask.Form.chunked() {
		return m.take(e, dst)
	}
	m.facts = facts{choices: -1}
	m.marks = m.marks[:0]
	if e.Kind == KindOpaque { // the event is larger than the reader's limit: it is passed on unread
		m.started = true
		if m.ask.Trail != nil {
			m.ask.Trail.Unread = true
		}
		return e.Raw, Forward
	}
	if !m.read(e.Data) {
		return m.unreadable(e.Data)
	}
	if m.facts.isError {
		m.failure = ReadFailure(e.Data)
		return e.Raw, Failed
	}
	if fault := m.overrun(); fault != nil {
		m.fault = fault
		return nil, Overrun
	}
	m.count(e.Data)
	out, v = m.judge(e, dst)
	if m.ask.Trail != nil && v != Failed {
		m.ask.Trail.keep(m, e.Data)
	}
	return out, v
}

// unreadable judges an event that is no JSON object. No engine sends one, so the answer is damaged, unless it has ended
// already, or the event is empty.
func (m *Mirror) unreadable(data []byte) ([]byte, Verdict) {
	if m.finish != "" || rawjson.Space(data, 0) == len(data) {
		return nil, Drop
	}
	m.fault = ErrNotJSON
	return nil, Unreadable
}

// These errors say why a mirror refuses an event.
var (
	ErrTooManyTokens = errors.New("the engine sent more tokens than were asked for")
	ErrBadCount      = errors.New("the engine counts more tokens than there can be")
	ErrNotJSON       = errors.New("the engine sent an event that is not a JSON object")
	ErrLargeEvent    = errors.New("the engine sent an event that is larger than limits.event_bytes")
)

const (
	// spareTokens is how far over its limit an answer may be: an engine that
	// speculates may end some tokens late.
	spareTokens = 32
	// chunksPerToken is how many chunks a token may come in: parsers of tools and
	// of reasoning make several of one.
	chunksPerToken = 4
)

// overrun returns the error of the limit that the event exceeds; nil: the event exceeds none.
func (m *Mirror) overrun() error {
	f, limit := &m.facts, m.ask.MaxTokens
	switch {
	case m.ask.Context > 0 && f.hasUsage && f.usage.Prompt+f.usage.Completion > m.ask.Context+spareTokens:
		return ErrBadCount
	case limit <= 0:
	case f.hasUsage && f.usage.Completion > limit+spareTokens:
		return ErrBadCount
	case m.ids+f.ids > limit+spareTokens, f.content && m.chunks >= chunksPerToken*(limit+spareTokens):
		return ErrTooManyTokens
	}
	return nil
}

// count adds the tokens that read found in the event. Tokens after the engine's last usage
// are counted by their token ids, or estimated from the number of chunks if the engine sends
// no ids. The next usage corrects that count.
func (m *Mirror) count(data []byte) {
	f, before := &m.facts, m.tokens
	if f.content {
		m.chunks++
	}
	if f.hasIDs {
		m.idsSeen = true
		m.ids += f.ids
	}
	if f.hasUsage {
		m.usageSeen = true
		m.idsAtUsage, m.chunksAtUsage = m.ids, m.chunks
		m.usage = f.usage
		m.details = m.details[:0]
		if f.detailsEnd > 0 {
			m.details = append(m.details, data[f.details:f.detailsEnd]...)
		}
		if m.ask.Cached != OwnCached {
			m.usage.Cached = m.ask.Cached
		}
	}
	m.tokens, m.guessed = m.usage.Completion, !m.idsSeen && m.chunks > m.chunksAtUsage
	if m.idsSeen {
		m.tokens += m.ids - m.idsAtUsage
	} else {
		m.tokens += int(math.Round(float64(m.chunks-m.chunksAtUsage) * m.perChunk()))
	}
	if f.hasUsage && f.choices == 0 {
		m.reconciled, m.drift = true, before-f.usage.Completion
	}
}

// perChunk is how many tokens a chunk counts for, where the engine counts none.
func (m *Mirror) perChunk() float64 {
	if m.ask.TokensPerChunk <= 0 {
		return 1
	}
	return m.ask.TokensPerChunk
}

// judge decides what the client gets of the event. First it looks for a finish that does
// not end the answer well: recomputed, error or abort. Then it drops what only evenkeel
// asked for, and what the client already has from an earlier leg.
func (m *Mirror) judge(e Event, dst []byte) ([]byte, Verdict) {
	f := &m.facts
	finish := e.Data[f.finishAt:f.finishEnd]
	switch {
	case f.recomputed: // this counts whatever the finish_reason is
		m.started = true
		if !f.content {
			return nil, Recomputed
		}
		return m.edit(e, dst), Recomputed
	case string(finish) == "abort" && m.ask.Aborted != nil && m.ask.Aborted():
	case string(finish) == "error", string(finish) == "abort":
		m.failure = finishFailure(string(finish))
		return m.edit(e, dst), Failed
	}
	m.started = true
	if f.promptIDs > 0 {
		m.promptIDs = f.promptIDs
	}
	if len(finish) > 0 {
		m.finish, m.stopped, m.handsBack = finishReason(finish), f.stopText, f.backEnd > 0
	}
	if m.finish != "" && f.hasUsage {
		m.owe(e.Data)
	}
	if f.choices == 0 && f.hasUsage && (!m.ask.Usage || m.ask.DropFinalUsage) {
		return nil, Drop
	}
	if f.choices == 0 && f.hasUsage && m.ask.Trail != nil && m.finish == "" {
		return nil, Drop // the answer has not ended: the leg that goes on with it sends the usage
	}
	if f.choices == 1 && f.bare && f.hasIDs && !m.ask.TokenIDs && !m.continuous {
		return nil, Drop // the engine sends this chunk only because evenkeel asked for token ids
	}
	if m.ask.Seam != nil && f.choices == 1 && f.role && !f.content && f.ids == 0 && len(finish) == 0 {
		return nil, Drop // the client has the opening event already, from an earlier leg
	}
	m.usageSent = m.usageSent || f.hasUsage && (f.choices == 0 || m.continuous)
	return m.edit(e, dst), Forward
}

// owe keeps the final usage for a client that asked for it, if the engine sends it
// only with the finish_reason: OpenAI's clients do not look for it there.
func (m *Mirror) owe(data []byte) {
	f := &m.facts
	switch {
	case !m.ask.Usage || m.continuous || m.ask.DropFinalUsage:
		return
	case f.choices == 0:
		m.owed = m.owed[:0]
		return
	}
	var usage []byte
	m.owed = append(m.owed[:0], "data: {"...)
	o := rawjson.ObjectAt(data, rawjson.Space(data, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "choices":
		case "usage":
			usage = o.Value()
		default:
			m.owed = append(append(m.owed, data[o.Quote:o.Pos]...), ',')
		}
	}
	m.owed = append(append(append(m.owed, `"choices":[],"usage":`...), usage...), "}\n\n"...)
}

// Owed appends the event of the final usage, for an answer that came to its end
// without the engine sending one.
func (m *Mirror) Owed(dst []byte) []byte {
	if len(m.owed) == 0 {
		return dst
	}
	const head = len("data: ")
	e := Event{Raw: m.owed, Data: m.owed[head : len(m.owed)-2], Kind: KindData, at: head}
	out, _ := m.Event(e, dst)
	if len(out) > 0 && &out[0] == &e.Raw[0] {
		return append(dst, out...)
	}
	return out
}

// LacksUsage says that the client asked for the usage and has not got it, in an answer that does not go on with one of another leg. The
// usage of a chunk before the last is no final one: the client does not see it, because only evenkeel asked. With DropFinalUsage, the code
// that merges the legs reads the usage, and that of any chunk will do.
func (m *Mirror) LacksUsage() bool {
	told := m.usageSent || len(m.owed) > 0 || m.ask.DropFinalUsage && m.usageSeen
	return m.ask.Usage && !told && m.ask.Seam == nil
}

// Untrack stops adding events to Ask.Trail.
func (m *Mirror) Untrack() { m.ask.Trail = nil }

// Tokens is how many tokens this leg generated so far. It falls when the engine's
// usage is below the number that was estimated from its chunks.
func (m *Mirror) Tokens() int { return m.tokens }

// Empty tells whether this leg said nothing so far: no text, no reasoning, no call of a tool.
func (m *Mirror) Empty() bool { return m.chunks == 0 }

// Started tells whether a data event came that is not a failure. Then the decode engine
// has pulled the KV, and the prefill engine frees it.
func (m *Mirror) Started() bool { return m.started }

// Finished tells whether a finish_reason came that ends the answer well.
func (m *Mirror) Finished() bool { return m.finish != "" }

// Kept tells whether the answer has ended in a way in which an engine of vLLM may keep its KV. The engine keeps no KV of an answer
// that its front end ends at a stop text of the request (0.33, process_outputs in v1/engine/output_processor.py), or that ends for
// repetition (request_finished in nixl/pull_scheduler.py). From 0.33 on, the last chunk of a stream has kv_transfer_params if the
// engine keeps the KV.
func (m *Mirror) Kept() bool {
	return m.handsBack || !m.stopped && (m.finish == "stop" || m.finish == "length" || m.finish == "tool_calls")
}

// FinishReason is the finish_reason that ended the answer; empty: none came so far.
func (m *Mirror) FinishReason() string { return m.finish }

// Usage is the last usage that the engine sent, as the client gets it, with the tokens of
// earlier legs. ok is false while the engine sent none.
func (m *Mirror) Usage() (u Usage, ok bool) {
	if m.ask.Seam != nil && m.usageSeen {
		return m.ask.Seam.join(m.usage), true
	}
	return m.usage, m.usageSeen
}

// PromptDetails are the counts of the last usage's prompt_tokens_details, as the
// engine sent them.
func (m *Mirror) PromptDetails() (counts map[string]int) {
	addCounts(&counts, m.details)
	return counts
}

// Prompt is the length in tokens of the prompt this leg was given, as the
// engine counts; 0 while it has not said.
func (m *Mirror) Prompt() int {
	if m.usageSeen {
		return m.usage.Prompt
	}
	return m.promptIDs
}

// Failure is what the engine said where Event returned Failed.
func (m *Mirror) Failure() Failure { return m.failure }

// Fault is why Event returned Overrun or Unreadable.
func (m *Mirror) Fault() error { return m.fault }

// Drift is how many tokens more were counted than the engine's final usage then said;
// it is negative if fewer were. ok is false until the final usage came.
func (m *Mirror) Drift() (tokens int, ok bool) { return m.drift, m.reconciled }

const (
	// fewChunks is how many chunks a leg must have so that its average is used: a parser of
	// tools may hold back a whole call and send it as one chunk.
	fewChunks = 4
	// mostPerChunk bounds a leg's average: an engine that speculates makes about so many tokens in one step.
	mostPerChunk = 8
)

// TokensPerChunk returns the average number of tokens in a chunk, for the Ask of the next leg:
// before, which is the average up to this leg (0: 1), moved a tenth of the way to this leg's average.
// It returns before unchanged if the leg's true count is not known, or if the leg had few chunks.
func (m *Mirror) TokensPerChunk(before float64) float64 {
	exact := m.ids
	if m.usageSeen {
		exact = m.usage.Completion
	}
	if m.chunks < fewChunks || exact == 0 {
		return before
	}
	if before <= 0 {
		before = 1
	}
	seen := min(float64(exact)/float64(m.chunks), mostPerChunk)
	return before + (seen-before)/10
}

// finishReason is string(b) without an allocation for the reasons engines give.
func finishReason(b []byte) string {
	switch string(b) {
	case "stop":
		return "stop"
	case "length":
		return "length"
	case "tool_calls":
		return "tool_calls"
	case "repetition":
		return "repetition"
	case "content_filter":
		return "content_filter"
	}
	return string(b)
}

// keep adds the mirror's current event, whose data is b, to the trail.
func (t *Trail) keep(m *Mirror, b []byte) {
	f := &m.facts
	if t.Head.ID == nil {
		t.Head = readHead(b)
	}
	if f.idsAt > 0 {
		ids := rawjson.ArrayAt(b, f.idsAt)
		for ids.Next() {
			ids.Pos = rawjson.ValueEnd(b, ids.Val)
			id, ok := rawjson.Int(b, ids.Val, ids.Pos)
			t.Unread = t.Unread || !ok
			t.IDs = append(t.IDs, int32(id))
		}
	}
	if t.KeepPrompt && f.promptEnd > 0 {
		t.PromptIDs = append(t.PromptIDs[:0], b[f.promptAt:f.promptEnd]...)
	}
	t.Completed, t.Guessed = m.tokens, m.guessed
	if m.usageSeen {
		t.Prompt = m.usage.Prompt
	} else if f.promptIDs > 0 {
		t.Prompt = f.promptIDs
	}
	if f.backEnd > 0 {
		t.HandBack = append(t.HandBack[:0], b[f.backAt:f.backEnd]...)
	}
	if !f.content {
		return
	}
	t.Content, t.Shown = true, len(t.IDs)
	t.MoreThan = t.MoreThan || f.moreThan
	if f.textEnd > f.textAt {
		text := b[f.textAt+1 : f.textEnd-1]
		t.Runes += runes(text)
		if t.KeepText {
			t.Text = append(t.Text, text...)
		}
	}
}
