package journal

import (
	"cmp"
	"math"

	"evenkeel/dispatcher"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

type receiptView struct{ running *receipt.RunningReceipt }

// openReceipt is for a request whose sender was identified.
func openReceipt(ring *receipt.Ring, r *Record) view {
	return receiptView{ring.Open(&receipt.Receipt{
		ID: r.ID, ClientID: r.ClientID, TraceID: r.TraceID, Key: r.Key, Endpoint: r.path, Arrival: r.Arrival, Origin: r.Origin,
		State:    stageNames[parse],
		Attempts: make([]receipt.Attempt, 0, 1),
	})}
}

func (s receiptView) show(r *Record, e Event) {
	if e.Kind == ended {
		s.running.End(func(to *receipt.Receipt) { addToReceipt(to, r, &e) })
	} else {
		s.running.Edit(func(to *receipt.Receipt) { addToReceipt(to, r, &e) })
	}
}

// addToReceipt adds an event to the receipt and its attempt, if it still has that. Times are ms
// since the arrival. r.attempt still has the state before the event; only at Attempted it has the
// new number already. r.leg is empty for the whole request.
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
		if !e.At.IsZero() { // the caller's deadline for the first token
			to.Deadline = ms(e.At.Sub(r.Arrival))
		}
	case Attempted:
		a := receipt.Attempt{N: r.attempt.number, Leg: r.leg, At: ms(e.At.Sub(r.Arrival))}
		if r.attempt.willRetry { // since is when the attempt before ended
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

// addToAttempt: an event that ends a phase adds its duration to a.Waits.
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
			p := *a.Prefill // a reader of receipts may have the old value
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

func prefillOf(l *prefill.Lease) *receipt.Prefill {
	p := &receipt.Prefill{Candidate: l.Candidate.ID, Policy: l.Policy, Prompt: l.Prompt, Hit: l.HitTokens, Ahead: l.Others}
	if trace := l.Trace; trace != nil { // nil: not traced
		p.Reason, p.Eligible, p.Best = trace.Reason, trace.Eligible, make([]receipt.Choice, len(trace.Best))
		for i, c := range trace.Best {
			p.Best[i] = receipt.Choice{Name: c.Candidate, Score: c.Score, Chosen: c.Chosen}
		}
	}
	return p
}

// decodeOf: the state of the ranks and the best ones come from the trace; without one they are left
// out.
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
	scores := make([]float64, len(best)) // one allocation for all
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
