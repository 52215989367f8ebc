package lifecycle

// State is what a request waits for. The states from TryingLocal on have the order of the effects from TryLocal on: Step computes the
// state from the effect.
type State uint8

// The states.
const (
	Fresh       State = iota // nothing: an attempt may begin
	TryingLocal              // the dispatcher says whether a decode rank computes the prompt alone
	Queued                   // its turn at a prefill engine
	Forwarded                // the answer of another dispatcher
	Probing                  // the prefill engine's answer
	Pooled                   // a slot on a decode rank
	Opening                  // the decode engine's first event
	Coupled                  // the same, of a request that was bound before its prefill: both of its legs are under way
	Pausing                  // the pause before another attempt
	Offering                 // the answer whether another dispatcher should have it now
	Answering                // the end of its answer, or its loss
	Confirming               // the prefill engine's answer, which says whether the KV was complete
	Lost                     // the client's reading of what came of a lost answer, and then whether the answer goes on
	Choosing                 // the choice of an engine that was not tried yet, for a request that is passed through
	Calling                  // that engine's answer, or the first event of it
	Redialing                // the same, over a new connection
	Done
	states
)

// A Lifecycle is how far a request has come, what it holds, and where it may still be served. Step takes what happened, and returns
// what must be done. One goroutine at a time serves the request, but other goroutines may report events of a pair's legs. So
// every caller of Step holds a lock.
//
//	TryingLocal → Queued → Probing → Pooled → Opening → Answering → Done
//	   ↑            ↓        early: Pooled → Coupled ↗      ↓
//	   |            ↓        mixed: Pooled → Opening ↗      ↓
//	   |          Forwarded → Done                         lost
//	   └─────────────── Pausing, Offering ←── Fell ─────────┘
//
// A request that is passed through has states of its own: see pass.
//
// With limits.keep_alive, a client that has waited for long already has the status 200 and comments of the stream. That changes nothing
// here: a request without an answer is tried again as before, and the code that carries out Fail sends the error as an event.
//
// While an answer flows, the Lifecycle has nothing to do: when the answer ends, its stream reports how.
type Lifecycle struct {
	Bound     bool // it is a leg of a fan-out, or its client has a part of its answer: no other dispatcher may have it
	OnlyLocal bool // only a rank that computes the prompt may serve it

	history
	state   State
	script  Script
	dialect Dialect // of the engines of an early attempt
	last    Next    // what the verdict on the last attempt says that follows
	tries   tries
	blame   blame
	owed    owed
	pairs   []Pair // one for each attempt whose decode rank was bound before its prefill; the last one is that of the latest such attempt
}

// Resumed says whether its answer was lost and goes on elsewhere.
func (l *Lifecycle) Resumed() bool { return l.tries.resumed > 0 }

// Dials says whether all calls of the request open new connections, because a connection that had been kept alive had ended unseen.
func (l *Lifecycle) Dials() bool { return l.tries.redials > 0 }

// Losses is how often the answer was lost and went on, or an engine without KV room gave the request back before its first event.
func (l *Lifecycle) Losses() int { return int(l.tries.resumed + l.tries.givenBack) }

// Breaches are the connections that broke under the request.
func (l *Lifecycle) Breaches() []Breach { return l.tries.breaches }

// Reserved says whether the request has a place in the pool.
func (l *Lifecycle) Reserved() bool { return l.owed.has[Place] }

// CameBack records in the history that another dispatcher gave the request back. by is RegionReturns or SiblingReturns.
func (l *Lifecycle) CameBack(by What) {
	if by == RegionReturns {
		l.history.moves(gaveBack)
	} else {
		l.history.moves(askAgain)
	}
}

// Moved gives l, which is one part of a request of several prompts or answers, the history of the whole request.
func (l *Lifecycle) Moved(whole *Lifecycle) { l.history = whole.history }

// Step takes an event and appends to dst the effects to carry out, in this order. At most one of them is waited for (those from TryLocal
// on). It comes last, and it sets the state that the request is in until the event that says how it ended.
func (l *Lifecycle) Step(e Event, dst []Effect) []Effect {
	before := len(dst)
	switch {
	case e.What == Panicked:
		return l.panicked(e, dst)
	case e.What >= CalledBack:
		return l.stepPair(e, dst)
	case e.Script == Passed || l.script == Passed:
		dst = l.pass(e, dst)
	default:
		dst = l.step(e, dst)
	}
	if last := len(dst) - 1; last >= before && dst[last].Do >= TryLocal && l.state != Done {
		l.state = min(TryingLocal+State(dst[last].Do-TryLocal), Done)
	}
	return dst
}

