package journal

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Attempt counts one more attempt.
func (r *Request) Attempt() {
	r.Attempts++
	r.startAttempt()
}

// startAttempt opens an attempt, unless one is under way.
func (r *Request) startAttempt() {
	n := &r.attempt
	if n.open || !r.watched() {
		return
	}
	now := time.Now()
	n.number++
	if r.live != nil {
		a := receipt.Attempt{N: n.number, Leg: r.leg, At: ms(now.Sub(r.Arrival))}
		r.live.Edit(func(x *receipt.Receipt) { n.index = x.Begin(a) })
		if n.again {
			r.edit(func(a *receipt.Attempt) { a.Waits.Backoff = ms(now.Sub(n.since)) })
		}
	}
	n.span = r.span.Child("attempt", false)
	if n.span.Recording() {
		spanAttempt(n.span, n.number, r.leg)
	}
	n.open, n.again, n.phase, n.since = true, false, "", now
}

// edit adds to the present attempt of the receipt.
func (r *Request) edit(add func(*receipt.Attempt)) {
	if r.live == nil {
		return
	}
	r.live.Edit(func(x *receipt.Receipt) {
		if a := x.At(r.attempt.index); a != nil {
			add(a)
		}
	})
}

// Reach begins a phase. A request whose client has left stays in the phase in which the client left.
func (r *Request) Reach(p Phase, left bool) {
	r.Enter(p)
	if r.Reached == "" || !left {
		r.Reached = p
	}
}

// Enter begins a phase.
func (r *Request) Enter(p Phase) {
	if !r.watched() {
		return
	}
	r.startAttempt()
	r.endStep()
	n := &r.attempt
	n.phase, n.since = p, time.Now()
	if r.live != nil {
		r.live.Edit(func(x *receipt.Receipt) {
			x.State = string(p)
			if a := x.At(n.index); a != nil {
				a.State, a.Since = string(p), ms(n.since.Sub(x.Arrival))
			}
		})
	}
	n.step = spanStep(n, p)
}

// endStep ends the present step.
func (r *Request) endStep() {
	n := &r.attempt
	if n.phase == "" {
		return
	}
	p, took := n.phase, ms(time.Since(n.since))
	n.phase = ""
	if r.live != nil {
		r.edit(func(a *receipt.Attempt) { *waitOf(&a.Waits, p) += took })
	}
	n.step.End()
	n.step = nil
}

// Calls begins the call that the next phases are part of.
func (r *Request) Calls(name string) {
	if r.span != nil {
		r.startAttempt()
		r.endStep()
		r.attempt.call = r.attempt.span.Child(name, true)
	}
}

// Carry adds the trace to the headers of a call: of the one that Calls began, else
// of the present step.
func (r *Request) Carry(headers []engine.Header) []engine.Header {
	if r.span == nil {
		return headers
	}
	from := cmp.Or(r.attempt.call, r.attempt.step)
	from.Carry(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
}

func (r *Request) tellChosen(l *prefill.Lease) {
	if r.live == nil && !r.attempt.step.Recording() {
		return
	}
	p := &receipt.Prefill{Candidate: l.Candidate.ID, Policy: l.Policy, Hit: l.HitTokens, Ahead: l.Others}
	if g := l.Grounds; g != nil {
		p.Reason, p.Eligible, p.Best = g.Reason, g.Eligible, make([]receipt.Choice, len(g.Best))
		for i, c := range g.Best {
			p.Best[i] = receipt.Choice{Name: c.Candidate, Score: c.Score, Chosen: c.Chosen}
		}
	}
	r.edit(func(a *receipt.Attempt) { a.Prefill = p })
	if r.attempt.step.Recording() {
		spanChose(r.attempt.step, p)
	}
}

func (r *Request) tellPrefilled(got *mooncake.ProbeAnswer) {
	r.edit(func(a *receipt.Attempt) {
		if a.Prefill != nil {
			p := *a.Prefill // a reader may have the old one
			p.Prompt, p.Cached = got.PromptTokens, max(0, got.CachedTokens)
			a.Prefill = &p
		}
	})
	if r.attempt.step.Recording() {
		spanPrefilled(r.attempt.step, got)
	}
}

func (r *Request) tellBound(s *dispatcher.Slot) {
	defer func() { s.Grounds = nil }() // as long as the answer runs only the receipt has them
	if !r.watched() {
		return
	}
	r.startAttempt()
	at := cmp.Or(r.attempt.step, r.attempt.span) // without a step it is bound at once
	if r.live == nil && !at.Recording() {
		return
	}
	d := decodeOf(s)
	r.edit(func(a *receipt.Attempt) { a.Decode = d })
	if at.Recording() {
		spanBound(at, d)
	}
}

var boardStages = [...]string{"guard", "single", "subset"}

func decodeOf(s *dispatcher.Slot) *receipt.Decode {
	d := &receipt.Decode{Rank: s.WorkerName, Group: s.Group, Policy: s.Policy, Score: s.Score, Decide: ms(s.Decide), Local: int(s.NewTokens)}
	if int(s.Stage) < len(boardStages) {
		d.Stage = boardStages[s.Stage]
	}
	g := s.Grounds
	if g == nil {
		return d
	}
	d.Tick, d.Waiting, d.KVTokens, d.Fullest, d.Able = g.Tick, g.Waiting, g.KVTokens, g.Fullest, g.Able
	best := g.Best()
	d.Best = make([]receipt.Choice, len(best))
	scores := make([]float64, len(best))
	for i, w := range best {
		c := receipt.Choice{Name: w.Name, KVTokens: w.KVTokens, Free: w.Free, Chosen: w.Worker == s.Worker}
		if !math.IsNaN(w.Score) {
			scores[i] = w.Score
			c.Score = &scores[i]
			d.Better = "more"
			if g.Less {
				d.Better = "less"
			}
		}
		d.Best[i] = c
	}
	return d
}

// Fails ends an attempt that was in vain, with what a client would get; nil: it was not.
func (r *Request) Fails(cause string, status int, answer *openai.Error) {
	n := &r.attempt
	if !n.open {
		return
	}
	spanFailed(n.step, answer, cause)
	r.endStep()
	r.edit(func(a *receipt.Attempt) { a.State, a.Cause, a.Status = receipt.Ended, receipt.Clip(cause), status })
	for _, s := range [...]*tracing.Span{n.call, n.span} {
		spanFailed(s, answer, cause)
		s.End()
	}
	n.open, n.call, n.span, n.since = false, nil, nil, time.Now()
}

// Retries records that another attempt follows.
func (r *Request) Retries() {
	if r.watched() {
		r.edit(func(a *receipt.Attempt) { a.Again = true })
		r.attempt.again = true
	}
}

// EndAttempt closes the attempt with what the client got; nil: its whole answer. A request
// is counted once among those whose client left.
func (r *Request) EndAttempt(fail *openai.Error) {
	cause := ""
	switch {
	case fail == nil:
	case fail.Status == StatusClientClosed:
		cause = "client_closed in phase " + string(r.Reached)
		if !r.counted {
			r.counted = true
			r.journal.cancels[r.Reached].Inc()
		}
	default:
		cause = Outcome(fail)
	}
	r.Fails(cause, 0, fail)
}
