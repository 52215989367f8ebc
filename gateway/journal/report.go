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
	switch e.Kind {
	case Parsed:
		e.Took = time.Since(r.Arrival)
		r.journal.observeStage(parse, e.Took)
		if e.Req != nil { // nil: the body is no valid request
			r.Model = e.Req.Model
		}
	case Attempted:
		r.Attempts++
	case Entered:
		r.countPhase(e)
	case Waited, Chose, Probed, Prefilled:
		r.countPrefill(e)
	case Placed, PlacedLocally, PlacedAggregated, Coupled:
		r.countPlacement(e)
	case First, Relayed, Paced, Freed:
		r.countAnswer(e)
	}
}

// countPhase adds the begin of a phase (Entered) to the facts.
func (r *Record) countPhase(e *Event) {
	if r.Reached == "" || !e.Left { // a request whose client has left stays in the phase in which it left
		r.Reached = e.Phase
	}
	if e.Early { // the decode rank is bound before the prefill
		r.Bind, r.BindMs = AtArrival, ms(time.Since(r.Arrival))
	}
	if e.Engine != "" { // set only for a request that is passed through to this engine
		r.Route, r.Engine = Passed, e.Engine
	}
	if e.Peer != "" {
		r.Peer = e.Peer
	}
}

// countPrefill adds an event of a prefill to the facts and metrics.
func (r *Record) countPrefill(e *Event) {
	switch e.Kind {
	case Waited: // the wait for a turn at a prefill engine is over
		r.journal.observeStage(choose, e.Took)
		r.QueueMs += ms(e.Took)
	case Chose: // a prefill engine, or a group whose ranks prefill and decode (aggregated)
		r.Route, r.LocalTokens = Disaggregated, 0
		if e.Lease.Candidate.Aggregated {
			r.Route = Aggregated
		}
		r.Prefill, r.ProbeBS = e.Lease.Candidate.ID, e.Lease.Others // Others: this proxy's prefills that the engine had then
		r.PrefillPolicy, r.HitTokens = e.Lease.Policy, e.Lease.HitTokens
	case Probed: // the prefill engine has worked on the prompt for the time Took
		r.journal.observeStage(probe, e.Took)
		r.ProbeMs += ms(e.Took)
	case Prefilled: // Tokens and Cached are the engine's counts for the prompt; Cached below 0: not known
		if !e.Resumed { // a resumed prompt also has the answer so far, and the client's own prompt was counted before
			r.PromptTokens, r.CachedTokens = e.Tokens, max(0, e.Cached)
		}
	}
}

// countPlacement adds the choice of a decode rank to the facts and metrics. Facts are written when the request has ended, so a later event
// may correct them: if the rank was bound before the prefill, Placed sets Bind to Late, and then Entered (countPhase) or PlacedAggregated
// sets it to AtArrival.
func (r *Record) countPlacement(e *Event) {
	slot := e.Slot
	switch e.Kind {
	case Placed:
		// The metric has the time until a round bound the request. The facts have Took, which lasts until the request noticed that.
		r.journal.observeStage(poolWait, slot.Wait)
		r.journal.observeStage(decide, slot.Decide)
		r.Rank, r.Policy, r.Bind = slot.WorkerName, slot.Policy, Late
		r.WaitMs += ms(e.Took)
	case PlacedLocally: // the decode rank computes the prompt itself; Tokens are expected in its prefix cache
		r.Route, r.Rank, r.Policy = Local, slot.WorkerName, slot.Policy
		r.LocalTokens, r.HitTokens = int(slot.NewTokens), e.Tokens
	case PlacedAggregated: // the rank prefills and decodes; Placed came before, and has set the rank and the policy
		r.Bind, r.LocalTokens, r.HitTokens = AtArrival, int(slot.NewTokens), e.Tokens
	case Coupled: // the decode engine has said, after the time Took, where the KV goes
		r.CallbackMs = ms(e.Took)
	}
}

// countAnswer adds an event of the answer, or of its end, to the facts and metrics.
func (r *Record) countAnswer(e *Event) {
	g := r.journal
	switch e.Kind {
	case First: // At is when the first event of the answer came, and Sent when the decode call began
		r.TTFTMs = ms(e.At.Sub(r.Arrival))
		g.ttft.Observe(e.At.Sub(r.Arrival).Seconds())
		if took := e.At.Sub(e.Sent); !e.Sent.IsZero() { // zero Sent: there was no decode call
			r.TransferMs = ms(took)
			g.observeStage(transfer, took)
		}
	case Relayed: // the answer has ended
		r.OutputTokens = e.Tokens
		g.observeStage(relay, e.Took)
	case Paced: // Took is the time from the first tokens to the last ones
		g.tpot.Observe(e.Took.Seconds() / float64(e.Tokens-1)) // n tokens have n-1 gaps
	case Freed: // the client left at the time At, and only now its slot, KV and hand-off are free
		g.released[r.Reached].Observe(time.Since(e.At).Seconds())
	}
}

// showEvent shows an event in the views: the receipt and the trace of the request. It does three things one after the other. First, it
// begins an attempt if the event belongs to one and none is under way. Then it shows the event, with the present time if the event begins
// or ends a phase. Last, it notes in r.attempt what the event changes. The order matters, because views compare the event with the state
// before it. showEvent ignores an AttemptEnded event if no attempt is under way.
func (r *Record) showEvent(e Event) {
	current := &r.attempt
	hasNoView := r.views == [2]view{} // both are nil
	endsNothing := e.Kind == AttemptEnded && !current.open
	if hasNoView || endsNothing {
		return
	}
	switch e.Kind {
	case Attempted:
		r.beginAttempt() // beginAttempt shows this event itself
		return
	case Entered, Placed, PlacedLocally: // a request that is bound at once (Placed) has entered no phase before
		r.beginAttempt()
	}
	if e.Kind == Entered || e.Kind == AttemptEnded { // the other events that need a time have it already
		e.At = time.Now()
	}
	r.passToViews(e)
	current.note(&e)
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

// note notes what an event changes in the state of the attempt. Most events change nothing.
func (a *attempt) note(e *Event) {
	switch e.Kind {
	case Entered:
		a.phase, a.since = e.Phase, e.At
	case AttemptEnded:
		a.open, a.phase, a.since = false, "", e.At
	case Retried:
		a.willRetry = true
	}
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
