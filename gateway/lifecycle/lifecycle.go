package lifecycle

// State is what a request waits for. The states from TryingLocal on have the order of the effects from TryLocal on, because stateDuring
// computes the state from the number of the effect.
type State uint8

// The states. Each effect from TryLocal on leads to one of them.
const (
	Fresh        State = iota // no attempt has begun yet
	TryingLocal               // waits for the dispatcher to say whether a decode rank can also prefill the prompt
	Queued                    // waits in the arrival queue for a prefill engine
	Forwarded                 // waits for the answer of another dispatcher
	Prefilling                // waits for the prefill engine's answer
	Pooled                    // waits in the pool for a slot on a decode rank
	Transferring              // waits for the decode engine's first event
	Coupled                   // waits for the first event, while prefill and decode are both under way
	Pausing                   // waits for the end of the pause before another attempt
	Offering                  // waits for the answer whether another dispatcher should serve the request now
	Streaming                 // waits for the end of the answer, or for its loss
	Confirming                // waits for the prefill engine's answer, which says whether the KV was complete
	Lost                      // waits until the client has got the part of a lost answer that came; then the answer goes on or breaks off
	Choosing                  // waits for the choice of an engine that was not tried yet; only if the request is passed through
	Calling                   // waits for the chosen engine's answer, or for the first event of it
	Redialing                 // waits for the chosen engine once more, after the request was sent again over a new connection
	Done
	states
)

// A Lifecycle is the state of a request: how far it has come, what it holds, and where it may still be served. Step takes what happened,
// and returns what must be done. One goroutine at a time serves the request, but other goroutines may report events of a pair's calls. So
// every caller of Step holds a lock.
//
//	TryingLocal → Queued → Prefilling → Pooled → Transferring → Streaming → Done
//	   ↑            ↓        early: Pooled → Coupled ↗      ↓
//	   |            ↓   aggregated: Pooled → Transferring ↗      ↓
//	   |          Forwarded → Done                         lost
//	   └─────────────── Pausing, Offering ←── CallFailed ───┘
//
// A request that is passed through has states of its own: see stepPassthrough.
//
// With limits.keep_alive, a client that has waited for long has already got the status 200 and comments in the stream. The Lifecycle treats
// its request like any other: a request without an answer is tried again as before, and the code that carries out Fail sends the error as
// an event.
//
// While an answer streams, the Lifecycle gets no events. The end of the stream is the next event.
type Lifecycle struct {
	// MustServeHere says that no other dispatcher may serve the request: it is one part of a fanned-out request, or its client has a
	// part of the answer.
	MustServeHere bool
	NoHandOff     bool // only a decode rank that also prefills the prompt may serve the request

	routing
	state    State
	bind     Bind
	traits   ConnectorTraits // how the connector of the engines works; used only for Early
	nextStep NextStep        // what the request does after the last failed call, by the verdict on that call; giveUp looks at it
	tries    tries
	held     held
	pairs    []Pair // one per attempt that bound its decode rank before the prefill, in the order of the attempts
}

// Resumed says whether the answer was lost and goes on elsewhere.
func (l *Lifecycle) Resumed() bool { return l.tries.resumed > 0 }

// NeedsNewConnections says whether all calls of the request open new connections, because the engine had already closed a kept-alive
// connection.
func (l *Lifecycle) NeedsNewConnections() bool { return l.tries.redials > 0 }

// Losses counts how often the answer was lost and went on, plus how often an engine without KV room gave the request back before its first
// event.
func (l *Lifecycle) Losses() int { return int(l.tries.resumed + l.tries.givenBack) }

// BrokenConns are the connections that broke under the request.
func (l *Lifecycle) BrokenConns() []BrokenConn { return l.tries.brokenConns }

// HasPoolPlace says whether the request has a place in the pool.
func (l *Lifecycle) HasPoolPlace() bool { return l.held.has[Permit] }

