package lifecycle

const (
	mostFailed = 3 // so many engines may fail a request before its client gets an error
	mostAsked  = 8 // so many engines are asked at most, also counting those without its endpoint. The next request asks others
)

// pass is Step of a request that goes to one engine as it came:
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

func (l *Lifecycle) choose(dst []Effect) []Effect {
	if l.tries.asked == mostAsked {
		return l.noneLeft(dst)
	}
	return append(dst, Effect{Do: Choose})
}

func (l *Lifecycle) noneLeft(dst []Effect) []Effect {
	with := OfRanks
	if l.tries.count > 0 || l.tries.unlisted > 0 {
		with = OfAttempt
	}
	return l.turnAway(with, dst)
}

func (l *Lifecycle) call(how Do, dst []Effect) []Effect {
	l.owed.take(Call)
	l.owed.take(Memory)
	return append(dst, Effect{Do: how, Until: ByProbe})
}

func (l *Lifecycle) callFell(e Event, dst []Effect) []Effect {
	v := e.End.Verdict()
	dst = l.owed.settle(dst, Memory, Back)
	dst = l.owed.settle(dst, Call, v.KV)
	switch {
	case e.Left:
		return l.turnAway(OfClient, dst)
	// the engine may have died of the request, over the first connection or over the second
	case l.state == Redialing && e.End.Far < Headed && !e.End.Moved:
		v.Next = Elsewhere
		dst = append(dst, Effect{Do: Recall})
	case v.Next == Same:
		return l.call(SendAnew, dst)
	case v.Next == Anew:
		return l.choose(append(dst, Effect{Do: Remember}, Effect{Do: Recall}))
	case v.Next == Listed:
		l.tries.unlisted++
		return l.choose(dst)
	case v.Next == Over: // the request's fault
		return l.turnAway(OfAttempt, dst)
	}
	l.tries.count++
	dst = append(dst, Effect{Do: Complain})
	if v.Next != Again || l.tries.count == mostFailed {
		return l.turnAway(OfAttempt, dst)
	}
	return l.choose(dst)
}

func (l *Lifecycle) turnAway(with Error, dst []Effect) []Effect {
	return append(l.letGo(Pass, Back, dst), Effect{Do: Fail, Error: with})
}

func (l *Lifecycle) letGo(body, memory How, dst []Effect) []Effect {
	dst = l.owed.settle(dst, Body, body)
	dst = l.owed.settle(dst, Memory, memory)
	dst = l.owed.settle(dst, Call, Spent)
	return l.owed.settle(dst, Seat, Back)
}
