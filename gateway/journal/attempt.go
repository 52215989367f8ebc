package journal

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// showEvent adds an event to the receipt and to the spans of the attempt under way. It ignores a Failed if no attempt is under way, because
// there is no attempt to end.
func (r *Record) showEvent(e *Event) {
	current := &r.attempt
	if r.live == nil && !r.span.Recording() || e.Kind == Failed && !current.open {
		return
	}
	switch e.Kind {
	case Attempted:
		r.begin()
	case Placed, PlacedLocally:
		r.begin()
		e.decode = decodeOf(e.Slot)
	case Chose:
		e.prefill = prefillOf(e.Lease)
	case Entered:
		r.begin()
		r.enterPhase(e)
	case Failed:
		r.enterPhase(e)
	}
	r.live.Edit(func(x *receipt.Receipt) { r.toReceipt(x, e) })
	if r.span.Recording() {
		r.toSpans(e)
	}
	switch e.Kind {
	case Failed:
		current.open, current.call, current.span = false, nil, nil
	case Retried:
		current.retries = true
	}
}

// begin opens an attempt, unless an attempt is already under way.
func (r *Record) begin() {
	current := &r.attempt
	if current.open {
		return
	}
	now := time.Now()
	current.number++
	a := receipt.Attempt{N: current.number, Leg: r.leg, At: ms(now.Sub(r.Arrival))}
	if current.retries {
		a.Waits.Backoff = ms(now.Sub(current.since))
	}
	r.live.Edit(func(x *receipt.Receipt) { current.index = x.Begin(a) })
	current.span = r.span.Child("attempt", false)
	if current.span.Recording() {
		spanAttempt(current.span, current.number, r.leg)
	}
	current.open, current.retries, current.phase, current.since = true, false, "", now
}

// enterPhase ends the attempt's present phase: it adds the time of the phase to the receipt, and ends the phase's span. Then the event's
// phase begins. The event of a failure has no phase, so no phase begins.
func (r *Record) enterPhase(e *Event) {
	current, now := &r.attempt, time.Now()
	if current.phase != "" {
		r.live.Edit(func(x *receipt.Receipt) {
			if a := x.At(current.index); a != nil {
				*waitOf(&a.Waits, current.phase) += ms(now.Sub(current.since))
			}
		})
		spanFailed(current.phaseSpan, e.Answer, e.Cause)
		current.phaseSpan.End()
		current.phaseSpan = nil
	}
	current.phase, current.since = e.Phase, now
}

// toReceipt adds an event to the receipt.
func (r *Record) toReceipt(x *receipt.Receipt, e *Event) {
	switch {
	case e.Kind == Parsed && e.Req != nil:
		x.Model, x.Stream, x.Waits.Parse = words.Clip(e.Req.Model), e.Req.Stream, ms(e.Took)
	case e.Kind == Entered:
		x.State = string(e.Phase)
	}
	a := x.At(r.attempt.index)
	if a == nil {
		return
	}
	switch e.Kind {
	case Entered:
		a.State, a.Since = string(e.Phase), ms(r.attempt.since.Sub(x.Arrival))
		a.Engine, a.Peer = cmp.Or(e.Engine, a.Engine), cmp.Or(e.Peer, a.Peer)
	case Chose:
		a.Prefill = e.prefill
	case Prefilled:
		if a.Prefill != nil {
			p := *a.Prefill // a copy, because a reader of receipts may have the old value
			p.Prompt, p.Cached = e.Tokens, max(0, e.Cached)
			a.Prefill = &p
		}
	case Placed, PlacedLocally:
		a.Decode = e.decode
	case Failed:
		a.State, a.Cause, a.FailedOn, a.Status = receipt.Ended, words.Clip(e.Cause), e.On, e.Status
	case Retried:
		a.Again = true
	}
}

// toSpans adds an event as a span, or as a part of a span.
func (r *Record) toSpans(e *Event) {
	current := &r.attempt
	switch e.Kind {
	case Parsing:
		current.phaseSpan = r.span.Child("parse", false)
	case Parsed:
		current.phaseSpan.End()
		current.phaseSpan = nil
		if e.Req != nil {
			spanParsed(r, e.Req)
		}
	case Entered:
		if e.Call != "" {
			current.call = current.span.Child(e.Call, true)
		}
		current.phaseSpan = spanStep(current, e.Phase)
	case Chose:
		spanChose(current.phaseSpan, e.prefill)
	case Prefilled:
		spanPrefilled(current.phaseSpan, e.Tokens, e.Cached)
	case Placed, PlacedLocally:
		spanBound(cmp.Or(current.phaseSpan, current.span), e.decode) // phaseSpan is nil if the request was bound at once
	case First:
		current.call.Event("first token")
	case Failed:
		spanFailed(current.call, e.Answer, e.Cause)
		current.call.End()
		spanFailed(current.span, e.Answer, e.Cause)
		current.span.End()
	}
}

// prefillOf returns what a receipt says about the prefill engine of a lease, and why it was chosen.
func prefillOf(l *prefill.Lease) *receipt.Prefill {
	p := &receipt.Prefill{Candidate: l.Candidate.ID, Policy: l.Policy, Prompt: l.Prompt, Hit: l.HitTokens, Ahead: l.Others}
	if g := l.Trace; g != nil {
		p.Reason, p.Eligible, p.Best = g.Reason, g.Eligible, make([]receipt.Choice, len(g.Best))
		for i, c := range g.Best {
			p.Best[i] = receipt.Choice{Name: c.Candidate, Score: c.Score, Chosen: c.Chosen}
		}
	}
	return p
}

// boardStages are the names of the stages of the decision that may have chosen the decode rank (Slot.Stage).
var boardStages = [...]string{"guard", "single", "subset"}

// decodeOf returns what a receipt says about the decode rank of a slot, and why it was chosen.
func decodeOf(s *dispatcher.Slot) *receipt.Decode {
	d := &receipt.Decode{Rank: s.WorkerName, Group: s.Group, Policy: s.Policy, Score: s.Score, Decide: ms(s.Decide), Local: int(s.NewTokens)}
	if int(s.Stage) < len(boardStages) {
		d.Stage = boardStages[s.Stage]
	}
	g := s.Trace
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

// Carry adds the trace headers to the headers of a call to an engine, so that the engine can continue the trace.
func (r *Record) Carry(headers []engine.Header) []engine.Header {
	from := cmp.Or(r.attempt.call, r.attempt.phaseSpan, r.span)
	from.Carry(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
}

// EndAttempt closes the attempt with the error that the client got; nil: it got its whole answer. A request whose client left is counted
// only once.
func (r *Record) EndAttempt(fail *openai.Error) {
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
	r.Report(Event{Kind: Failed, Cause: cause, Answer: fail})
}