// NoteGivenBack records in the routing that another dispatcher gave the request back. by is RegionReturns or SiblingReturns. A request that
// another region gave back stays here for good. After a proxy of this region did so, evenkeel may ask again where the request should go.
func (l *Lifecycle) NoteGivenBack(by EventKind) {
	if by == RegionReturns {
		l.routing.tryMove(gaveBack)
	} else {
		l.routing.tryMove(askAgain)
	}
}

// CopyRouting copies the routing of the whole request to l, which is one part of a request with several prompts or answers.
func (l *Lifecycle) CopyRouting(whole *Lifecycle) { l.routing = whole.routing }

// Step takes an event and appends to dst the effects to carry out, in this order. Only the last effect may be one that the request waits
// for (TryLocal or a later one). That effect sets the state of the request, until an event reports how the effect ended.
func (l *Lifecycle) Step(e Event, dst []Effect) []Effect {
	before := len(dst)
	switch {
	case e.Kind == Panicked: // settleAfterPanic itself sets the state
		return l.settleAfterPanic(e, dst)
	case e.Kind >= CalledBack: // the kinds from CalledBack on are the events of a pair, which do not change what the request waits for
		return l.stepPair(e, dst)
	case e.Bind == Passthrough || l.bind == Passthrough: // e.Bind says so in the first event, and l.bind in all later ones
		dst = l.stepPassthrough(e, dst)
	default:
		dst = l.step(e, dst)
	}
	last := len(dst) - 1
	waits := last >= before && dst[last].Kind >= TryLocal
	if waits && l.state != Done { // Done: another dispatcher answers, so no event follows
		l.state = stateDuring(dst[last].Kind)
	}
	return dst
}

// stateDuring returns the state that an effect from TryLocal on begins. These effects and the states from TryingLocal on have the same
// order. The last effects (Fail, EndWhole and BreakOff) all begin the last state, Done.
func stateDuring(effect EffectKind) State {
	if effect >= Fail {
		return Done
	}
	return TryingLocal + State(effect-TryLocal)
}

// step handles an event of a request that is split into prefill and decode. Step has already handled a panic and the events of pairs. A
// state ignores every event that it does not wait for.
func (l *Lifecycle) step(e Event, dst []Effect) []Effect {
	switch l.state {
	case Fresh: // the first event of a request is Begun
		if e.Kind == Begun {
			return l.beginAttempt(dst)
		}
	case TryingLocal:
		return l.stepTryingLocal(e, dst)
	case Queued:
		return l.stepQueued(e, dst)
	case Forwarded:
		return l.stepForwarded(e, dst)
	case Streaming, Confirming, Lost:
		return l.stepAnswering(e, dst)
	case Pausing:
		if e.Kind == Retried {
			return l.beginAttempt(dst)
		}
		return l.giveUp(e, dst) // GivenUp: no other attempt is granted, or the client has left
	case Offering:
		return l.stepOffering(e, dst)
	case Done:
		return dst
	}
	return l.stepAttempt(e, dst) // Prefilling, Pooled, Transferring or Coupled
}

// stepAttempt handles an event of an attempt that waits for the prefill engine's answer (Prefilling), for a slot on a decode rank (Pooled),
// or for the decode engine's first event (Transferring, Coupled).
func (l *Lifecycle) stepAttempt(e Event, dst []Effect) []Effect {
	awaitsFirst := l.state == Transferring || l.state == Coupled
	switch {
	case e.Kind == CallFailed:
		return l.callFailed(e, dst)
	case l.state == Prefilling && e.Kind == First: // the prefill engine gave the whole answer itself, so there is no KV to hand over
		return l.beginAnswer(&e, dst)
	case l.state == Prefilling && e.Kind == HandedOver:
		return l.takeHandOff(&e, dst)
	case l.state == Pooled && e.Kind == Bound:
		return l.stepBound(&e, dst)
	// The whole answer came at once. The code that reads it reports the end (Ends) before the code that waits for the first event goes
	// on and reports that event (First).
	case awaitsFirst && e.Kind == Ends:
		dst = append(dst, Effect{Kind: ReportSuccess})
		return l.held.settleSlotAndCall(dst, Finish) // the slot is free, whatever the prefill engine reports
	case awaitsFirst && e.Kind == First:
		return l.beginAnswer(&e, dst)
	}
	return dst
}