// step handles what the state of the request waits for, if the request is split into prefill and decode. Step has already handled a panic
// and the events of pairs. A state may handle Fell itself and return; in all others Fell goes to fell, below the switch. A state ignores
// every other event.
func (l *Lifecycle) step(e Event, dst []Effect) []Effect {
	switch l.state {
	case Fresh:
		if e.What == Begun {
			return l.begin(dst)
		}
	case TryingLocal:
		switch {
		case e.What == LocalBound:
			l.history.moves(gotTurn)
			l.owed.bind()
			l.keepCopy(&e)
			return l.sendDecode(&e, dst)
		case l.OnlyLocal: // no rank computes the prompt, and no prefill engine may have the request
			return l.fail(e, OfRanks, dst)
		}
		l.owed.take(Holder) // the request goes to a prefill engine, so it will have leases
		return append(dst, Effect{Do: Queue})
	case Queued:
		return l.queued(e, dst)
	case Forwarded:
		switch e.What {
		case PeerAnswers:
			l.state = Done
			return append(l.conclude(dst), Effect{Do: AnswerIt})
		case RegionReturns, SiblingReturns:
			l.CameBack(e.What)
			return l.begin(dst)
		}
		return l.fail(e, OfPeer, dst) // the other dispatcher refused it, or its leg fell
	case Probing:
		switch e.What {
		case First: // the prefill engine has given the whole answer itself, and there is no KV to hand over
			dst = l.owed.settle(dst, Lease, Free)
			dst = l.owed.conclude(dst, l.tries.poisons())
			// This engine serves the request, so an engine that answered it with a 500 before was itself the cause.
			return append(l.blame.find(Guilty, dst), Effect{Do: AnswerIt})
		case HandedOver:
			dst = l.owed.settle(dst, Lease, Pass)
			l.owed.take(KV)
			l.owed.kvHasProbeID = e.Named
			return l.enqueue(dst)
		}
	case Pooled:
		if e.What == Bound {
			l.owed.bind()
			l.keepCopy(&e)
			if l.script == Early {
				l.owed.has[Lease] = false // from now on the pair settles the lease
				l.pairs = append(l.pairs, newPair(l.dialect, e.Whole, e.Deaf))
				until := NotHere
				if l.dialect.CallsBack { // the callback comes before anything is prefilled
					until = ByCallback
				}
				return append(dst, Effect{Do: SendBoth, Until: until, Pair: len(l.pairs)})
			}
			return l.sendDecode(&e, dst)
		}
	case Opening, Coupled:
		switch e.What {
		case Ends: // the whole answer came at once. The slot is free, whatever the prefill engine reports
			return l.owed.unbind(append(dst, Effect{Do: Acclaim}), Finish)
		case First:
			l.keepCopy(&e)
			dst = l.owed.settle(dst, KV, Free)    // the prefill engine has its blocks back
			dst = l.owed.settle(dst, Lease, Free) // only a mixed attempt still holds its lease in these states
			dst = l.owed.conclude(dst, l.tries.poisons())
			// This engine serves the request, so an engine that answered it with a 500 before was itself the cause.
			return append(l.blame.find(Guilty, dst), Effect{Do: AnswerIt})
		}
	case Answering, Confirming, Lost:
		return l.answered(e, dst)
	case Done:
		return dst
	case Pausing:
		if e.What == Retried {
			return l.begin(dst)
		}
		return l.giveUp(e, dst)
	case Offering:
		if e.What == Offered {
			l.tries.restart()
			return l.begin(append(l.conclude(dst), Effect{Do: Restart}))
		}
		return l.fail(e, OfAttempt, dst)
	}
	if e.What == Fell {
		return l.fell(e, dst)
	}
	return dst
}

// Pair returns the n-th pair of the request. The first one is 1.
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

// begin begins an attempt. If a hand-off is left from the attempt before, only a decode rank is looked for; else the attempt begins with
// the question whether a decode rank computes the prompt alone.
func (l *Lifecycle) begin(dst []Effect) []Effect {
	l.script = Late
	if !l.Bound && l.Open() {
		dst = append(dst, Effect{Do: Question})
	}
	dst = append(dst, Effect{Do: Attempt})
	if l.owed.has[KV] {
		return l.enqueue(dst)
	}
	return append(dst, Effect{Do: TryLocal})
}

// sendDecode sends the request to the rank that was bound. If the request has no hand-off, the rank computes the prompt, too.
func (l *Lifecycle) sendDecode(e *Event, dst []Effect) []Effect {
	until := ByFirstEvent
	switch {
	case e.Whole:
		until = ByWhole
	case l.script == Mixed: // the rank computes the prompt first, and other prompts may be before it
		until = ByProbe
	}
	return append(dst, Effect{Do: SendDecode, Until: until})
}

// confirms is how long the proxy waits, once the answer has ended or was lost, for the prefill engine to confirm that the KV of the answer
// was complete. Only an early attempt has such a wait: in the others the prefill engine has answered before.
func (l *Lifecycle) confirms() Limit {
	if l.script != Early {
		return NotHere
	}
	return l.Pair(len(l.pairs)).Confirms()
}

