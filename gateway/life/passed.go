package life

// A PassedThing is what a request may hold that one engine serves alone.
type PassedThing uint8

// The things.
const (
	Seat   PassedThing = iota // among the requests that are passed through at once
	Body                      // of the request, in memory
	Call                      // to an engine, which counts it, and is expected to compute its tokens
	Memory                    // for an answer in one piece
	passedThings
)

// settlesPassed are the ways in which each thing may be settled.
var settlesPassed = [passedThings][]How{
	Seat:   {Back},
	Body:   {Back, Pass}, // the one who answers with the error has it then
	Call:   {Free, Spent},
	Memory: {Back, Pass}, // the answer has it until it is written
}

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

// What is to be done. Choose, SendOver and SendAnew are waited for: the next event tells how they ended.
const (
	GiveUp     PassedDo = iota // a thing is settled
	AnotherTry                 // another attempt follows
	Remember                   // the engine does not have the endpoint, and is not asked for it for a while
	Recall                     // the failure that counts is the one before
	Complain                   // the log tells of an engine that did not answer
	Choose                     // an engine is looked for that was not tried
	SendOver                   // it gets the request
	SendAnew                   // it gets the request once more, over a new connection
	Hand                       // the client gets the answer
	Account                    // the answer has ended, and is accounted for
	TurnAway                   // the client gets an error
)

// A PassedEffect is something to do.
type PassedEffect struct {
	Do    PassedDo
	Thing PassedThing // of GiveUp
	How   How
	Error Error // of TurnAway: OfAttempt, OfClient, or OfRanks where no engine was found
}

// mostFailed is how many engines may fail a request before its client gets an error.
const mostFailed = 3

// mostAsked is how many engines are asked for one request, those included that do not have its endpoint. The next request asks
// others.
const mostAsked = 8

// passing is where such a request stands.
type passing uint8

const (
	arriving  passing = iota // nothing has begun
	choosing                 // an engine is looked for
	calling                  // an engine has the request
	recalling                // it has it a second time
	flowing                  // its answer flows
	passed
)

// A Passed is the life of a request that goes to one engine as it came, and is not split into prefill and decode.
//
//	choosing → calling → flowing → passed
//	   ↑       ↓   ↓
//	   |       recalling
//	   └───────────┘
type Passed struct {
	state  passing
	asked  int // engines
	failed int // of these, those that did not answer
	holds  [passedThings]bool
}

// Step takes an event in and appends to dst what is to be done, in this order. What is waited for is the last.
func (p *Passed) Step(e PassedEvent, dst []PassedEffect) []PassedEffect {
	under := p.state == calling || p.state == recalling
	switch {
	case e.What == PassPanicked:
		p.state = passed
		dst = p.settle(dst, Body, Pass)
		return p.letGo(dst, Back)
	case p.state == arriving && e.What == Arrived:
		p.holds[Seat], p.holds[Body] = true, true
		return p.choose(dst)
	case p.state == choosing && e.What == Chosen:
		p.asked++
		return p.call(calling, SendOver, dst)
	case p.state == choosing && e.What == NoneLeft && p.failed > 0:
		return p.refuse(OfAttempt, dst)
	case p.state == choosing && (e.What == NoneLeft || e.What == NoRoute):
		return p.refuse(OfRanks, dst)
	case under && e.What == CallFell:
		return p.fell(e, dst)
	case under && e.What == CameWhole:
		p.state = passed
		dst = p.settle(dst, Body, Back)
		return append(p.letGo(dst, Pass), PassedEffect{Do: Hand})
	case under && e.What == Streams:
		p.state = flowing
		dst = p.settle(dst, Body, Back)
		return append(p.settle(dst, Memory, Back), PassedEffect{Do: Hand})
	case p.state == flowing && e.What == StreamEnded:
		p.state = passed
		return append(p.letGo(dst, Back), PassedEffect{Do: Account})
	}
	return dst
}

// choose has an engine looked for, if one more may be asked.
func (p *Passed) choose(dst []PassedEffect) []PassedEffect {
	switch {
	case p.asked == mostAsked && p.failed > 0:
		return p.refuse(OfAttempt, dst)
	case p.asked == mostAsked:
		return p.refuse(OfRanks, dst)
	case p.asked > 0:
		dst = append(dst, PassedEffect{Do: AnotherTry})
	}
	p.state = choosing
	return append(dst, PassedEffect{Do: Choose})
}

// call has the request sent.
func (p *Passed) call(state passing, do PassedDo, dst []PassedEffect) []PassedEffect {
	p.state = state
	p.holds[Call], p.holds[Memory] = true, true
	return append(dst, PassedEffect{Do: do})
}

// fell goes on from the end of a call.
func (p *Passed) fell(e PassedEvent, dst []PassedEffect) []PassedEffect {
	v, second := e.End.Verdict(), p.state == recalling
	dst = p.settle(dst, Memory, Back)
	dst = p.settle(dst, Call, v.KV)
	switch {
	case e.Left:
		return p.refuse(OfClient, dst)
	case second && e.End.Far < Headed && !e.End.Moved: // it may have died of the request, at the first connection or at the second
		dst = append(dst, PassedEffect{Do: Recall})
		v.Next = Elsewhere
	case v.Next == Same:
		return p.call(recalling, SendAnew, append(dst, PassedEffect{Do: AnotherTry}))
	case v.Next == Anew:
		return p.choose(append(dst, PassedEffect{Do: Remember}, PassedEffect{Do: Recall}))
	case v.Next == Over: // the request's fault
		return p.refuse(OfAttempt, dst)
	}
	p.failed++
	dst = append(dst, PassedEffect{Do: Complain})
	if v.Next != Again || p.failed == mostFailed {
		return p.refuse(OfAttempt, dst)
	}
	return p.choose(dst)
}

// refuse ends the life with an error.
func (p *Passed) refuse(with Error, dst []PassedEffect) []PassedEffect {
	p.state = passed
	dst = p.settle(dst, Body, Pass)
	return append(p.settle(dst, Seat, Back), PassedEffect{Do: TurnAway, Error: with})
}

// letGo settles a call that was answered, and the seat.
func (p *Passed) letGo(dst []PassedEffect, memory How) []PassedEffect {
	dst = p.settle(dst, Memory, memory)
	dst = p.settle(dst, Call, Spent)
	return p.settle(dst, Seat, Back)
}

// settle ends the hold of a thing; one that is not held is settled.
func (p *Passed) settle(dst []PassedEffect, t PassedThing, how How) []PassedEffect {
	if !p.holds[t] {
		return dst
	}
	p.holds[t] = false
	return append(dst, PassedEffect{Do: GiveUp, Thing: t, How: how})
}