// stepTryingLocal handles the event that says whether a decode rank that can also prefill the prompt has given the request a slot
// (LocalBound) or none has (NoLocal). Without such a rank, the request waits in the arrival queue for a prefill engine.
func (l *Lifecycle) stepTryingLocal(e Event, dst []Effect) []Effect {
	switch {
	case e.Kind == LocalBound:
		l.routing.tryMove(gotTurn) // the routing notes that the request has a rank here, so its retries stay with this dispatcher
		l.held.takeSlotAndCall()
		l.noteKeptBody(&e)
		return l.sendDecode(&e, dst)
	case l.NoHandOff: // a prefill engine must not prefill the prompt, and no decode rank can; OfRanks is the error that says so
		return l.endWithError(e, OfRanks, dst)
	}
	l.held.take(LeaseOwner) // the name by which the audit of leases knows the request, which gets leases at prefill engines from now on
	return append(dst, Effect{Kind: Queue})
}

// stepForwarded handles the reply of another dispatcher to which the request was forwarded: it answers the request, gives it back, or
// refuses it.
func (l *Lifecycle) stepForwarded(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case PeerAnswers:
		l.state = Done
		return append(l.settleRest(dst), Effect{Kind: AnswerIt})
	case RegionReturns, SiblingReturns:
		l.NoteGivenBack(e.Kind)
		return l.beginAttempt(dst)
	}
	return l.endWithError(e, OfPeer, dst) // PeerRefuses: the other dispatcher refused the request, or the call to it failed
}

// stepOffering handles the answer whether another dispatcher may serve the request, whose attempts here are over.
func (l *Lifecycle) stepOffering(e Event, dst []Effect) []Effect {
	if e.Kind == Offered { // the next attempt asks in the arrival queue where the request should go, and counts as a first one
		l.tries.resetCounts()
		return l.beginAttempt(append(l.settleRest(dst), Effect{Kind: Restart}))
	}
	return l.endWithError(e, OfAttempt, dst) // NotOffered: the client gets the error of the last attempt
}

// takeHandOff takes the hand-off that the prefill engine has returned for the KV of the prompt, and lets the pool find a decode rank for
// it. The prompt still counts as load of the prefill engine: from now on the hand-off owns this lease.
func (l *Lifecycle) takeHandOff(e *Event, dst []Effect) []Effect {
	dst = l.held.settle(dst, Lease, Pass)
	l.held.take(KV)
	l.held.reusesRequestID = e.ReusesRequestID // then all requests with this hand-off have the same id, see settleAfterAttempts
	return l.enqueue(dst)
}

// stepBound sends the request to the decode rank that has given it a slot. In an early attempt, the prefill call begins beside the decode
// call, and the two form a new pair.
func (l *Lifecycle) stepBound(e *Event, dst []Effect) []Effect {
	l.held.takeSlotAndCall() // the call is the one to the engine of the rank, which is about to be sent
	l.noteKeptBody(e)
	if l.bind != Early {
		return l.sendDecode(e, dst)
	}
	l.held.has[Lease] = false // from now on the pair holds the lease, and gives it back
	// NoEarlyEvents is not about the early bind: the answer may have no event before its end, so the pair waits longer. MayIgnoreAbort
	// makes the pair close a call that an abort may not end.
	l.pairs = append(l.pairs, newPair(l.traits, e.NoEarlyEvents, e.MayIgnoreAbort))
	timeLimit := NoTimeout
	if l.traits.CallsBack { // the prefill waits for the decode engine's callback
		timeLimit = ByCallback
	}
	return append(dst, Effect{Kind: SendBoth, Until: timeLimit, Pair: len(l.pairs)})
}

