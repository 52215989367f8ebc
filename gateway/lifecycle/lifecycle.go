package lifecycle

// State is what a request waits for. The states from TryingLocal on have the order of the effects
// from TryLocal on (see stateDuring).
type State uint8

// The states. From TryingLocal on, an effect begins each of them.
const (
	Fresh       State = iota
	TryingLocal       // whether a decode rank can also prefill
	Queued            // in the arrival queue
	Forwarded         // another dispatcher has the request
	Prefilling
	Pooled       // in the pool, for a decode rank
	Transferring // for the first event
	Coupled      // for the first event of two concurrent calls
	Pausing
	Offering
	Streaming  // for the end of the answer, or its loss
	Confirming // whether the KV was complete
	Lost       // until the client has got what came
	Choosing   // passed through, for an engine
	Calling    // for the engine's answer, or the first event of it
	Redialing
	Done
	states
)

// A Lifecycle is the state of a request: how far it has come, what it holds, and where it may still
// be served. One goroutine at a time serves the request, but others may report events of a pair's
// calls, so every caller of Step holds a lock.
//
//	TryingLocal → Queued → Prefilling → Pooled → Transferring → Streaming → Done
//	   ↑            ↓        early: Pooled → Coupled ↗      ↓
//	   |            ↓   aggregated: Pooled → Transferring ↗      ↓
//	   |          Forwarded → Done                         lost
//	   └─────────────── Pausing, Offering ←── CallFailed ───┘
//
// A request that is passed through has states of its own: see stepPassthrough. With
// limits.keep_alive, a client may have got the status 200 and comments, but no answer: its request
// is tried again like any other, and Fail sends the error as an event.
//
// While an answer streams, the Lifecycle gets no events.
type Lifecycle struct {
	// MustServeHere: the request is a part of a fanned-out one, or its client has a part of the
	// answer.
	MustServeHere bool
	NoHandOff     bool // only a decode rank that also prefills may serve the request

	routing
	state    State
	bind     Bind
	traits   ConnectorTraits
	nextStep NextStep // by the verdict on the last failed call
	tries    tries
	held     held
	pairs    []Pair // one for each early attempt, in order
}

// Resumed says whether the answer was lost and goes on elsewhere.
func (l *Lifecycle) Resumed() bool { return l.tries.resumed > 0 }

// NeedsNewConnections is true once an engine had already closed a kept-alive connection.
func (l *Lifecycle) NeedsNewConnections() bool { return l.tries.redials > 0 }

// Losses counts lost answers that went on, and requests that an engine without KV room gave back.
func (l *Lifecycle) Losses() int { return int(l.tries.resumed + l.tries.givenBack) }

// BrokenConns are the connections that broke under the request.
func (l *Lifecycle) BrokenConns() []BrokenConn { return l.tries.brokenConns }

// HasPoolPlace says whether the request has a place in the pool.
func (l *Lifecycle) HasPoolPlace() bool { return l.held.has[Permit] }

// NoteGivenBack records that another dispatcher gave the request back: a proxy of another region
// (RegionReturns), or of this one (SiblingReturns), after which evenkeel may ask again.
func (l *Lifecycle) NoteGivenBack(by EventKind) {
	if by == RegionReturns {
		l.routing.tryMove(gaveBack)
	} else {
		l.routing.tryMove(askAgain)
	}
}

// CopyRouting is for a part of a fanned-out request.
func (l *Lifecycle) CopyRouting(whole *Lifecycle) { l.routing = whole.routing }

