package lifecycle

const (
	mostFailed = 3 // engines that may fail at a request before its client gets the error
	mostAsked  = 8 // engines that one request tries, including those that turn out not to have its endpoint or its model
)

// pass handles an event of a request that is passed through to one engine as it came:
//
//	Choosing → Calling → Answering → Done
//	   ↑        ↓    ↓      ↑
//	   |        | Redialing ┘
//	   └────────┴────┘
func (l *Lifecycle) pass(e Event, dst []Effect) []Effect {
	called := l.state == Calling || l.state == Redialing
	switch {
	case l.state == Fresh && e.What == Begun:
		l.script = Passed
		l.owed.take(Seat)
		l.owed.take(Body)
		return l.choose(dst)
	case l.state == Choosing && e.What == Chosen:
		l.tries.asked++
		return l.call(SendOver, dst)
	case l.state == Choosing && e.What == NoneLeft:
		return l.noneLeft(dst)
	case l.state == Choosing && e.What == NoRoute:
		return l.turnAway(OfRanks, dst)
	case called && e.What == Fell:
		return l.callFell(e, dst)
	case called && e.What == First:
		return append(l.owed.settle(dst, Body, Back), Effect{Do: AnswerIt})
	case l.state == Answering && e.What == Ends:
		return append(l.letGo(Back, Pass, dst), Effect{Do: EndWhole})
	case l.state == Answering && e.What == Fell:
		return append(l.letGo(Back, Back, dst), Effect{Do: BreakOff})
	}
	return dst
}

// choose asks for an engine to which the request was not sent yet. After mostAsked engines it ends the request instead.
func (l *Lifecycle) choose(dst []Effect) []Effect {
	if l.tries.asked == mostAsked {
		return l.noneLeft(dst)
	}
	return append(dst, Effect{Do: Choose})
}

// noneLeft ends a request for which no engine is left. If an engine failed at the request, the client gets the error of the last such
// engine.
func (l *Lifecycle) noneLeft(dst []Effect) []Effect {
	clientError := OfRanks
	if l.tries.counted > 0 || l.tries.unlisted > 0 {
		clientError = OfAttempt
	}
	return l.turnAway(clientError, dst)
}

// call sends the request to the chosen engine, with the effect SendOver, or SendAnew for the second try at the same
// engine. The call counts against the engine, and memory is set aside for the answer.
func (l *Lifecycle) call(effect Do, dst []Effect) []Effect {
	l.owed.take(Call)
	l.owed.take(Memory)
	return append(dst, Effect{Do: effect, Until: ByProbe})
}

// callFell handles a call that has ended without an answer. The engine keeps nothing of the request, so another engine is asked, unless the
// request itself may be the cause.
func (l *Lifecycle) callFell(e Event, dst []Effect) []Effect {
	verdict := e.End.Verdict()
	dst = l.owed.settle(dst, Memory, Back)
	dst = l.owed.settle(dst, Call, verdict.KV)
	switch {
	case e.Left:
		return l.turnAway(OfClient, dst)
	// two connections ended without an answer, so the request may have killed the engine: no other engine is risked
	case l.state == Redialing && e.End.Far < Headed && !e.End.Moved:
		verdict.Next = Elsewhere
		dst = append(dst, Effect{Do: Recall})
	case verdict.Next == Same:
		return l.call(SendAnew, dst)
	case verdict.Next == Anew: // the engine does not have the endpoint
		return l.choose(append(dst, Effect{Do: Remember}, Effect{Do: Recall}))
	case verdict.Next == NoModel:
		l.tries.unlisted++
		return l.choose(dst)
	case verdict.Next == Over: // the request is at fault
		return l.turnAway(OfAttempt, dst)
	}
	l.tries.counted++
	dst = append(dst, Effect{Do: Complain})
	if verdict.Next != Again || l.tries.counted == mostFailed {
		return l.turnAway(OfAttempt, dst)
	}
	return l.choose(dst)
}

// turnAway ends the request with an error for the client. The code that answers with the error settles the request's body (see Body).
func (l *Lifecycle) turnAway(clientError Error, dst []Effect) []Effect {
	return append(l.letGo(Pass, Back, dst), Effect{Do: Fail, Error: clientError})
}

// letGo settles everything that a passed-through request still holds. body and memory say how those two things are settled.
func (l *Lifecycle) letGo(body, memory How, dst []Effect) []Effect {
	dst = l.owed.settle(dst, Body, body)
	dst = l.owed.settle(dst, Memory, memory)
	dst = l.owed.settle(dst, Call, Spent)
	return l.owed.settle(dst, Seat, Back)
}
