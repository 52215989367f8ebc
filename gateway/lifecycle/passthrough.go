package lifecycle

const (
	maxFailedEngines = 3 // number of engines that may fail at a request before its client gets the error
	maxEnginesAsked  = 8 // number of engines that one request tries, including those that turn out not to have its endpoint or its model
)

// stepPassthrough handles an event of a request that one engine gets unchanged. The last effect that it returns decides the next state (see
// Step): AnswerIt begins Streaming, and EndWhole, BreakOff and Fail lead to Done. What the request holds is given back (Back), or gets a
// new owner that gives it back (Pass). A state ignores events that it does not wait for:
//
//	Choosing → Calling                   an engine was chosen
//	Calling → Redialing                  the engine had closed the connection before, so it gets the request over a new one
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
	case l.state == Choosing && e.Kind == NoneLeft: // every engine that may serve the request was tried
		return l.failNoEngineLeft(dst)
	case l.state == Choosing && e.Kind == NoRoute: // no engine of the model has the endpoint, which the client is told (OfRanks)
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

// chooseEngine asks for an engine to which the request was not sent yet. After maxEnginesAsked engines it ends the request instead.
func (l *Lifecycle) chooseEngine(dst []Effect) []Effect {
	if l.tries.enginesAsked == maxEnginesAsked {
		return l.failNoEngineLeft(dst)
	}
	return append(dst, Effect{Kind: Choose})
}

// failNoEngineLeft ends a request for which no engine is left. If engines failed at the request or did not have its model, the client gets
// the error of the last such engine.
func (l *Lifecycle) failNoEngineLeft(dst []Effect) []Effect {
	clientError := OfRanks
	if l.tries.counted > 0 || l.tries.withoutModel > 0 {
		clientError = OfAttempt
	}
	return l.failPassthrough(clientError, dst)
}

// callEngine begins a call to the chosen engine. send is the effect that sends the request: SendOver, or SendAnew for the second try at the
// same engine. From now on the request holds the call, which counts against the engine, and memory for the answer. The engine may take as
// long as a prefill engine (ByProbe), because it computes the prompt before its first event.
func (l *Lifecycle) callEngine(send EffectKind, dst []Effect) []Effect {
	l.held.take(Call)
	l.held.take(Memory)
	return append(dst, Effect{Kind: send, Until: ByProbe})
}

// passthroughCallFailed handles a call that has ended without an answer. The engine keeps nothing of the request, so another engine is
// asked, unless the request itself may be the cause, or maxFailedEngines have failed.
func (l *Lifecycle) passthroughCallFailed(e Event, dst []Effect) []Effect {
	verdict := e.End.Verdict()
	dst = l.held.settle(dst, Memory, Back)     // the memory that was set aside for an answer
	dst = l.held.settle(dst, Call, verdict.KV) // Spent: the engine may have computed tokens of the request; Free: it has not
	// Moved: the proxy ended the call, because the engine was taken out of service.
	secondConnectionBroke := l.state == Redialing && e.End.Progress < Headed && !e.End.Moved
	switch {
	case e.ClientLeft:
		return l.failPassthrough(OfClient, dst)
	case secondConnectionBroke: // two connections ended without an answer, so the request may have killed the engine
		const mayBreakEngines = true            // so no other engine gets the request
		dst = append(dst, Effect{Kind: Recall}) // the client gets the error of the first connection
		return l.noteFailedEngine(mayBreakEngines, dst)
	case verdict.Next == Same: // the engine had most likely closed the connection before it saw the request
		return l.callEngine(SendAnew, dst)
	case verdict.Next == Anew: // the engine does not have the endpoint, which is remembered
		dst = append(dst, Effect{Kind: Remember})
		dst = append(dst, Effect{Kind: Recall}) // if another engine has failed, the client gets the error of that engine
		return l.chooseEngine(dst)
	case verdict.Next == NoModel: // the engine does not have the model, which is no failure
		l.tries.withoutModel++
		return l.chooseEngine(dst)
	case verdict.Next == Over: // the request is at fault
		return l.failPassthrough(OfAttempt, dst)
	}
	// Two verdicts are left. Again: another engine may get the request. Elsewhere: the engine may have failed because of the request,
	// so no other engine gets it.
	mayBreakEngines := verdict.Next != Again
	return l.noteFailedEngine(mayBreakEngines, dst)
}

// noteFailedEngine counts and logs an engine that failed at the request. mayBreakEngines says that the request may be what made the engine
// fail. If so, or if maxFailedEngines have failed, the request ends, and the client gets the error of an attempt (OfAttempt). Otherwise
// another engine is asked.
func (l *Lifecycle) noteFailedEngine(mayBreakEngines bool, dst []Effect) []Effect {
	l.tries.counted++
	dst = append(dst, Effect{Kind: Complain})
	if mayBreakEngines || l.tries.counted == maxFailedEngines {
		return l.failPassthrough(OfAttempt, dst)
	}
	return l.chooseEngine(dst)
}

// failPassthrough ends the request with an error for the client. It gives back all that the request holds, except for the body: the code
// that answers with the error gives the body back (see Body).
func (l *Lifecycle) failPassthrough(clientError Error, dst []Effect) []Effect {
	const bodyToErrorWriter, memoryBack = Pass, Back
	return append(l.settlePassthrough(bodyToErrorWriter, memoryBack, dst), Effect{Kind: Fail, Error: clientError})
}

// settlePassthrough gives back everything that a passed-through request still holds. body and memory say what happens to these two
// resources. A call that was not given back yet is Spent, because its engine may have computed tokens.
func (l *Lifecycle) settlePassthrough(body, memory Disposition, dst []Effect) []Effect {
	dst = l.held.settle(dst, Body, body)
	dst = l.held.settle(dst, Memory, memory)
	dst = l.held.settle(dst, Call, Spent)
	return l.held.settle(dst, Seat, Back)
}