// beginAnswer handles the first event of an answer, or the whole answer of a prefill engine. It gives back what only an attempt needs: the
// KV of the hand-off, the lease of the prompt, and what earlier attempts have left. The engine that answers serves the request. So if
// another engine answered it with status 500 before, that other engine was the cause.
func (l *Lifecycle) beginAnswer(e *Event, dst []Effect) []Effect {
	l.noteKeptBody(e)
	dst = l.held.settle(dst, KV, Free)    // the decode engine has read the KV, so the prefill engine has freed it
	dst = l.held.settle(dst, Lease, Free) // held only if the engine that answers also computed the prompt
	// Failed attempts may have left hand-offs that an engine may have read. They are discarded, for which an engine gets the request
	// once more. If the request may be what breaks engines, no further engine gets it, and the hand-offs expire at their prefill
	// engines.
	dst = l.held.settleAfterAttempts(dst, l.tries.mayBreakEngines())
	dst = l.tries.resolve500(Engine, dst) // Engine: an earlier 500, if there was one, is counted against the engine that sent it
	return append(dst, Effect{Kind: AnswerIt})
}

// Pair returns the n-th pair of the request. The first pair has the number 1.
func (l *Lifecycle) Pair(n int) *Pair { return &l.pairs[n-1] }

// stepPair passes an event to its pair, and marks the pair's effects with its number. It changes nothing else of the Lifecycle, because
// the attempt of that pair may be over.
func (l *Lifecycle) stepPair(e Event, dst []Effect) []Effect {
	before := len(dst)
	dst = l.Pair(e.Pair).step(e, dst)
	for i := range dst[before:] {
		dst[before+i].Pair = e.Pair
	}
	return dst
}

// beginAttempt begins an attempt. If the attempt before left a hand-off, this attempt only needs a decode rank. Otherwise it first asks
// whether a decode rank also prefills the prompt.
func (l *Lifecycle) beginAttempt(dst []Effect) []Effect {
	// The decode rank is bound after the prefill, unless the engine that the arrival queue chooses works otherwise.
	l.bind = Late
	if !l.MustServeHere && l.MayAsk() { // in the arrival queue, evenkeel asks whether another dispatcher should serve the request
		dst = append(dst, Effect{Kind: Question})
	}
	dst = append(dst, Effect{Kind: Attempt})
	if l.held.has[KV] {
		return l.enqueue(dst)
	}
	return append(dst, Effect{Kind: TryLocal})
}

// sendDecode sends the request to the rank that was bound. If the request has no hand-off, the rank also prefills the prompt. timeLimit is
// for the wait until the first event of the answer.
func (l *Lifecycle) sendDecode(e *Event, dst []Effect) []Effect {
	timeLimit := ByFirstEvent // as long as an engine may take that has the KV of the prompt
	switch {
	case e.NoEarlyEvents: // the answer comes in one piece, so nothing comes before its end
		timeLimit = ByWhole
	case l.bind == Aggregated: // the rank first prefills the prompt, and other prompts may be ahead of it
		timeLimit = ByProbe // as long as the call to a prefill engine (a probe) may take
	}
	return append(dst, Effect{Kind: SendDecode, Until: timeLimit})
}

// confirmTimeout is how long the proxy waits, once the answer has ended or was lost, for the prefill engine to confirm that the KV of the
// answer was complete. Only early attempts have such a wait: in all other attempts the prefill engine has answered before the decode
// engine.
func (l *Lifecycle) confirmTimeout() Timeout {
	if l.bind != Early {
		return NoTimeout
	}
	lastPair := l.Pair(len(l.pairs)) // pairs are counted from 1
	return lastPair.ConfirmTimeout()
}

// noteKeptBody notes, if the event says so, that the body of the request is kept in memory, so that a lost answer can go on. settleRest or
// callFailed releases it.
func (l *Lifecycle) noteKeptBody(e *Event) {
	if e.Copied {
		l.held.take(Copy)
	}
}

// enqueue lets the pool find a rank. From now on the request's entry in the pool owns its place there (the Permit). A hand-off that waits
// for a second rank has no place any more: then the field Permit of the effect makes the pool reserve a new one.
func (l *Lifecycle) enqueue(dst []Effect) []Effect {
	needsPlace := !l.held.has[Permit]
	enqueue := Effect{Kind: Enqueue, Bind: l.bind, Permit: needsPlace}
	return append(l.held.settle(dst, Permit, Pass), enqueue)
}