// Step appends to dst the effects to carry out, in order. Only the last may be TryLocal or a later
// one: it sets the state.
func (l *Lifecycle) Step(e Event, dst []Effect) []Effect {
	before := len(dst)
	switch {
	case e.Kind == Panicked:
		return l.settleAfterPanic(e, dst)
	case e.Kind >= CalledBack: // events of a pair keep the state
		return l.stepPair(e, dst)
	case e.Bind == Passthrough || l.bind == Passthrough: // e.Bind: in the first event
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

// stateDuring relies on the same order of effects and states. Fail, EndWhole and BreakOff all begin
// Done.
func stateDuring(effect EffectKind) State {
	if effect >= Fail {
		return Done
	}
	return TryingLocal + State(effect-TryLocal)
}

func (l *Lifecycle) step(e Event, dst []Effect) []Effect {
	switch l.state {
	case Fresh:
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
		return l.giveUp(e, dst)
	case Offering:
		return l.stepOffering(e, dst)
	case Done:
		return dst
	}
	return l.stepAttempt(e, dst)
}

func (l *Lifecycle) stepAttempt(e Event, dst []Effect) []Effect {
	awaitsFirst := l.state == Transferring || l.state == Coupled
	switch {
	case e.Kind == CallFailed:
		return l.callFailed(e, dst)
	case l.state == Prefilling && e.Kind == First: // it gave the whole answer
		return l.beginAnswer(&e, dst)
	case l.state == Prefilling && e.Kind == HandedOver:
		return l.takeHandOff(&e, dst)
	case l.state == Pooled && e.Kind == Bound:
		return l.stepBound(&e, dst)
	// The whole answer came at once. Its reader reports Ends before the code that waits for First.
	case awaitsFirst && e.Kind == Ends:
		dst = append(dst, Effect{Kind: ReportSuccess})
		return l.held.settleSlotAndCall(dst, Finish) // whatever the prefill engine still reports
	case awaitsFirst && e.Kind == First:
		return l.beginAnswer(&e, dst)
	}
	return dst
}

func (l *Lifecycle) stepTryingLocal(e Event, dst []Effect) []Effect {
	switch {
	case e.Kind == LocalBound:
		l.routing.tryMove(gotTurn) // its retries stay with this dispatcher
		l.held.takeSlotAndCall()
		l.noteKeptBody(&e)
		return l.sendDecode(&e, dst)
	case l.NoHandOff: // neither a prefill engine nor a rank may prefill the prompt
		return l.endWithError(e, OfRanks, dst)
	}
	l.held.take(LeaseOwner) // before the first lease at a prefill engine
	return append(dst, Effect{Kind: Queue})
}

func (l *Lifecycle) stepForwarded(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case PeerAnswers:
		l.state = Done
		return append(l.settleRest(dst), Effect{Kind: AnswerIt})
	case RegionReturns, SiblingReturns:
		l.NoteGivenBack(e.Kind)
		return l.beginAttempt(dst)
	}
	return l.endWithError(e, OfPeer, dst)
}

func (l *Lifecycle) stepOffering(e Event, dst []Effect) []Effect {
	if e.Kind == Offered { // the next attempt is like a first one
		l.tries.resetCounts()
		return l.beginAttempt(append(l.settleRest(dst), Effect{Kind: Restart}))
	}
	return l.endWithError(e, OfAttempt, dst)
}

// takeHandOff: the hand-off now owns the lease, the prompt's load of the prefill engine.
func (l *Lifecycle) takeHandOff(e *Event, dst []Effect) []Effect {
	dst = l.held.settle(dst, Lease, Pass)
	l.held.take(KV)
	l.held.reusesRequestID = e.ReusesRequestID // all requests with this hand-off then have the same id
	return l.enqueue(dst)
}

func (l *Lifecycle) stepBound(e *Event, dst []Effect) []Effect {
	l.held.takeSlotAndCall()
	l.noteKeptBody(e)
	if l.bind != Early {
		return l.sendDecode(e, dst)
	}
	l.held.has[Lease] = false // the pair now holds it
	l.pairs = append(l.pairs, newPair(l.traits, e.NoEarlyEvents, e.MayIgnoreAbort))
	timeLimit := NoTimeout
	if l.traits.CallsBack {
		timeLimit = ByCallback
	}
	return append(dst, Effect{Kind: SendBoth, Until: timeLimit, Pair: len(l.pairs)})
}

// beginAnswer: if another engine answered the request with 500 before, that engine was the cause.
func (l *Lifecycle) beginAnswer(e *Event, dst []Effect) []Effect {
	l.noteKeptBody(e)
	dst = l.held.settle(dst, KV, Free)    // by reading it, the decode engine has made it free
	dst = l.held.settle(dst, Lease, Free) // held only if the answering engine also prefilled
	dst = l.held.settleAfterAttempts(dst, l.tries.mayBreakEngines())
	dst = l.tries.resolve500(Engine, dst)
	return append(dst, Effect{Kind: AnswerIt})
}

// Pair returns the n-th pair of the request, from 1.
func (l *Lifecycle) Pair(n int) *Pair { return &l.pairs[n-1] }

// stepPair changes nothing else: the attempt of that pair may be over.
func (l *Lifecycle) stepPair(e Event, dst []Effect) []Effect {
	before := len(dst)
	dst = l.Pair(e.Pair).step(e, dst)
	for i := range dst[before:] {
		dst[before+i].Pair = e.Pair
	}
	return dst
}

// beginAttempt: if a hand-off is left, only a decode rank is needed.
func (l *Lifecycle) beginAttempt(dst []Effect) []Effect {
	// Turn may change it.
	l.bind = Late
	if !l.MustServeHere && l.MayAsk() {
		dst = append(dst, Effect{Kind: Question})
	}
	dst = append(dst, Effect{Kind: Attempt})
	if l.held.has[KV] {
		return l.enqueue(dst)
	}
	return append(dst, Effect{Kind: TryLocal})
}

// sendDecode: without a hand-off, the rank also prefills the prompt.
func (l *Lifecycle) sendDecode(e *Event, dst []Effect) []Effect {
	timeLimit := ByFirstEvent
	switch {
	case e.NoEarlyEvents:
		timeLimit = ByWhole
	case l.bind == Aggregated: // the rank first prefills the prompt, and others may be ahead of it
		timeLimit = ByProbe
	}
	return append(dst, Effect{Kind: SendDecode, Until: timeLimit})
}

// Only an early attempt may need to wait: in others the prefill engine has answered before.
func (l *Lifecycle) confirmTimeout() Timeout {
	if l.bind != Early {
		return NoTimeout
	}
	lastPair := l.Pair(len(l.pairs))
	return lastPair.ConfirmTimeout()
}

func (l *Lifecycle) noteKeptBody(e *Event) {
	if e.Copied {
		l.held.take(Copy)
	}
}

// enqueue: the entry in the pool then owns the place. A hand-off that waits for a second rank has
// none, so the pool must reserve one.
func (l *Lifecycle) enqueue(dst []Effect) []Effect {
	needsPlace := !l.held.has[Permit]
	enqueue := Effect{Kind: Enqueue, Bind: l.bind, Permit: needsPlace}
	return append(l.held.settle(dst, Permit, Pass), enqueue)
}

func (l *Lifecycle) stepQueued(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Turn:
		l.routing.tryMove(gotTurn)
		l.held.take(Permit) // with the turn comes a place in the pool
		l.held.take(Lease)
		l.bind, l.traits = e.Bind, e.Traits
		if l.bind != Late {
			return l.enqueue(dst) // Early: bound before the prefill; Aggregated: the rank itself prefills
		}
		return append(dst, Effect{Kind: SendProbe, Until: ByProbe})
	case Directed:
		if l.MustServeHere {
			dst = append(dst, Effect{Kind: Drop}) // gives back what was prepared for sending it
			return l.endWithError(e, OfOwner, dst)
		}
		return append(dst, Effect{Kind: Forward})
	}
	return l.leaveQueue(e, dst)
}

