package lifecycle

// A PassedThing is what a request may hold that one engine serves alone.
type PassedThing uint8

// The things.
const (
	Seat   PassedThing = iota // among the requests that are passed through at once
	Body                      // of the request; one that gets an error passes it on to those who answer with that
	Call                      // to an engine, which counts it and is expected to compute its tokens: Free or Spent
	Memory                    // for an answer in one piece, which has it until it is written
	passedThings
)

// PassedWhat is what may happen to such a request.
type PassedWhat uint8

// What may happen.
const (
	Arrived      PassedWhat = iota // a client sends it
	Chosen                         // there is an engine for it
	NoneLeft                       // no engine is left that takes it
	NoRoute                        // no engine has the endpoint
	CallFell                       // the call ended without what it was for
	CameWhole                      // the engine's answer is here, in one piece
	Streams                        // the first event of it is
	StreamEnded                    // the client has the last one, or has left, or the engine has broken off
	PassPanicked                   // the code that carries effects out did
)

// A PassedEvent is what has happened, and what is known at that moment.
type PassedEvent struct {
	What PassedWhat
	End  Ended // of CallFell
	Left bool  // the client has left
}

// PassedDo is what is to be done.
type PassedDo uint8

// What is to be done. Those from Choose on are the last of a step: the next event tells how they ended, or the life is over.
const (
	GiveUp   PassedDo = iota // a thing is settled
	Remember                 // the engine does not have the endpoint, and is not asked for it for a while
	Recall                   // the failure that counts is the one before
	Complain                 // the log tells of an engine that did not answer
	Choose                   // an engine is looked for that was not tried
	SendOver                 // it gets the request
	SendAnew                 // it gets the request once more, over a new connection
	Hand                     // the client gets the answer
	Account                  // a streamed answer has ended, and is accounted for
	TurnAway                 // the client gets an error
)

// A PassedEffect is something to do.
type PassedEffect struct {
	Do    PassedDo
	Thing PassedThing // of GiveUp
	How   How
	Error Error // of TurnAway: OfAttempt, OfClient, or OfRanks where no engine was found
}

const (
	mostFailed = 3 // so many engines may fail a request before its client gets an error
	mostAsked  = 8 // and so many are asked, those included that do not have its endpoint. The next request asks others
)

// A Passed is the life of a request that goes to one engine as it came, and is not split into prefill and decode. Its state is what
// it waits for:
//
//	Choose → SendOver → Hand → Account
//	   ↑     ↓      ↓    ↑
//	   |     | SendAnew ─┘
//	   └─────┴──────┘
type Passed struct {
	waits  PassedDo // GiveUp: it has not begun
	asked  int      // engines
	failed int      // of these, those that did not answer
	lacked bool     // one of them did not have the model
	holds  [passedThings]bool
}

// Step takes an event in and appends to dst what is to be done, in this order.
func (p *Passed) Step(e PassedEvent, dst []PassedEffect) []PassedEffect {
	sent := p.waits == SendOver || p.waits == SendAnew
	switch {
	case e.What == PassPanicked:
		return p.turnAway(OfAttempt, dst)
	case p.waits == GiveUp && e.What == Arrived:
		p.holds[Seat], p.holds[Body] = true, true
		return p.choose(dst)
	case p.waits == Choose && e.What == Chosen:
		p.asked++
		return p.send(SendOver, dst)
	case p.waits == Choose && e.What == NoneLeft:
		return p.none(dst)
	case p.waits == Choose && e.What == NoRoute:
		return p.turnAway(OfRanks, dst)
	case sent && e.What == CallFell:
		return p.fell(e, dst)
	case sent && e.What == CameWhole:
		return p.end(Back, Pass, PassedEffect{Do: Hand}, dst)
	case sent && e.What == Streams:
		p.waits = Hand
		dst = p.settle(Body, Back, dst)
		return append(p.settle(Memory, Back, dst), PassedEffect{Do: Hand})
	case p.waits == Hand && e.What == StreamEnded && p.holds[Call]:
		return p.end(Back, Back, PassedEffect{Do: Account}, dst)
	}
	return dst
}

// choose has an engine looked for, if one more may be asked.
func (p *Passed) choose(dst []PassedEffect) []PassedEffect {
	if p.asked == mostAsked {
		return p.none(dst)
	}
	p.waits = Choose
	return append(dst, PassedEffect{Do: Choose})
}

// none ends a request for which there is no engine any more.
func (p *Passed) none(dst []PassedEffect) []PassedEffect {
	if p.failed > 0 || p.lacked {
		return p.turnAway(OfAttempt, dst)
	}
	return p.turnAway(OfRanks, dst)
}

func (p *Passed) send(how PassedDo, dst []PassedEffect) []PassedEffect {
	p.waits = how
	p.holds[Call], p.holds[Memory] = true, true
	return append(dst, PassedEffect{Do: how})
}

// fell goes on from the end of a call.
func (p *Passed) fell(e PassedEvent, dst []PassedEffect) []PassedEffect {
	v, second := e.End.Verdict(), p.waits == SendAnew
	dst = p.settle(Memory, Back, dst)
	dst = p.settle(Call, v.KV, dst)
	switch {
	case e.Left:
		return p.turnAway(OfClient, dst)
	case second && e.End.Far < Headed && !e.End.Moved: // it may have died of the request, over the first connection or over the second
		v.Next = Elsewhere
		dst = append(dst, PassedEffect{Do: Recall})
	case v.Next == Same:
		return p.send(SendAnew, dst)
	case v.Next == Anew:
		return p.choose(append(dst, PassedEffect{Do: Remember}, PassedEffect{Do: Recall}))
	case v.Next == Listed:
		p.lacked = true
		return p.choose(dst)
	case v.Next == Over: // the request's fault
		return p.turnAway(OfAttempt, dst)
	}
	p.failed++
	dst = append(dst, PassedEffect{Do: Complain})
	if v.Next != Again || p.failed == mostFailed {
		return p.turnAway(OfAttempt, dst)
	}
	return p.choose(dst)
}

func (p *Passed) turnAway(with Error, dst []PassedEffect) []PassedEffect {
	return p.end(Pass, Back, PassedEffect{Do: TurnAway, Error: with}, dst)
}

// end settles what is held still.
func (p *Passed) end(body, memory How, last PassedEffect, dst []PassedEffect) []PassedEffect {
	p.waits = last.Do
	dst = p.settle(Body, body, dst)
	dst = p.settle(Memory, memory, dst)
	dst = p.settle(Call, Spent, dst)
	return append(p.settle(Seat, Back, dst), last)
}

// settle ends the hold of a thing; one that is not held is settled.
func (p *Passed) settle(t PassedThing, how How, dst []PassedEffect) []PassedEffect {
	if p.holds[t] {
		p.holds[t] = false
		dst = append(dst, PassedEffect{Do: GiveUp, Thing: t, How: how})
	}
	return dst
}
