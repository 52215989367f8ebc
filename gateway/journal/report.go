package journal

import (
	"cmp"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/openai"
)

// Report adds an event to the facts, the metrics and the views.
func (r *Record) Report(e Event) {
	r.countEvent(&e)
	r.showEvent(e)
	if e.Slot != nil {
		e.Slot.Trace = nil // the views have copied it: the memory is freed before the answer streams
	}
}

// countEvent adds an event to the facts and metrics, and sets Took of Parsed. EventKind says which
// fields are set.
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

func (r *Record) countPhase(e *Event) {
	if r.Reached == "" || !e.Left { // once the client has left, its phase stays
		r.Reached = e.Phase
	}
	if e.Early { // the decode rank is bound before the prefill
		r.Bind, r.BindMs = AtArrival, ms(time.Since(r.Arrival))
	}
	if e.Engine != "" { // a request that is passed through to this engine
		r.Route, r.Engine = Passed, e.Engine
	}
	if e.Peer != "" {
		r.Peer = e.Peer
	}
}

func (r *Record) countPrefill(e *Event) {
	switch e.Kind {
	case Waited: // for a turn at a prefill engine
		r.journal.observeStage(choose, e.Took)
		r.QueueMs += ms(e.Took)
	case Chose: // an engine, or a group whose ranks prefill and decode
		r.Route, r.LocalTokens = Disaggregated, 0
		if e.Lease.Candidate.Aggregated {
			r.Route = Aggregated
		}
		// Others are the prefills of this proxy that the engine had then.
		r.Prefill, r.ProbeBS = e.Lease.Candidate.ID, e.Lease.Others
		r.PrefillPolicy, r.HitTokens = e.Lease.Policy, e.Lease.HitTokens
	case Probed:
		r.journal.observeStage(probe, e.Took)
		r.ProbeMs += ms(e.Took)
	case Prefilled: // by the engine's counts; Cached below 0: not known
		// A resumed prompt also has the answer so far, and the client's own was counted before.
		if !e.Resumed {
			r.PromptTokens, r.CachedTokens = e.Tokens, max(0, e.Cached)
		}
	}
}

// countPlacement: a later event may correct the facts, which are written at the end. If the rank
// was bound before the prefill, Placed sets Bind to Late, and then Entered or PlacedAggregated sets
// AtArrival.
func (r *Record) countPlacement(e *Event) {
	slot := e.Slot
	switch e.Kind {
	case Placed:
		// The metric ends when a round bound the request; Took when the request noticed.
		r.journal.observeStage(poolWait, slot.Wait)
		r.journal.observeStage(decide, slot.Decide)
		r.Rank, r.Policy, r.Bind = slot.WorkerName, slot.Policy, Late
		r.WaitMs += ms(e.Took)
	case PlacedLocally: // the rank computes the prompt itself; Tokens: expected in its cache
		r.Route, r.Rank, r.Policy = Local, slot.WorkerName, slot.Policy
		r.LocalTokens, r.HitTokens = int(slot.NewTokens), e.Tokens
	case PlacedAggregated: // Placed came before, with rank and policy
		r.Bind, r.LocalTokens, r.HitTokens = AtArrival, int(slot.NewTokens), e.Tokens
	case Coupled: // the decode engine has said where the KV goes
		r.CallbackMs = ms(e.Took)
	}
}

func (r *Record) countAnswer(e *Event) {
	g := r.journal
	switch e.Kind {
	case First:
		r.TTFTMs = ms(e.At.Sub(r.Arrival))
		g.ttft.Observe(e.At.Sub(r.Arrival).Seconds())
		if took := e.At.Sub(e.Sent); !e.Sent.IsZero() { // zero: there was no decode call
			r.TransferMs = ms(took)
			g.observeStage(transfer, took)
		}
	case Relayed:
		r.OutputTokens = e.Tokens
		g.observeStage(relay, e.Took)
	case Paced:
		g.tpot.Observe(e.Took.Seconds() / float64(e.Tokens-1)) // n tokens have n-1 gaps
	case Freed: // the client left at At; only now its slot, KV and hand-off are free
		g.released[r.Reached].Observe(time.Since(e.At).Seconds())
	}
}

// showEvent shows an event in the views: it begins an attempt if one is needed, shows the event,
// and then notes it in r.attempt. The order matters, because views compare the event with the state
// before it.
func (r *Record) showEvent(e Event) {
	current := &r.attempt
	hasNoView := r.views == [2]view{}
	endsNothing := e.Kind == AttemptEnded && !current.open
	if hasNoView || endsNothing {
		return
	}
	switch e.Kind {
	case Attempted:
		r.beginAttempt() // shows this event itself
		return
	case Entered, Placed, PlacedLocally: // a request that is bound at once has entered no phase before
		r.beginAttempt()
	}
	if e.Kind == Entered || e.Kind == AttemptEnded { // other events have their time
		e.At = time.Now()
	}
	r.passToViews(e)
	current.note(&e)
}

// beginAttempt opens an attempt, unless one is under way. The views see its number, but still the
// times of the one before: they show how long ago that failed.
func (r *Record) beginAttempt() {
	current := &r.attempt
	if current.open {
		return
	}
	now := time.Now()
	current.number++
	// This comes before the next line, which overwrites when the last attempt failed.
	r.passToViews(Event{Kind: Attempted, At: now})
	current.open, current.willRetry, current.phase, current.since = true, false, "", now
}

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

func (r *Record) passToViews(e Event) {
	for _, v := range r.views {
		if v != nil {
			v.show(r, e)
		}
	}
}

// WithTraceHeaders lets an engine continue the trace, as a child of the call's span, or else of the
// phase's, or else of the request's.
func (r *Record) WithTraceHeaders(headers []engine.Header) []engine.Header {
	parent := cmp.Or(r.attempt.call, r.attempt.phaseSpan, r.span)
	parent.EachHeader(func(name, value string) { headers = append(headers, engine.Header{Name: name, Value: value}) })
	return headers
}

// EndAttempt closes the attempt with the client's error; nil: it got its whole answer. A client
// that left is counted once.
func (r *Record) EndAttempt(fail *openai.Error) {
	cause := ""
	switch {
	case fail == nil:
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