func (l *Lifecycle) leaveQueue(e Event, dst []Effect) []Effect {
	otherRegionMayServe := e.Open && !e.ClientLeft
	if otherRegionMayServe && l.tryOffer(failed) { // as if every attempt here had failed
		return append(dst, Effect{Kind: Offer})
	}
	return l.endWithError(e, OfAttempt, dst)
}

// callFailed: after a 500 the engine or the request may be the cause. It is noted, and the next
// engine's answer shows which.
func (l *Lifecycle) callFailed(e Event, dst []Effect) []Effect {
	verdict, backSoon := l.verdictOn(&e.End)
	dst, disputed := l.reportFailure(&e, verdict.Blame, dst)
	dst = l.settleKV(&e, verdict, dst)
	if disputed { // after settleKV, which counts the failure: note500 may forgive only what is counted
		dst = l.tries.note500(e.Engine, dst)
	}
	dst = l.settleFailedCall(&e, backSoon, dst)
	l.nextStep = verdict.Next
	if verdict.Next == Over || verdict.Next == Ask || e.ClientLeft {
		return l.giveUp(e, dst)
	}
	return append(dst, Effect{Kind: Pause, Retry: l.tries.nextAttempt(verdict.Next, &e)})
}

// verdictOn changes what the tables say for earlier attempts and the kind of this one. backSoon:
// the engine takes no requests now, but is expected back soon.
func (l *Lifecycle) verdictOn(end *CallEnd) (verdict Consequences, backSoon bool) {
	ranksLostAgain := end.Reason == RanksLost && !l.routing.tryMove(lostRanks)
	if ranksLostAgain {
		end.Reason = NoRank // RanksLost would prefill the prompt once more
	}
	verdict = end.Verdict()
	if end.Reason == Outlived || end.Reason == MayOutlive {
		// The first prompt that is prefilled again for a doubt is free. More count: an engine that comes
		// and goes could keep a request for ever.
		if l.tries.doubts++; l.tries.doubts > 1 {
			verdict.Next = Again
		}
	}
	rankTooBusy := l.bind == Aggregated && end.DecodeRefused() // the rank computed nothing
	if rankTooBusy && verdict.Next == Again {
		verdict.Next = Untaken
	}
	paused := end.Reason == Paused
	backSoon = paused && l.tries.pauses < uncountedPauses
	if paused && !backSoon && end.Call == Prefill {
		verdict.KV = Refuse // the engine did not come back in time, so the lease counts a failure
	}
	return verdict, backSoon
}

