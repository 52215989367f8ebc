package lifecycle

const (
	maxFailedEngines = 3 // engines that may fail at a request before its client gets the error
	maxEnginesAsked  = 8 // engines that one request tries, also those without its endpoint or model
)

// stepPassthrough handles an event of a request that one engine gets unchanged. A state ignores
// events that it does not wait for:
//
//	Choosing → Calling                   an engine was chosen
//	Calling → Redialing                  its old connection was closed, so it gets a new one
//	Calling, Redialing → Choosing        the engine did not answer, and another one may
//	Calling, Redialing → Streaming       the engine answers
//	Streaming → Done                     the answer has ended, or is broken off
//	Choosing, Calling, Redialing → Done  no engine serves the request, so the client gets an error
func (l *Lifecycle) stepPassthrough(e Event, dst []Effect) []Effect {
	callUnderWay := l.state == Calling || l.state == Redialing
	switch {
	case l.state == Fresh && e.Kind == Begun:
		l.bind = Passthrough
		l.held.take(Seat)
		l.held.take(Body)
		return l.chooseEngine(dst)
	case l.state == Choosing && e.Kind == Chosen:
		l.tries.enginesAsked++
		return l.callEngine(SendOver, dst)
	case l.state == Choosing && e.Kind == NoneLeft:
		return l.failNoEngineLeft(dst)
	case l.state == Choosing && e.Kind == NoRoute:
		return l.failPassthrough(OfRanks, dst)
	case callUnderWay && e.Kind == CallFailed:
		return l.passthroughCallFailed(e, dst)
	case callUnderWay && e.Kind == First: // no other engine will be sent the body
		return append(l.held.settle(dst, Body, Back), Effect{Kind: AnswerIt})
	case l.state == Streaming && e.Kind == Ends:
		const bodyBack, memoryToAnswer = Back, Pass // the answer gives its memory back when it is written
		return append(l.settlePassthrough(bodyBack, memoryToAnswer, dst), Effect{Kind: EndWhole})
	case l.state == Streaming && e.Kind == CallFailed:
		const bodyBack, memoryBack = Back, Back
		return append(l.settlePassthrough(bodyBack, memoryBack, dst), Effect{Kind: BreakOff})
	}
	return dst
}

func (l *Lifecycle) chooseEngine(dst []Effect) []Effect {
	if l.tries.enginesAsked == maxEnginesAsked {
		return l.failNoEngineLeft(dst)
	}
	return append(dst, Effect{Kind: Choose})
}

func (l *Lifecycle) failNoEngineLeft(dst []Effect) []Effect {
	clientError := OfRanks
	if l.tries.counted > 0 || l.tries.withoutModel > 0 {
		clientError = OfAttempt
	}
	return l.failPassthrough(clientError, dst)
}

func (l *Lifecycle) callEngine(send EffectKind, dst []Effect) []Effect {
	l.held.take(Call)
	l.held.take(Memory)
	// ByProbe: the engine computes the prompt before its first event.
	return append(dst, Effect{Kind: send, Until: ByProbe})
}

// passthroughCallFailed: the engine keeps nothing of the request, so another may be asked.
func (l *Lifecycle) passthroughCallFailed(e Event, dst []Effect) []Effect {
	verdict := e.End.Verdict()
	dst = l.held.settle(dst, Memory, Back)
	dst = l.held.settle(dst, Call, verdict.KV) // Spent: it may have computed tokens; Free: it has not
	// Moved: the proxy ended the call.
	secondConnectionBroke := l.state == Redialing && e.End.Progress < Headed && !e.End.Moved
	switch {
	case e.ClientLeft:
		return l.failPassthrough(OfClient, dst)
	case secondConnectionBroke: // so the request may have killed the engine
		const mayBreakEngines = true            // so no other engine gets the request
		dst = append(dst, Effect{Kind: Recall}) // the client gets the error of the first connection
		return l.noteFailedEngine(mayBreakEngines, dst)
	case verdict.Next == Same:
		return l.callEngine(SendAnew, dst)
	case verdict.Next == Anew:
		dst = append(dst, Effect{Kind: Remember})
		dst = append(dst, Effect{Kind: Recall})
		return l.chooseEngine(dst)
	case verdict.Next == NoModel:
		l.tries.withoutModel++
		return l.chooseEngine(dst)
	case verdict.Next == Over:
		return l.failPassthrough(OfAttempt, dst)
	}
	// Elsewhere: the engine may have failed because of the request.
	mayBreakEngines := verdict.Next != Again
	return l.noteFailedEngine(mayBreakEngines, dst)
}

func (l *Lifecycle) noteFailedEngine(mayBreakEngines bool, dst []Effect) []Effect {
	l.tries.counted++
	dst = append(dst, Effect{Kind: Complain})
	if mayBreakEngines || l.tries.counted == maxFailedEngines {
		return l.failPassthrough(OfAttempt, dst)
	}
	return l.chooseEngine(dst)
}

// failPassthrough leaves the body to the code that answers with the error.
func (l *Lifecycle) failPassthrough(clientError Error, dst []Effect) []Effect {
	const bodyToErrorWriter, memoryBack = Pass, Back
	return append(l.settlePassthrough(bodyToErrorWriter, memoryBack, dst), Effect{Kind: Fail, Error: clientError})
}

// settlePassthrough gives back the rest. A call that is still held is Spent, because its engine may
// have computed tokens.
func (l *Lifecycle) settlePassthrough(body, memory Disposition, dst []Effect) []Effect {
	dst = l.held.settle(dst, Body, body)
	dst = l.held.settle(dst, Memory, memory)
	dst = l.held.settle(dst, Call, Spent)
	return l.held.settle(dst, Seat, Back)
}