// stepQueued handles an event in the state Queued: the request got a prefill engine (Turn), another dispatcher should serve it (Directed),
// or it left the arrival queue without either (NoTurn).
func (l *Lifecycle) stepQueued(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Turn:
		l.routing.tryMove(gotTurn) // from now on the request's retries stay with this dispatcher
		l.held.take(Permit)        // with its turn, the request also has a place in the pool
		l.held.take(Lease)         // and its prompt counts as load of the engine
		l.bind, l.traits = e.Bind, e.Traits
		if l.bind != Late {
			return l.enqueue(dst) // Early: the rank is bound before the prefill; Aggregated: the rank itself prefills
		}
		return append(dst, Effect{Kind: SendProbe, Until: ByProbe})
	case Directed:
		if l.MustServeHere { // the request cannot be sent to the dispatcher that should serve it
			dst = append(dst, Effect{Kind: Drop})  // gives back what was prepared for sending it there
			return l.endWithError(e, OfOwner, dst) // OfOwner: the error that another proxy owns the decode group
		}
		return append(dst, Effect{Kind: Forward})
	}
	return l.leaveQueue(e, dst)
}

// leaveQueue handles a request that no prefill engine here takes. It offers the request to another dispatcher if another region may have an
// engine for it (Event.Open). Otherwise the client gets the error with which the request left the arrival queue.
func (l *Lifecycle) leaveQueue(e Event, dst []Effect) []Effect {
	otherRegionMayServe := e.Open && !e.ClientLeft
	if otherRegionMayServe && l.tryOffer(failed) { // failed: this counts as if every attempt here had failed
		return append(dst, Effect{Kind: Offer})
	}
	return l.endWithError(e, OfAttempt, dst)
}

// callFailed handles the end of a call to an engine without its result. It counts the failure against the engine at fault, and gives back
// what the attempt held: the lease or the hand-off (settleKV), then slot, call and kept body (settleFailedCall, which also decides whether
// the next attempt avoids the decode rank). Then it decides whether another attempt follows. A 500 is disputed: the engine or the request
// may be its cause. It is noted, and the next engine's answer shows which.
func (l *Lifecycle) callFailed(e Event, dst []Effect) []Effect {
	verdict, backSoon := l.verdictOn(&e.End)
	dst, disputed := l.reportFailure(&e, verdict.Blame, dst)
	dst = l.settleKV(&e, verdict, dst)
	if disputed { // after settleKV, which counts the failure: note500 may forgive only what is counted
		dst = l.tries.note500(e.Engine, dst)
	}
	dst = l.settleFailedCall(&e, backSoon, dst)
	l.nextStep = verdict.Next
	// Ask: another proxy owns the decode group now, and may serve the request.
	if verdict.Next == Over || verdict.Next == Ask || e.ClientLeft {
		return l.giveUp(e, dst)
	}
	return append(dst, Effect{Kind: Pause, Retry: l.tries.nextAttempt(verdict.Next, &e)})
}

// verdictOn returns what follows from the end of a call: what the tables of verdict.go say, with three changes for the request's earlier
// attempts and the kind of this one. The first change is made in end, before the tables are read. backSoon says that the engine takes no
// requests for a short time, and that this has ended fewer than uncountedPauses attempts before.
func (l *Lifecycle) verdictOn(end *CallEnd) (verdict Consequences, backSoon bool) {
	ranksLostAgain := end.Reason == RanksLost && !l.routing.tryMove(lostRanks) // the routing does not allow it again
	if ranksLostAgain {
		end.Reason = NoRank // with RanksLost the prompt would be prefilled once more; NoRank ends the attempts here
	}
	verdict = end.Verdict()
	if end.Reason == Outlived || end.Reason == MayOutlive {
		// The first prompt that is prefilled again for a doubt is free. Each further one counts: an
		// engine that comes and goes could keep a request for ever.
		if l.tries.doubts++; l.tries.doubts > 1 {
			verdict.Next = Again
		}
	}
	rankTooBusy := l.bind == Aggregated && end.DecodeRefused() // the rank should have prefilled the prompt, but computed nothing
	if rankTooBusy && verdict.Next == Again {
		verdict.Next = Untaken // the first refusals then do not count as attempts, as with prefill engines
	}
	paused := end.Reason == Paused
	backSoon = paused && l.tries.pauses < uncountedPauses
	if paused && !backSoon && end.Call == Prefill {
		verdict.KV = Refuse // the engine has not come back in time, so giving its lease back counts a failure of it
	}
	return verdict, backSoon
}

