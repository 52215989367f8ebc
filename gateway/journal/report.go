package journal

import (
	"cmp"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/openai"
)

// Report adds an event to the request's facts and metrics, and shows it in the views.
func (r *Record) Report(e Event) {
	r.countEvent(&e)
	r.showEvent(e)
	if e.Slot != nil {
		e.Slot.Trace = nil // the views have copied what they need, so the memory is freed before the answer streams
	}
}

// countEvent adds an event to the facts and metrics. It sets Took of a Parsed event. The fields that an event has set, and their meaning,
// depend on its kind (see EventKind).
func (r *Record) countEvent(e *Event) {
	g, slot := r.journal, e.Slot // slot is nil for kinds that set no Slot
	switch e.Kind {
	case Parsed:
		e.Took = time.Since(r.Arrival)
		g.observeStage(parse, e.Took)
		if e.Req != nil {
			r.Model = e.Req.Model
		}
	case Attempted:
		r.Attempts++
	case Entered:
		if r.Reached == "" || !e.Left { // a request whose client has left stays in the phase in which it left
			r.Reached = e.Phase
		}
		if e.Early {
			r.Bind, r.BindMs = AtArrival, ms(time.Since(r.Arrival))
		}
		if e.Engine != "" {
			r.Route, r.Engine = Passed, e.Engine
		}
		if e.Peer != "" {
			r.Peer = e.Peer
		}
	case Waited:
		g.observeStage(choose, e.Took)
		r.QueueMs += ms(e.Took)
	case Chose:
		r.Route, r.LocalTokens = Disaggregated, 0
		if e.Lease.Candidate.Aggregated {
			r.Route = Aggregated
		}
		r.Prefill, r.ProbeBS = e.Lease.Candidate.ID, e.Lease.Others // Others: this proxy's prefills that the engine had then
		r.PrefillPolicy, r.HitTokens = e.Lease.Policy, e.Lease.HitTokens
	case Probed:
		g.observeStage(probe, e.Took)
		r.ProbeMs += ms(e.Took)
	case Prefilled:
		if !e.Resumed { // a resumed prompt also has the answer so far, and the client's own prompt was counted before
			r.PromptTokens, r.CachedTokens = e.Tokens, max(0, e.Cached)
		}
	case Placed:
		g.observeStage(poolWait, slot.Wait)
		g.observeStage(decide, slot.Decide)
		r.Rank, r.Policy, r.Bind = slot.WorkerName, slot.Policy, Late
		r.WaitMs += ms(e.Took)
	case PlacedLocally:
		r.Route, r.Rank, r.Policy = Local, slot.WorkerName, slot.Policy
		r.LocalTokens, r.HitTokens = int(slot.NewTokens), e.Tokens
	case PlacedAggregated: // follows Placed, which has set the rank and the policy
		r.Bind, r.LocalTokens, r.HitTokens = AtArrival, int(slot.NewTokens), e.Tokens
	case Coupled:
		r.CallbackMs = ms(e.Took)
	case First:
		r.TTFTMs = ms(e.At.Sub(r.Arrival))
		g.ttft.Observe(e.At.Sub(r.Arrival).Seconds())
		if took := e.At.Sub(e.Sent); !e.Sent.IsZero() { // zero Sent: there was no decode call
			r.TransferMs = ms(took)
			g.observeStage(transfer, took)
		}
	case Relayed:
		r.OutputTokens = e.Tokens
		g.observeStage(relay, e.Took)
	case Paced:
		g.tpot.Observe(e.Took.Seconds() / float64(e.Tokens-1)) // n tokens have n-1 gaps
	case Freed:
		g.released[r.Reached].Observe(time.Since(e.At).Seconds())
	}
}

// showEvent shows an event in the views. It begins an attempt if the event needs one, and sets the time of events that begin or end a
// phase. It ignores an AttemptEnded event if no attempt is under way.
func (r *Record) showEvent(e Event) {
	current := &r.attempt
	hasNoView := r.views == [2]view{}
	endsNothing := e.Kind == AttemptEnded && !current.open
	if hasNoView || endsNothing {
		return
	}
	switch e.Kind {
	case Attempted:
		r.beginAttempt() // beginAttempt shows this event itself
		return
	case Placed, PlacedLocally: // a request that is bound at once has entered no phase before
		r.beginAttempt()
	case Entered:
		r.beginAttempt()
		e.At = time.Now()
	case AttemptEnded:
		e.At = time.Now()
	}
	r.passToViews(e)
	switch e.Kind {
	case Entered:
		current.phase, current.since = e.Phase, e.At
	case AttemptEnded:
		current.open, current.phase, current.since = false, "", e.At
	case Retried:
		current.willRetry = true
	}
}

// beginAttempt opens an attempt and shows it in the views, unless an attempt is already under way. The views get the event while r.attempt
// has the number of the new attempt, but still the times of the one before: they show how long ago that attempt failed.
func (r *Record) beginAttempt() {
	current := &r.attempt
	if current.open {
		return
	}
	now := time.Now()
	current.number++
	r.passToViews(Event{Kind: Attempted, At: now}) // before the next line, which overwrites when the last attempt failed
	current.open, current.willRetry, current.phase, current.since = true, false, "", now
}

// passToViews passes an event to the views that the request has.
func (r *Record) passToViews(e Event) {
	for _, v := range r.views {
		if v != nil {
			v.show(r, e)
		}
	}
}

// WithTraceHeaders adds the trace headers to the headers of a call to an engine, so that the engine can continue the trace. The engine's
// spans become children of the span of the call, or else of the phase, or else of the whole request. A request that is not traced has no
// trace headers.
func (r *Record) WithTraceHeaders(headers []engine.Header) []engine.Header {
	parent := cmp.Or(r.attempt.call, r.attempt.phaseSpan, r.span)
	parent.EachHeader(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
}

// EndAttempt closes the attempt with the error that the client got; nil: it got its whole answer. A request whose client left is counted
// only once.
func (r *Record) EndAttempt(fail *openai.Error) {
	cause := ""
	switch {
	case fail == nil: // the attempt did not fail, so it has no cause
	case fail.Status == StatusClientClosed:
		cause = "client_closed in phase " + string(r.Reached)
		if !r.leavingCounted {
			r.leavingCounted = true
			r.journal.cancels[r.Reached].Inc()
		}
	default:
		cause = Outcome(fail)
	}
	r.Report(Event{Kind: AttemptEnded, Cause: cause, Answer: fail})
}
