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
	last    Next    // what the last attempt came to
	tries   tries
	blame   blame
	owed    owed
	pairs   []Pair // one for each attempt that was bound before its prefill
}

// Resumed says whether its answer was lost and goes on elsewhere.
func (l *Lifecycle) Resumed() bool { return l.tries.resumed > 0 }

// Dials says whether all calls of the request open new connections, because a connection that had been kept alive had ended unseen.
func (l *Lifecycle) Dials() bool { return l.tries.redials > 0 }

// Losses is how often the answer was lost and went on, or an engine without KV room gave the request back before its first event.
func (l *Lifecycle) Losses() int { return int(l.tries.resumed + l.tries.bounced) }

// Breaches are the connections that broke under the request.
func (l *Lifecycle) Breaches() []Breach { return l.tries.broke }

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

// Moved gives a leg the history of the request that it is a part of.
func (l *Lifecycle) Moved(whole *Lifecycle) { l.history = whole.history }

// Step takes an event and appends to dst the effects to carry out, in this order. If one of them is waited for, it comes last and
// sets the new state.
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

func (l *Lifecycle) step(e Event, dst []Effect) []Effect {
	switch l.state {
	case Fresh:
		if e.What == Begun {
			return l.begin(dst)
		}
	case TryingLocal:
		switch {
		case e.What == LocalBound:
			l.history.moves(turned)
			l.owed.bind()
			l.keep(&e)
			return l.sendDecode(&e, dst)
		case l.OnlyLocal:
			return l.fail(e, OfRanks, dst)
		}
		l.owed.take(Holder)
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
		return l.fail(e, OfPeer, dst)
	case Probing:
		switch e.What {
		case First: // the prefill engine has given the whole answer, and there is no KV to hand over
			dst = l.owed.settle(dst, Lease, Free)
			dst = l.owed.conclude(dst, l.tries.poisons())
			return append(l.blame.find(Guilty, dst), Effect{Do: AnswerIt})
		case HandedOver:
			dst = l.owed.settle(dst, Lease, Pass)
			l.owed.take(KV)
			l.owed.named = e.Named
			return l.enqueue(dst)
		}
	case Pooled:
		if e.What == Bound {
			l.owed.bind()
			l.keep(&e)
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
	case Opening, Coupled: // only a mixed attempt still has its lease here
		switch e.What {
		case Ends: // the whole answer came at once. The slot is free, whatever the prefill engine reports
			return l.owed.unbind(append(dst, Effect{Do: Acclaim}), Finish)
		case First:
			l.keep(&e)
			dst = l.owed.settle(dst, KV, Free) // the prefill engine has its blocks back
			dst = l.owed.settle(dst, Lease, Free)
			dst = l.owed.conclude(dst, l.tries.poisons())
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
		return l.givenUp(e, dst)
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

// stepPair passes an event to its pair. It changes nothing else of the life, because the attempt of that pair may be over.
func (l *Lifecycle) stepPair(e Event, dst []Effect) []Effect {
	before := len(dst)
	dst = l.Pair(e.Pair).step(e, dst)
	for i := range dst[before:] {
		dst[before+i].Pair = e.Pair
	}
	return dst
}

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

// sendDecode sends the request to the rank that was bound. Without KV the rank computes the prompt, too.
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

// confirms is how long the proxy waits for the prefill engine to confirm that the KV of an answer was complete.
func (l *Lifecycle) confirms() Limit {
	if l.script != Early {
		return NotHere
	}
	return l.Pair(len(l.pairs)).Confirms()
}

func (l *Lifecycle) keep(e *Event) {
	if e.Copied {
		l.owed.take(Copy)
	}
}

// enqueue has the pool find a rank. From then on the request's place belongs to its entry in the pool.
func (l *Lifecycle) enqueue(dst []Effect) []Effect {
	enqueue := Effect{Do: Enqueue, Script: l.script, Place: !l.owed.has[Place]}
	return append(l.owed.settle(dst, Place, Pass), enqueue)
}

func (l *Lifecycle) queued(e Event, dst []Effect) []Effect {
	switch e.What {
	case Turn:
		l.history.moves(turned) // from now on the request's retries stay here
		l.owed.take(Place)
		l.owed.take(Lease)
		if l.script, l.dialect = e.Script, e.Dialect; l.script != Late {
			return l.enqueue(dst)
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

// fell handles the end of a leg without a result: it settles what the leg held, and says what follows.
func (l *Lifecycle) fell(e Event, dst []Effect) []Effect {
	if e.End.Why == RanksLost && !l.history.moves(lostRanks) {
		e.End.Why = NoRank
	}
	v := e.End.Verdict()
	if l.script == Mixed && v.Next == Again && e.End.Refused() { // the rank computed nothing, so no KV was lost
		v.Next = Untaken
	}
	dst = l.condemn(&e, v.Blame, dst)
	comes := e.End.Why == Withheld && l.tries.held < mostHeld // the engine is expected back in a moment
	if e.End.Why == Withheld && e.End.Leg == Prefill && !comes {
		v.KV = Refuse
	}
	switch {
	case l.script == Mixed && (v.Blame == Nobody || e.End.Why == Busy): // the group has not failed: at most the queue of one rank is full
		dst = l.owed.settle(dst, Lease, Free) // the engine keeps no KV for a hand-off
	case l.script == Mixed:
		dst = l.owed.settle(dst, Lease, Refuse)
	case v.KV != Keep:
		dst = l.owed.settle(dst, Lease, v.KV)
		dst = l.owed.settle(dst, KV, v.KV)
	}
	how, idle := Failing, e.End.Why == Unready || e.End.Why == Unlearned || e.End.Why == Leaving // idle: the engine was sent nothing
	if idle || e.Quit || e.End.Why == NotOurs || e.End.Why == Left && e.End.Open {
		how = Cancelled
	}
	dst = l.owed.unbind(dst, how)
	if !l.Resumed() { // else the kept bytes belong to the whole answer, not to this attempt
		dst = l.owed.settle(dst, Copy, Back)
	}
	if e.End.Leg == Decode && !idle && e.End.Why != GivenBack && e.End.Why != Stale && !comes {
		dst = append(dst, Effect{Do: Shun})
	}
	l.last = v.Next
	if v.Next == Over || v.Next == Ask || e.Left {
		return l.givenUp(e, dst)
	}
	return append(dst, Effect{Do: Pause, Retry: l.tries.next(v.Next, &e)})
}

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

func (l *Lifecycle) answered(e Event, dst []Effect) []Effect {
	switch {
	case e.What == Begun && l.state == Lost:
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
		fallthrough
	case e.What == Ends, e.What == Believed:
		return append(l.conclude(dst), Effect{Do: EndWhole})
	case e.What == Fell && l.state == Answering:
		return l.broke(e, dst)
	}
	return append(l.conclude(dst), Effect{Do: BreakOff})
}

// broke handles the loss of an answer that has begun. A request at which two engines have failed goes to no third one.
func (l *Lifecycle) broke(e Event, dst []Effect) []Effect {
	v, how := e.End.Verdict(), Failing
	if e.Left || e.End.Why == Left {
		v, how = Verdict{Next: Over}, Cancelled
	}
	dst = l.owed.unbind(l.condemn(&e, v.Blame, dst), how)
	if v.Next == Over || l.tries.breaks(&e) {
		return append(l.conclude(dst), Effect{Do: BreakOff})
	}
	if v.Next != Room {
		dst = append(dst, Effect{Do: Shun})
	}
	return append(dst, Effect{Do: GoOn, Until: l.confirms()})
}

func (l *Lifecycle) givenUp(e Event, dst []Effect) []Effect {
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

func (l *Lifecycle) fail(e Event, with Error, dst []Effect) []Effect {
	if e.Left {
		with = OfClient
	}
	return append(l.conclude(dst), Effect{Do: Fail, Error: with})
}

func (l *Lifecycle) conclude(dst []Effect) []Effect {
	dst = l.owed.settle(dst, Copy, Back)
	return l.owed.conclude(l.blame.find(Unclear, dst), l.tries.poisons())
}

func (l *Lifecycle) panicked(e Event, dst []Effect) []Effect {
	l.state = Done
	dst = l.owed.unbind(dst, Failing)
	dst = l.owed.settle(dst, Lease, Orphan)
	dst = l.owed.settle(dst, KV, Orphan)
	for i := range l.pairs {
		switch p := &l.pairs[i]; {
		case p.Closed():
		case e.Idle:
			dst = l.stepPair(Event{What: NotSent, Pair: i + 1}, dst)
		default:
			dst = l.stepPair(Event{What: DecodeFell, Reason: Died, Pair: i + 1}, dst)
		}
	}
	dst = l.letGo(Pass, Back, dst)
	dst = l.owed.settle(dst, Copy, Back)
	return l.owed.conclude(l.blame.find(Unclear, dst), true)
}