// settleFailedCall gives back what the call of a failed attempt held on a decode rank (slot and call), and the body that is kept in case
// the answer is lost. The dispatcher counts the slot as Failing, or as Cancelled if the rank is not to blame. The next attempt avoids the
// rank, unless the rank may be used again. backSoon says that the engine takes no requests now, but is expected back soon.
func (l *Lifecycle) settleFailedCall(e *Event, backSoon bool, dst []Effect) []Effect {
	// These reasons have nothing to do with the rank.
	rankUnconcerned := e.End.Reason == Unready || e.End.Reason == Leaving
	// The client left, and no engine uses the slot any more: the event says so (Quit), or the answer had begun (Open) and was closed.
	clientLeft := e.Quit || e.End.Reason == Left && e.End.Open
	slotDisposition := Failing
	if rankUnconcerned || clientLeft || e.End.Reason == NotOurs { // NotOurs: another proxy owns the engine, so it got nothing from this one
		slotDisposition = Cancelled
	}
	dst = l.held.settleSlotAndCall(dst, slotDisposition)
	if !l.Resumed() { // otherwise further attempts need the kept body (Copy) to continue the answer
		dst = l.held.settle(dst, Copy, Back)
	}
	// Preempted and Stale are no failures of the rank: it had no KV room, or an old connection was closed already.
	mayUseRankAgain := rankUnconcerned || backSoon || e.End.Reason == Preempted || e.End.Reason == Stale
	if e.End.Call == Decode && !mayUseRankAgain {
		dst = append(dst, Effect{Kind: Avoid})
	}
	return dst
}

// settleKV gives back the lease of a prefill call that failed, or the hand-off of a decode call that failed. verdict.KV says what becomes
// of the KV that the lease or the hand-off stands for. If it is Keep, the next attempt uses the hand-off.
func (l *Lifecycle) settleKV(e *Event, verdict Consequences, dst []Effect) []Effect {
	switch {
	case l.bind == Aggregated: // no KV is handed over, so verdict.KV does not matter
		return l.settleAggregated(e, verdict.Blame, dst)
	case verdict.KV == Keep:
		return dst
	}
	dst = l.held.settle(dst, Lease, verdict.KV) // held during a prefill call; otherwise settle does nothing
	return l.held.settle(dst, KV, verdict.KV)   // held during a decode call
}

// settleAggregated gives back the lease at a group of ranks that prefill and decode. If the group does not work, it counts as failed.
func (l *Lifecycle) settleAggregated(e *Event, blame Blame, dst []Effect) []Effect {
	groupWorks := blame == Nobody || e.End.Reason == Busy // Busy: perhaps only the queue of one rank is full
	if groupWorks {
		return l.held.settle(dst, Lease, Free)
	}
	return l.held.settle(dst, Lease, Refuse)
}

// reportFailure counts the failure of a call against its engine, unless no engine is at fault. disputed says that the cause of a 500 is not
// known yet. The caller then notes its engine (tries.note500), because the next engine's answer shows the cause. A prefill engine's failure
// is counted when its lease is given back. For such an engine the effect only notes a disputed 500, so that the count can be taken back if
// the request was the cause.
func (l *Lifecycle) reportFailure(e *Event, blame Blame, dst []Effect) (_ []Effect, disputed bool) {
	if blame == Disputed && !e.Faulty { // not Faulty: e.g. the KV did not arrive, for which the request is not at fault
		blame = Engine
	}
	if blame == Nobody {
		return dst, false
	}
	disputed = blame == Disputed
	if e.End.Call == Prefill && !disputed { // counted when the lease is given back
		return dst, false
	}
	return append(dst, Effect{Kind: ReportFailure, Blame: blame, Call: e.End.Call}), disputed
}