// keepCopy notes that bytes of the request stay in memory, so that they are given back when they are not needed any more.
func (l *Lifecycle) keepCopy(e *Event) {
	if e.Copied {
		l.owed.take(Copy)
	}
}

// enqueue has the pool find a rank. From then on the request's place belongs to its entry in the pool.
func (l *Lifecycle) enqueue(dst []Effect) []Effect {
	enqueue := Effect{Do: Enqueue, Script: l.script, Place: !l.owed.has[Place]}
	return append(l.owed.settle(dst, Place, Pass), enqueue)
}

// queued handles an event in the state Queued: the request's turn came, another dispatcher should have the request, or no turn came.
func (l *Lifecycle) queued(e Event, dst []Effect) []Effect {
	switch e.What {
	case Turn:
		l.history.moves(gotTurn) // from now on the request's retries stay here
		l.owed.take(Place)
		l.owed.take(Lease)
		if l.script, l.dialect = e.Script, e.Dialect; l.script != Late {
			return l.enqueue(dst) // a rank is bound before anything is prefilled
		}
		return append(dst, Effect{Do: SendProbe, Until: ByProbe})
	case Directed:
		if l.Bound { // where it is served was settled before
			return l.fail(e, OfOwner, append(dst, Effect{Do: Drop}))
		}
		return append(dst, Effect{Do: Forward})
	}
	l.last = Elsewhere
	if e.Open && !e.Left && l.offer(failed) {
		return append(dst, Effect{Do: Offer})
	}
	return l.fail(e, OfAttempt, dst)
}

// fell handles the end of a leg without its result: it settles what the leg held, holds the failure against the engine that is at fault,
// and says whether the request is tried again.
func (l *Lifecycle) fell(e Event, dst []Effect) []Effect {
	if e.End.Why == RanksLost && !l.history.moves(lostRanks) {
		e.End.Why = NoRank
	}
	verdict := e.End.Verdict()
	if l.script == Mixed && verdict.Next == Again && e.End.Refused() { // the rank computed nothing, so no KV was lost
		verdict.Next = Untaken
	}
	dst = l.condemn(&e, verdict.Blame, dst)
	returns := e.End.Why == Withheld && l.tries.withheld < mostHeld // the engine is expected back in a moment
	if e.End.Why == Withheld && e.End.Leg == Prefill && !returns {
		verdict.KV = Refuse // it was expected back, and is not: that counts as its failure
	}
	switch {
	case l.script == Mixed && (verdict.Blame == Nobody || e.End.Why == Busy):
		// the group has not failed: at most the queue of one rank is full
		dst = l.owed.settle(dst, Lease, Free) // the engine keeps no KV for a hand-off
	case l.script == Mixed:
		dst = l.owed.settle(dst, Lease, Refuse)
	case verdict.KV != Keep:
		dst = l.owed.settle(dst, Lease, verdict.KV) // of a prefill leg
		dst = l.owed.settle(dst, KV, verdict.KV)    // of a decode leg
	}
	slotHow, nothingSent := Failing, e.End.Why == Unready || e.End.Why == Unlearned || e.End.Why == Leaving
	if nothingSent || e.Quit || e.End.Why == NotOurs || e.End.Why == Left && e.End.Open {
		slotHow = Cancelled
	}
	dst = l.owed.unbind(dst, slotHow)
	if !l.Resumed() { // else the kept bytes belong to the whole answer, not to this attempt
		dst = l.owed.settle(dst, Copy, Back)
	}
	// The next attempt may have the same rank if the rank was sent nothing, or did not fail.
	if e.End.Leg == Decode && !nothingSent && e.End.Why != GivenBack && e.End.Why != Stale && !returns {
		dst = append(dst, Effect{Do: Shun})
	}
	l.last = verdict.Next
	if verdict.Next == Over || verdict.Next == Ask || e.Left {
		return l.giveUp(e, dst)
	}
	return append(dst, Effect{Do: Pause, Retry: l.tries.retry(verdict.Next, &e)})
}

// condemn holds the failure of a leg against its engine, unless nobody is at fault. A prefill engine's failures are counted when its lease
// is settled, so of these only a 500 is noted here. Whether the engine or the request is the cause of a 500 (Disputed), the next engine
// shows; until then the engine is only accused.
func (l *Lifecycle) condemn(e *Event, whom Blame, dst []Effect) []Effect {
	if whom == Disputed && !e.Faulty { // e.g. the KV did not arrive, which is not the request's fault
		whom = Engine
	}
	if whom == Nobody || e.End.Leg == Prefill && whom != Disputed {
		return dst
	}
	dst = append(dst, Effect{Do: Condemn, Blame: whom, Leg: e.End.Leg})
	if whom == Disputed {
		return l.blame.accuse(e.Engine, dst)
	}
	return dst
}

