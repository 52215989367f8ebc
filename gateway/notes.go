package gateway

import (
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

// notes are what a job tells of itself while it runs: an attempt of its receipt
// and the spans of it. Only the goroutine that serves the job writes them.
type notes struct {
	open   bool      // an attempt is under way
	number int       // of it, or of the last one
	index  int       // in the receipt; -1: not kept
	phase  phase     // its present step; empty: between two
	since  time.Time // of the step, or of the last failure
	again  bool      // the last attempt failed, and this is the next

	attempt *tracing.Span
	call    *tracing.Span // to a decode engine or another region; nil: none is under way
	step    *tracing.Span
}

// watched says whether anybody wants to know.
func (r *record) watched() bool { return r.live != nil || r.span != nil }

// witness opens the receipt and the span of a request whose sender is known.
func (g *Gateway) witness(ctx *fasthttp.RequestCtx, rec *record, ep mooncake.Endpoint, trusted bool) {
	if t := g.tracer.Load(); t != nil {
		header := func(name string) string { return string(ctx.Request.Header.Peek(name)) }
		rec.span = t.Start(header, trusted, operation(ep), rec.Arrival)
		rec.TraceID = rec.span.TraceID()
	}
	if g.receipts != nil {
		rec.live = g.receipts.Open(&receipt.Receipt{
			ID: rec.ID, ClientID: rec.ClientID, TraceID: rec.TraceID, Key: rec.Key, Endpoint: ep.Path(), Arrival: rec.Arrival, Origin: rec.Origin, State: stageParse,
			Attempts: make([]receipt.Attempt, 0, 1),
		})
	}
	if rec.span.Recording() {
		spanArrived(rec, ep)
	}
}

// parsed notes what the request turned out to be.
func (r *record) parsed(req *openai.Request) {
	if req == nil {
		return
	}
	if took := ms(time.Since(r.Arrival)); r.live != nil {
		r.live.Note(func(x *receipt.Receipt) { x.Model, x.Stream, x.Waits.Parse = receipt.Clip(req.Model), req.Stream, took })
	}
	if r.span.Recording() {
		spanParsed(r.span, req)
	}
}

// begin opens an attempt, unless one is under way.
func (j *job) begin() {
	n := &j.notes
	if n.open || !j.rec.watched() {
		return
	}
	now := time.Now()
	n.number++
	if j.rec.live != nil {
		a := receipt.Attempt{N: n.number, Leg: j.legName(), At: ms(now.Sub(j.arrive))}
		j.rec.live.Note(func(r *receipt.Receipt) { n.index = r.Begin(a) })
		if n.again {
			j.note(func(a *receipt.Attempt) { a.Waits.Backoff = ms(now.Sub(n.since)) })
		}
	}
	n.attempt = j.rec.span.Child("attempt", false)
	if n.attempt.Recording() {
		spanAttempt(n.attempt, n.number, j.legName())
	}
	n.open, n.again, n.phase, n.since = true, false, "", now
}

// note adds to the receipt's present attempt.
func (j *job) note(add func(*receipt.Attempt)) {
	if j.rec.live == nil {
		return
	}
	j.rec.live.Note(func(r *receipt.Receipt) {
		if a := r.At(j.notes.index); a != nil {
			add(a)
		}
	})
}

// legName tells the legs of a fan-out apart; empty: it is none.
func (j *job) legName() string {
	if !j.isLeg() {
		return ""
	}
	_, name, _ := strings.Cut(j.id, "-")
	return name
}

// enter notes that the next phase began.
func (j *job) enter(p phase) {
	if !j.rec.watched() {
		return
	}
	j.begin()
	j.leave()
	n := &j.notes
	n.phase, n.since = p, time.Now()
	if j.rec.live != nil {
		j.rec.live.Note(func(r *receipt.Receipt) {
			r.State = string(p)
			if a := r.At(n.index); a != nil {
				a.State, a.Since = string(p), ms(n.since.Sub(r.Arrival))
			}
		})
	}
	n.step = spanStep(n, p)
}

// leave ends the present step.
func (j *job) leave() {
	n := &j.notes
	if n.phase == "" {
		return
	}
	p, took := n.phase, ms(time.Since(n.since))
	n.phase = ""
	if j.rec.live != nil {
		j.note(func(a *receipt.Attempt) { *waitOf(&a.Waits, p) += took })
	}
	n.step.End()
	n.step = nil
}

// waitOf is where a receipt has the time of a phase.
func waitOf(w *receipt.Waits, p phase) *float64 {
	switch p {
	case phaseQueued:
		return &w.Queue
	case phasePrefill:
		return &w.Prefill
	case phasePooled:
		return &w.Pool
	case phaseTransfer:
		return &w.Transfer
	default:
		return &w.Relay
	}
}

// calls begins the call that the next phases are part of.
func (j *job) calls(name string) {
	if j.rec.span != nil {
		j.begin()
		j.leave()
		j.notes.call = j.notes.attempt.Child(name, true)
	}
}

// carry adds the trace to the headers of a call: of the one that calls began,
// else of the present step.
func (j *job) carry(headers []engine.Header) []engine.Header {
	if j.rec.span == nil {
		return headers
	}
	from := j.notes.call
	if from == nil {
		from = j.notes.step
	}
	from.Carry(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
}

// chose notes which prefill engine a request got, and why.
func (j *job) chose(l *prefill.Lease) {
	if j.rec.live != nil {
		p := &receipt.Prefill{Candidate: l.Candidate.ID, Policy: l.Policy, Hit: l.HitTokens, Ahead: l.Others}
		if g := l.Grounds; g != nil {
			p.Reason, p.Eligible = g.Reason, g.Eligible
			p.Best = choices(g.Best)
		}
		j.note(func(a *receipt.Attempt) { a.Prefill = p })
	}
	if j.notes.step.Recording() {
		spanChose(j.notes.step, l)
	}
}

func choices(rows []policy.Row) []receipt.Choice {
	list := make([]receipt.Choice, len(rows))
	for i, r := range rows {
		list[i] = receipt.Choice{Name: r.Candidate, Score: r.Score, Chosen: r.Chosen}
	}
	return list
}

// prefilled notes what the engine did for it.
func (j *job) prefilled(got *mooncake.ProbeAnswer) {
	j.note(func(a *receipt.Attempt) {
		if a.Prefill != nil {
			p := *a.Prefill // readers may have the other
			p.Prompt, p.Cached = got.PromptTokens, max(0, got.CachedTokens)
			a.Prefill = &p
		}
	})
	if j.notes.step.Recording() {
		spanPrefilled(j.notes.step, got)
	}
}

// bound notes which decode rank a request got, and why.
func (j *job) bound(s *dispatcher.Slot) {
	if !j.rec.watched() {
		return
	}
	j.begin()
	if j.rec.live != nil {
		d := decodeOf(s)
		j.note(func(a *receipt.Attempt) { a.Decode = d })
	}
	at := j.notes.step
	if at == nil { // bound at once
		at = j.notes.attempt
	}
	if at.Recording() {
		spanBound(at, s)
	}
}

var stages = [...]string{"guard", "single", "subset"}

func decodeOf(s *dispatcher.Slot) *receipt.Decode {
	d := &receipt.Decode{Rank: s.WorkerName, Group: s.Group, Policy: s.Policy, Score: s.Score, Decide: ms(s.Decide), Local: s.NewTokens}
	if int(s.Stage) < len(stages) {
		d.Stage = stages[s.Stage]
	}
	g := s.Grounds
	if g == nil {
		return d
	}
	d.Tick, d.Waiting, d.KVTokens, d.Fullest, d.Able = g.Tick, g.Waiting, g.KVTokens, g.Fullest, g.Able
	best := g.Best()
	d.Best = make([]receipt.Choice, len(best))
	for i, w := range best {
		c := receipt.Choice{Name: w.Name, KVTokens: w.KVTokens, Free: w.Free, Chosen: w.Worker == s.Worker}
		if !math.IsNaN(w.Score) {
			c.Score = &w.Score
			d.Better = "more"
			if g.Less {
				d.Better = "less"
			}
		}
		d.Best[i] = c
	}
	return d
}

// fails ends an attempt that was in vain.
func (j *job) fails(cause string, status int, answer *openai.Error) {
	n := &j.notes
	if !n.open {
		return
	}
	if n.step.Recording() {
		spanFailed(n.step, answer, cause)
	}
	j.leave()
	j.note(func(a *receipt.Attempt) { a.State, a.Cause, a.Status = receipt.Ended, receipt.Clip(cause), status })
	for _, s := range [...]*tracing.Span{n.call, n.attempt} {
		if s.Recording() {
			spanFailed(s, answer, cause)
		}
		s.End()
	}
	n.open, n.call, n.attempt, n.since = false, nil, nil, time.Now()
}

// retries notes that another attempt follows.
func (j *job) retries() {
	if j.rec.watched() {
		j.note(func(a *receipt.Attempt) { a.Again = true })
		j.notes.again = true
	}
}

// ends closes what is open, with what the client got.
func (j *job) ends(fail *openai.Error) {
	n := &j.notes
	if fail != nil {
		cause := outcomeOf(fail)
		if fail.Status == statusGone {
			cause = "client_closed in phase " + string(j.phase)
		}
		j.fails(cause, 0, fail)
		return
	}
	if !n.open {
		return
	}
	j.leave()
	j.note(func(a *receipt.Attempt) { a.State = receipt.Ended })
	n.call.End()
	n.attempt.End()
	n.open, n.call, n.attempt = false, nil, nil
}

// tell closes the receipt and the span of a request that ended.
func (r *record) tell(fail *openai.Error) {
	if r.live != nil {
		r.live.End(func(x *receipt.Receipt) {
			x.Outcome, x.Route, x.Peer = r.Outcome, r.Route, r.Peer
			x.PromptTokens, x.CachedTokens, x.OutputTokens = r.PromptTokens, r.CachedTokens, r.OutputTokens
			x.TTFT, x.Total = r.TTFTMs, r.TotalMs
			if fail != nil {
				x.Status = fail.Status
			}
		})
	}
	if r.span.Recording() {
		status := http.StatusOK
		if fail != nil && r.TTFTMs == 0 { // else the answer had begun
			status = fail.Status
		}
		spanEnded(r, fail, status)
	}
	r.span.End()
}

// MarshalLogObject names the job in the log.
func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.rec.TraceID != "" {
		enc.AddString("trace_id", j.rec.TraceID)
	}
	return nil
}