// stepAnswering handles an event after the client's answer has begun: in the state Streaming the end or the loss of the answer, in
// Confirming the prefill engine's word that the KV was complete (Believed), and in Lost the decision that the answer is to go on (Begun).
// When the answer has ended, or is broken off because it can neither end nor go on elsewhere, the request gives back all that it still
// holds (settleRest).
func (l *Lifecycle) stepAnswering(e Event, dst []Effect) []Effect {
	hasSlot := l.held.has[Slot] // of the decode rank that sends the answer; false if the whole answer came with its first event
	switch {
	case e.Kind == Begun && l.state == Lost: // the lost answer goes on, with attempts counted as for a new request
		l.tries.resetCounts()
		l.tries.resumed++
		return l.beginAttempt(dst)
	case e.Kind == Ends && l.state == Streaming && hasSlot:
		dst = append(dst, Effect{Kind: ReportSuccess})
		dst = l.held.settleSlotAndCall(dst, Finish)
		if l.bind == Early { // the prefill engine may still report that the KV was not complete
			return append(dst, Effect{Kind: Confirm, Until: l.confirmTimeout()})
		}
		return append(l.settleRest(dst), Effect{Kind: EndWhole})
	case e.Kind == Ends, e.Kind == Believed: // nothing but the end of the answer is left to send; the slot was given back before
		return append(l.settleRest(dst), Effect{Kind: EndWhole})
	case e.Kind == CallFailed && l.state == Streaming:
		return l.stepAnswerLost(e, dst)
	}
	// Confirming: the prefill engine did not confirm the KV. Lost: the answer cannot go on (GivenUp).
	return append(l.settleRest(dst), Effect{Kind: BreakOff})
}

// stepAnswerLost handles the loss of an answer that has begun. The answer goes on elsewhere (GoOn), or is broken off in three cases: the
// client has left, no other engine would answer differently, or two engines have failed at the request and a third must not be risked. A
// 500 is disputed, i.e. the engine or the request may be its cause. It is noted until another engine's answer shows which.
func (l *Lifecycle) stepAnswerLost(e Event, dst []Effect) []Effect {
	verdict := e.End.Verdict()
	slotDisposition := Failing
	// Left: the client's leaving ended the call. ClientLeft: the client has left by now, whatever ended the call.
	if e.ClientLeft || e.End.Reason == Left {
		verdict = Consequences{Next: Over} // and no engine is to blame
		slotDisposition = Cancelled
	}
	dst, disputed := l.reportFailure(&e, verdict.Blame, dst)
	if disputed {
		dst = l.tries.note500(e.Engine, dst)
	}
	dst = l.held.settleSlotAndCall(dst, slotDisposition)
	// noteFailure notes the failure, and is true if the request may be what breaks engines. After Over no attempt needs the note.
	if verdict.Next == Over || l.tries.noteFailure(&e) {
		return append(l.settleRest(dst), Effect{Kind: BreakOff})
	}
	if verdict.Next != NoRoom { // a rank that had no room has not failed, so the next attempt may use it again
		dst = append(dst, Effect{Kind: Avoid})
	}
	// Before the answer goes on, the prefill engine of an early attempt may have to confirm the KV of the part that came. Until limits
	// this wait.
	return append(dst, Effect{Kind: GoOn, Until: l.confirmTimeout()})
}