// answered handles an event after the client's answer has begun, in the states Answering, Confirming and Lost. An answer that can neither
// end nor go on elsewhere is broken off.
func (l *Lifecycle) answered(e Event, dst []Effect) []Effect {
	switch {
	case e.What == Begun && l.state == Lost: // the lost answer goes on, with an attempt as of a new request
		l.tries.restart()
		l.tries.resumed++
		return l.begin(dst)
	case e.What == Ends && l.state == Answering:
		if l.owed.has[Slot] { // else the answer ended with its first event, and the prefill engine's answer was already waited for
			dst = l.owed.unbind(append(dst, Effect{Do: Acclaim}), Finish)
			if l.script == Early { // the prefill engine may still report that the KV was not complete
				return append(dst, Effect{Do: Confirm, Until: l.confirms()})
			}
		}
		fallthrough // nothing is left to wait for: the answer has ended
	case e.What == Ends, e.What == Believed:
		return append(l.conclude(dst), Effect{Do: EndWhole})
	case e.What == Fell && l.state == Answering:
		return l.answerLost(e, dst)
	}
	return append(l.conclude(dst), Effect{Do: BreakOff})
}

// answerLost handles the loss of an answer that has begun. The answer goes on elsewhere (GoOn), unless the client has left, no engine would
// answer otherwise, or two engines have failed at the request: then it goes to no third one, and the answer is broken off.
func (l *Lifecycle) answerLost(e Event, dst []Effect) []Effect {
	verdict, slotHow := e.End.Verdict(), Failing
	if e.Left || e.End.Why == Left {
		verdict, slotHow = Verdict{Next: Over}, Cancelled
	}
	dst = l.owed.unbind(l.condemn(&e, verdict.Blame, dst), slotHow)
	if verdict.Next == Over || l.tries.noteFailure(&e) {
		return append(l.conclude(dst), Effect{Do: BreakOff})
	}
	if verdict.Next != NoRoom { // a rank that had no room has not failed
		dst = append(dst, Effect{Do: Shun})
	}
	return append(dst, Effect{Do: GoOn, Until: l.confirms()})
}

// giveUp ends the attempts here. Another dispatcher is offered the request, if it may have it and the failure is not the request's;
// else the client gets an error.
func (l *Lifecycle) giveUp(e Event, dst []Effect) []Effect {
	dst = l.owed.settle(dst, KV, Doubt) // no engine was sent the hand-off, and no answer needs its KV any more
	switch {
	case e.Left:
		return l.fail(e, OfClient, dst)
	case l.last == Ask && l.offer(lostGroup), l.last != Ask && l.last != Over && !l.tries.poisons() && l.offer(failed):
		return append(dst, Effect{Do: Offer, Group: l.last == Ask})
	}
	return l.fail(e, OfAttempt, dst)
}

// offer says whether evenkeel may ask again if another dispatcher should have the request, and if so records the reason in the history.
func (l *Lifecycle) offer(why move) bool {
	return !l.Bound && l.history.moves(why)
}

// fail ends the request with an error for the client.
func (l *Lifecycle) fail(e Event, clientError Error, dst []Effect) []Effect {
	if e.Left {
		clientError = OfClient
	}
	return append(l.conclude(dst), Effect{Do: Fail, Error: clientError})
}

// conclude settles what the request still holds when no attempt follows here. The cause of a 500 that no other engine confirmed stays
// unknown.
func (l *Lifecycle) conclude(dst []Effect) []Effect {
	dst = l.owed.settle(dst, Copy, Back)
	return l.owed.conclude(l.blame.find(Unclear, dst), l.tries.poisons())
}

// panicked ends the request after the code that carries out effects has panicked. It settles everything that the request holds in the way
// that is safe if any engine may still be at work for it: KV is left to the engine's hold timeout, and nothing is discarded.
func (l *Lifecycle) panicked(e Event, dst []Effect) []Effect {
	l.state = Done
	dst = l.owed.unbind(dst, Failing)
	dst = l.owed.settle(dst, Lease, Orphan)
	dst = l.owed.settle(dst, KV, Orphan)
	for i := range l.pairs {
		switch p := &l.pairs[i]; {
		case p.Closed():
		case e.Idle: // neither leg of the last pair was begun
			dst = l.stepPair(Event{What: NotSent, Pair: i + 1}, dst)
		default:
			dst = l.stepPair(Event{What: DecodeFell, Reason: Died, Pair: i + 1}, dst)
		}
	}
	dst = l.letGo(Pass, Back, dst)
	dst = l.owed.settle(dst, Copy, Back)
	return l.owed.conclude(l.blame.find(Unclear, dst), true)
}