// settleFailedCall: the slot counts as Cancelled if the rank is not to blame.
func (l *Lifecycle) settleFailedCall(e *Event, backSoon bool, dst []Effect) []Effect {
	rankUnconcerned := e.End.Reason == Unready || e.End.Reason == Leaving
	// No engine uses the slot any more.
	clientLeft := e.Quit || e.End.Reason == Left && e.End.Open
	slotDisposition := Failing
	if rankUnconcerned || clientLeft || e.End.Reason == NotOurs { // it got nothing from this proxy
		slotDisposition = Cancelled
	}
	dst = l.held.settleSlotAndCall(dst, slotDisposition)
	if !l.Resumed() { // else needed to continue the answer
		dst = l.held.settle(dst, Copy, Back)
	}
	// Preempted and Stale are no failures: the rank had no KV room, or a connection was old.
	mayUseRankAgain := rankUnconcerned || backSoon || e.End.Reason == Preempted || e.End.Reason == Stale
	if e.End.Call == Decode && !mayUseRankAgain {
		dst = append(dst, Effect{Kind: Avoid})
	}
	return dst
}

func (l *Lifecycle) settleKV(e *Event, verdict Consequences, dst []Effect) []Effect {
	switch {
	case l.bind == Aggregated:
		return l.settleAggregated(e, verdict.Blame, dst)
	case verdict.KV == Keep:
		return dst
	}
	dst = l.held.settle(dst, Lease, verdict.KV) // held during a prefill call
	return l.held.settle(dst, KV, verdict.KV)   // held during a decode call
}

func (l *Lifecycle) settleAggregated(e *Event, blame Blame, dst []Effect) []Effect {
	groupWorks := blame == Nobody || e.End.Reason == Busy // Busy: perhaps of one rank only
	if groupWorks {
		return l.held.settle(dst, Lease, Free)
	}
	return l.held.settle(dst, Lease, Refuse)
}

// reportFailure: if disputed, the caller notes the 500. A prefill engine's failure is counted when
// its lease is given back: for it the effect only notes the 500, so that the count can be taken
// back.
func (l *Lifecycle) reportFailure(e *Event, blame Blame, dst []Effect) (_ []Effect, disputed bool) {
	if blame == Disputed && !e.Faulty { // e.g. the KV did not arrive
		blame = Engine
	}
	if blame == Nobody {
		return dst, false
	}
	disputed = blame == Disputed
	if e.End.Call == Prefill && !disputed {
		return dst, false
	}
	return append(dst, Effect{Kind: ReportFailure, Blame: blame, Call: e.End.Call}), disputed
}