// giveUp ends the attempts here. It offers the request to another dispatcher, if one may serve it and the request did not cause the
// failure. Otherwise the client gets an error. nextStep says what the last failed call left to do.
func (l *Lifecycle) giveUp(e Event, dst []Effect) []Effect {
	// No attempt will use a hand-off that is left. It is treated like one that an engine may have read: settleRest has it discarded, or
	// leaves it to its hold timeout.
	dst = l.held.settle(dst, KV, MaybeRead)
	if e.ClientLeft {
		return l.endWithError(e, OfClient, dst)
	}
	groupMoved := l.nextStep == Ask // another proxy owns the decode group now, and should serve the request
	// Over: the verdict says that no engine would answer otherwise, not even one of another region.
	otherRegionMayServe := l.nextStep != Over && !l.tries.mayBreakEngines()
	mayOffer := false
	if groupMoved {
		mayOffer = l.tryOffer(lostGroup)
	} else if otherRegionMayServe {
		mayOffer = l.tryOffer(failed)
	}
	if mayOffer {
		return append(dst, Effect{Kind: Offer, Group: groupMoved})
	}
	return l.endWithError(e, OfAttempt, dst)
}

// tryOffer records in the routing why evenkeel asks again which dispatcher should serve the request. It returns false, and changes nothing,
// if evenkeel may not ask again: the request must be served here, or the routing does not allow it.
func (l *Lifecycle) tryOffer(why move) bool {
	return !l.MustServeHere && l.routing.tryMove(why)
}

// endWithError ends the request. The client gets clientError, or the request is recorded as left by its client (OfClient).
func (l *Lifecycle) endWithError(e Event, clientError Error, dst []Effect) []Effect {
	if e.ClientLeft {
		clientError = OfClient
	}
	return append(l.settleRest(dst), Effect{Kind: Fail, Error: clientError})
}

// settleRest gives back what the request still holds when no attempt follows here: the body that was kept so that a lost answer can go on
// (Copy), and what the attempts have left (settleAfterAttempts). If an engine answered 500 and no other engine has shown the cause since,
// the cause stays unknown (Disputed).
func (l *Lifecycle) settleRest(dst []Effect) []Effect {
	dst = l.held.settle(dst, Copy, Back)
	return l.held.settleAfterAttempts(l.tries.resolve500(Disputed, dst), l.tries.mayBreakEngines())
}

// settleAfterPanic ends the request after the code that carries out effects has panicked, and settles each thing that the request holds: it
// is given back (Back) or gets a new owner that gives it back (Pass). An engine may still be working on the request, so no hand-off is
// discarded: the engine frees the KV at its hold timeout (Orphan).
func (l *Lifecycle) settleAfterPanic(e Event, dst []Effect) []Effect {
	l.state = Done
	dst = l.held.settleSlotAndCall(dst, Failing) // given back as after a call that did not bring its whole answer
	dst = l.held.settle(dst, Lease, Orphan)
	dst = l.held.settle(dst, KV, Orphan)
	dst = l.endPairsAfterPanic(e.Idle, dst)                       // Idle: neither call of the last pair had begun
	const bodyToErrorWriter, memoryBack = Pass, Back              // the code that answers with the error gives the body back
	dst = l.settlePassthrough(bodyToErrorWriter, memoryBack, dst) // does nothing for a request that is not passed through
	dst = l.held.settle(dst, Copy, Back)                          // the body that was kept so that a lost answer can go on
	dst = l.tries.resolve500(Disputed, dst)                       // no other engine's answer will show the cause of an earlier 500
	const mayBreakEngines = true                                  // with this, settleAfterAttempts discards nothing
	return l.held.settleAfterAttempts(dst, mayBreakEngines)
}

// endPairsAfterPanic ends the last pair, as if its decode call had failed, unless that call has ended. noCallBegan says that the panic came
// before a call of this pair was sent. The other pairs need nothing: an attempt begins only after the decode call of the one before has
// ended. If the prefill call of such a pair still runs, the end of that call gives its lease back.
func (l *Lifecycle) endPairsAfterPanic(noCallBegan bool, dst []Effect) []Effect {
	for i := range l.pairs {
		number := i + 1 // pairs are counted from 1
		switch {
		case l.pairs[i].DecodeEnded(): // true for every pair before the last
		case noCallBegan:
			dst = l.stepPair(Event{Kind: NotSent, Pair: number}, dst)
		default:
			dst = l.stepPair(Event{Kind: DecodeFailed, Reason: Died, Pair: number}, dst)
		}
	}
	return dst
}
