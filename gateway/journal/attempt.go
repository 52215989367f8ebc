package journal

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/prefill"
)

// showEvent adds an event to the attempt that is under way: in the receipt and the spans. Without an attempt under way, a Failed is left
// out: there is none to end.
func (r *Request) showEvent(e *Event) {
	n := &r.attempt
	if r.live == nil && !r.span.Recording() || e.What == Failed && !n.open {
		return
	}
	switch e.What {
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
	switch e.What {
	case Failed:
		n.open, n.call, n.span = false, nil, nil
	case Retried:
		n.retries = true
	}
}

// begin opens an attempt, unless one is under way.
func (r *Request) begin() {
	n := &r.attempt
	if n.open {
		return
	}
	now := time.Now()
	n.number++
	a := receipt.Attempt{N: n.number, Leg: r.leg, At: ms(now.Sub(r.Arrival))}
	if n.retries {
		a.Waits.Backoff = ms(now.Sub(n.since))
	}
	r.live.Edit(func(x *receipt.Receipt) { n.index = x.Begin(a) })
	if n.span = r.span.Child("attempt", false); n.span.Recording() {
		spanAttempt(n.span, n.number, r.leg)
	}
	n.open, n.retries, n.phase, n.since = true, false, "", now
}

// enterPhase ends the attempt's present phase: its time goes to the receipt, and its span ends. Then the event's phase begins. After a
// failure the event has no phase, so none begins.
func (r *Request) enterPhase(e *Event) {
	n, now := &r.attempt, time.Now()
	if n.phase != "" {
		r.live.Edit(func(x *receipt.Receipt) {
			if a := x.At(n.index); a != nil {
				*waitOf(&a.Waits, n.phase) += ms(now.Sub(n.since))
			}
		})
		spanFailed(n.phaseSpan, e.Answer, e.Cause)
		n.phaseSpan.End()
		n.phaseSpan = nil
	}
	n.phase, n.since = e.Phase, now
}

// toReceipt adds an event to the receipt.
func (r *Request) toReceipt(x *receipt.Receipt, e *Event) {
	switch {
	case e.What == Parsed && e.Req != nil:
		x.Model, x.Stream, x.Waits.Parse = receipt.Clip(e.Req.Model), e.Req.Stream, ms(e.Took)
	case e.What == Entered:
		x.State = string(e.Phase)
	}
	a := x.At(r.attempt.index)
	if a == nil {
		return
	}
	switch e.What {
	case Entered:
		a.State, a.Since = string(e.Phase), ms(r.attempt.since.Sub(x.Arrival))
		a.Engine, a.Peer = cmp.Or(e.Engine, a.Engine), cmp.Or(e.Peer, a.Peer)
	case Chose:
		a.Prefill = e.prefill
	case Prefilled:
		if a.Prefill != nil {
			p := *a.Prefill // a reader may have the old one
			p.Prompt, p.Cached = e.Tokens, max(0, e.Cached)
			a.Prefill = &p
		}
	case Placed, PlacedLocally:
		a.Decode = e.decode
	case Failed:
		a.State, a.Cause, a.FailedOn, a.Status = receipt.Ended, receipt.Clip(e.Cause), e.On, e.Status
	case Retried:
		a.Again = true
	}
}

// toSpans adds an event as a span, or as a part of a span.
func (r *Request) toSpans(e *Event) {
	n := &r.attempt
	switch e.What {
	case Parsing:
		n.phaseSpan = r.span.Child("parse", false)
	case Parsed:
		n.phaseSpan.End()
		n.phaseSpan = nil
		if e.Req != nil {
			spanParsed(r, e.Req)
		}
	case Entered:
		if e.Call != "" {
			n.call = n.span.Child(e.Call, true)
		}
		n.phaseSpan = spanStep(n, e.Phase)
	case Chose:
		spanChose(n.phaseSpan, e.prefill)
	case Prefilled:
		spanPrefilled(n.phaseSpan, e.Tokens, e.Cached)
	case Placed, PlacedLocally:
		spanBound(cmp.Or(n.phaseSpan, n.span), e.decode) // without a step it is bound at once
	case First:
		n.call.Event("first token")
	case Failed:
		spanFailed(n.call, e.Answer, e.Cause)
		n.call.End()
		spanFailed(n.span, e.Answer, e.Cause)
		n.span.End()
	}
}

// prefillOf is what a receipt says of the prefill engine that a lease is on, and of the choice.
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

// boardStages are the names of the stages at which the decode rank may have been chosen (Slot.Stage).
var boardStages = [...]string{"guard", "single", "subset"}

// decodeOf is what a receipt says of the decode rank that a slot is on, and of the choice.
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

// Carry adds the headers by which an engine continues the trace to the headers of a call to it.
func (r *Request) Carry(headers []engine.Header) []engine.Header {
	from := cmp.Or(r.attempt.call, r.attempt.phaseSpan, r.span)
	from.Carry(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
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
	r.Report(Event{What: Failed, Cause: cause, Answer: fail})
}