func (l *Lifecycle) stepAnswering(e Event, dst []Effect) []Effect {
	hasSlot := l.held.has[Slot] // false if the whole answer came with its first event
	switch {
	case e.Kind == Begun && l.state == Lost: // attempts count as for a new request
		l.tries.resetCounts()
		l.tries.resumed++
		return l.beginAttempt(dst)
	case e.Kind == Ends && l.state == Streaming && hasSlot:
		dst = append(dst, Effect{Kind: ReportSuccess})
		dst = l.held.settleSlotAndCall(dst, Finish)
		if l.bind == Early { // the KV may still prove incomplete
			return append(dst, Effect{Kind: Confirm, Until: l.confirmTimeout()})
		}
		return append(l.settleRest(dst), Effect{Kind: EndWhole})
	case e.Kind == Ends, e.Kind == Believed:
		return append(l.settleRest(dst), Effect{Kind: EndWhole})
	case e.Kind == CallFailed && l.state == Streaming:
		return l.stepAnswerLost(e, dst)
	}
	// Confirming: the KV was not confirmed. Lost: the answer cannot go on.
	return append(l.settleRest(dst), Effect{Kind: BreakOff})
}

// stepAnswerLost: after two engines have failed at the request, a third must not be risked.
func (l *Lifecycle) stepAnswerLost(e Event, dst []Effect) []Effect {
	verdict := e.End.Verdict()
	slotDisposition := Failing
	if e.ClientLeft || e.End.Reason == Left {
		verdict = Consequences{Next: Over}
		slotDisposition = Cancelled
	}
	dst, disputed := l.reportFailure(&e, verdict.Blame, dst)
	if disputed {
		dst = l.tries.note500(e.Engine, dst)
	}
	dst = l.held.settleSlotAndCall(dst, slotDisposition)
	if verdict.Next == Over || l.tries.noteFailure(&e) {
		return append(l.settleRest(dst), Effect{Kind: BreakOff})
	}
	if verdict.Next != NoRoom { // which is no failure of the rank
		dst = append(dst, Effect{Kind: Avoid})
	}
	// The KV of the part that came may have to be confirmed first.
	return append(dst, Effect{Kind: GoOn, Until: l.confirmTimeout()})
}

func (l *Lifecycle) giveUp(e Event, dst []Effect) []Effect {
	// No attempt will use a hand-off that is left. settleRest has it discarded, or leaves it to its
	// hold timeout.
	dst = l.held.settle(dst, KV, MaybeRead)
	if e.ClientLeft {
		return l.endWithError(e, OfClient, dst)
	}
	groupMoved := l.nextStep == Ask
	// Over: nor would an engine of another region.
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

func (l *Lifecycle) tryOffer(why move) bool {
	return !l.MustServeHere && l.routing.tryMove(why)
}

func (l *Lifecycle) endWithError(e Event, clientError Error, dst []Effect) []Effect {
	if e.ClientLeft {
		clientError = OfClient
	}
	return append(l.settleRest(dst), Effect{Kind: Fail, Error: clientError})
}

// settleRest: the cause of a 500 that no other engine has shown stays unknown.
func (l *Lifecycle) settleRest(dst []Effect) []Effect {
	dst = l.held.settle(dst, Copy, Back)
	return l.held.settleAfterAttempts(l.tries.resolve500(Disputed, dst), l.tries.mayBreakEngines())
}

// settleAfterPanic: an engine may still be working on the request, so no hand-off is discarded.
func (l *Lifecycle) settleAfterPanic(e Event, dst []Effect) []Effect {
	l.state = Done
	dst = l.held.settleSlotAndCall(dst, Failing)
	dst = l.held.settle(dst, Lease, Orphan)
	dst = l.held.settle(dst, KV, Orphan)
	dst = l.endPairsAfterPanic(e.Idle, dst)
	const bodyToErrorWriter, memoryBack = Pass, Back // the code that answers gives it back
	dst = l.settlePassthrough(bodyToErrorWriter, memoryBack, dst)
	dst = l.held.settle(dst, Copy, Back)
	dst = l.tries.resolve500(Disputed, dst)
	const mayBreakEngines = true // so settleAfterAttempts discards nothing
	return l.held.settleAfterAttempts(dst, mayBreakEngines)
}

// endPairsAfterPanic: pairs before the last need nothing. Their decode calls have ended, and the
// end of a prefill call gives its lease back.
func (l *Lifecycle) endPairsAfterPanic(noCallBegan bool, dst []Effect) []Effect {
	for i := range l.pairs {
		number := i + 1
		switch {
		case l.pairs[i].DecodeEnded():
		case noCallBegan:
			dst = l.stepPair(Event{Kind: NotSent, Pair: number}, dst)
		default:
			dst = l.stepPair(Event{Kind: DecodeFailed, Reason: Died, Pair: number}, dst)
		}
	}
	return dst
}
