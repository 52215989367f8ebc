package journal

import (
	"cmp"
	"math"

	"evenkeel/dispatcher"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// receiptView is the view that writes what happens to a request into its receipt.
type receiptView struct{ running *receipt.RunningReceipt }

// openReceipt begins the receipt of a request whose sender has been identified.
func openReceipt(ring *receipt.Ring, r *Record) view {
	return receiptView{ring.Open(&receipt.Receipt{
		ID: r.ID, ClientID: r.ClientID, TraceID: r.TraceID, Key: r.Key, Endpoint: r.path, Arrival: r.Arrival, Origin: r.Origin,
		State:    stageNames[parse],
		Attempts: make([]receipt.Attempt, 0, 1),
	})}
}

// show updates the receipt for an event, and closes the receipt if e.Kind is ended.
func (s receiptView) show(r *Record, e Event) {
	if e.Kind == ended {
		s.running.End(func(to *receipt.Receipt) { addToReceipt(to, r, &e) })
	} else {
		s.running.Edit(func(to *receipt.Receipt) { addToReceipt(to, r, &e) })
	}
}

// addToReceipt adds an event to the receipt, and to the attempt under way, if the receipt still has that attempt. Apart from the arrival
// itself, points in time are written as ms since the arrival of the request. r.attempt is what the record keeps of the attempt under way.
// It still has the state before the event, with one exception: at the event Attempted, which begins an attempt, it has the number of the
// new attempt already, and still the state in which the attempt before ended. r.leg is the part of a fanned-out request to which the
// attempt belongs; empty: the whole request.
func addToReceipt(to *receipt.Receipt, r *Record, e *Event) {
	switch e.Kind {
	case Parsed:
		if e.Req != nil { // nil: the body is no valid request
			to.Model, to.Stream, to.Waits.Parse = words.Clip(e.Req.Model), e.Req.Stream, ms(e.Took)
		}
	case scheduled:
		to.Priority = e.priority
		if e.batch {
			to.Class = "batch"
		}
		if !e.At.IsZero() { // At is the deadline that the caller gave for the first token
			to.Deadline = ms(e.At.Sub(r.Arrival))
		}
	case Attempted:
		a := receipt.Attempt{N: r.attempt.number, Leg: r.leg, At: ms(e.At.Sub(r.Arrival))}
		if r.attempt.willRetry { // the attempt before has failed, and since is when it ended
			a.Waits.Backoff = ms(e.At.Sub(r.attempt.since))
		}
		to.AddAttempt(a)
	case ended:
		to.Outcome, to.Route, to.Peer = r.Outcome, r.Route, r.Peer
		to.PromptTokens, to.CachedTokens, to.OutputTokens = r.PromptTokens, r.CachedTokens, r.OutputTokens
		to.TTFT, to.Total = r.TTFTMs, r.TotalMs
		if e.Answer != nil {
			to.Status = e.Answer.Status
		}
	case Entered:
		to.State = string(e.Phase)
	}
	if a := to.FindAttempt(r.leg, r.attempt.number); a != nil {
		addToAttempt(a, r, e)
	}
}

// addToAttempt adds an event to an attempt of the receipt. An event that ends a phase adds the duration of the phase to a.Waits, in ms.
func addToAttempt(a *receipt.Attempt, r *Record, e *Event) {
	endsPhase := e.Kind == Entered || e.Kind == AttemptEnded
	if phase := r.attempt.phase; phase != "" && endsPhase { // since is when the phase began
		*waitOf(&a.Waits, phase) += ms(e.At.Sub(r.attempt.since))
	}
	switch e.Kind {
	case Entered:
		a.State, a.Since = string(e.Phase), ms(e.At.Sub(r.Arrival))
		a.Engine, a.Peer = cmp.Or(e.Engine, a.Engine), cmp.Or(e.Peer, a.Peer)
	case Chose:
		a.Prefill = prefillOf(e.Lease)
	case Prefilled:
		if a.Prefill != nil {
			p := *a.Prefill // a copy, because a reader of receipts may have the old value
			p.Prompt, p.Cached = e.Tokens, max(0, e.Cached)
			a.Prefill = &p
		}
	case Placed, PlacedLocally:
		a.Decode = decodeOf(e.Slot)
	case AttemptEnded:
		a.State, a.Cause, a.FailedOn, a.Status = receipt.Ended, words.Clip(e.Cause), e.On, e.Status
	case Retried:
		a.Again = true
	}
}

// waitOf returns the field of a receipt that has the time of a phase.
func waitOf(w *receipt.Waits, p Phase) *float64 {
	switch p {
	case Queued:
		return &w.Queue
	case Prefill:
		return &w.Prefill
	case Pooled:
		return &w.Pool
	case Transfer:
		return &w.Transfer
	default:
		return &w.Relay
	}
}

// prefillOf returns what a receipt says about the prefill engine of a lease, and why it was chosen.
func prefillOf(l *prefill.Lease) *receipt.Prefill {
	p := &receipt.Prefill{Candidate: l.Candidate.ID, Policy: l.Policy, Prompt: l.Prompt, Hit: l.HitTokens, Ahead: l.Others}
	if trace := l.Trace; trace != nil { // nil: decisions are not traced
		p.Reason, p.Eligible, p.Best = trace.Reason, trace.Eligible, make([]receipt.Choice, len(trace.Best))
		for i, c := range trace.Best {
			p.Best[i] = receipt.Choice{Name: c.Candidate, Score: c.Score, Chosen: c.Chosen}
		}
	}
	return p
}

// decodeOf returns what a receipt says about the decode rank of a slot, and why it was chosen. Local is how many prompt tokens the rank has
// to compute itself. From the trace of the decision come the state of the ranks at that moment, such as how many could have taken the
// request (Able), and the best ranks. Without a trace these are left out.
func decodeOf(s *dispatcher.Slot) *receipt.Decode {
	d := &receipt.Decode{Rank: s.WorkerName, Group: s.Group, Policy: s.Policy, Stage: stageOf(s), Score: s.Score, Decide: ms(s.Decide),
		Local: int(s.NewTokens)}
	trace := s.Trace
	if trace == nil {
		return d
	}
	d.Tick, d.Waiting, d.KVTokens, d.Fullest, d.Able = trace.Tick, trace.Waiting, trace.KVTokens, trace.Fullest, trace.Able
	best := trace.Best()
	d.Best = make([]receipt.Choice, len(best))
	scores := make([]float64, len(best)) // the choices point into scores, which takes one allocation for all
	for i, w := range best {
		c := receipt.Choice{Name: w.Name, KVTokens: w.KVTokens, Free: w.Free, Chosen: w.Worker == s.Worker}
		if !math.IsNaN(w.Score) { // NaN: scores were not compared
			scores[i] = w.Score
			c.Score = &scores[i]
			d.Better = "more"
			if trace.LowerIsBetter {
				d.Better = "less"
			}
		}
		d.Best[i] = c
	}
	return d
}
