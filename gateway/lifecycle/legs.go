package lifecycle

import "evenkeel/mooncake"

// Traits has an entry for each connector of two engines that binds a decode rank before the
// prefill, by the name of the connector.
var Traits = map[string]ConnectorTraits{
	mooncake.AscendLayerwise: {CallsBack: true},
	mooncake.SGLang:          {Aborts: true},
}

// prefilling is how far the prefill call of a pair has come.
type prefilling uint8

const (
	awaitsCallback prefilling = iota // the prefill call waits until the decode engine says where the KV goes
	mayBeSent                        // the prefill call may be sent
	running                          // the prefill call was sent, so the prefill engine may have the request
	aborting                         // the prefill call was sent, and the prefill engine was told to abort the request
	seekingEngine                    // the prefill engine did not take the request; another engine is looked for, or found
	answered                         // the prefill engine has answered without an error
	noPrefill                        // the prefill call has ended without an answer, or there is nothing to prefill
)

// decoding is how far the decode call of a pair has come.
type decoding uint8

const (
	unbegun      decoding = iota // the first event of the answer has not come
	begun                        // the first event of the answer has come
	endedUnbegun                 // the decode call ended without a first event
	endedBegun                   // the decode call ended after the first event
)

// blocks says which KV blocks the decode engine has for the request.
type blocks uint8

const (
	blocksUnknown blocks = iota // the decode engine has not reported any blocks yet
	blocksAwaitKV               // the decode engine has blocks that wait for KV from the prefill engine
	noKVNeeded                  // the decode engine has the KV of the whole prompt, so nothing is to be prefilled
)

// A Pair is the prefill call and the decode call of an attempt whose decode rank was bound before its prefill. Both are under way at once,
// and each needs the other: an engine whose counterpart is gone may wait for minutes or for ever. So the end of one call ends the other. A
// prefill call may outlive its attempt, and then runs beside the next attempt.
type Pair struct {
	traits              ConnectorTraits
	prefill             prefilling
	decode              decoding
	decodeBlocks        blocks
	noEarlyEvents       bool    // the answer comes in one piece, or may have no event before its end
	mayIgnoreAbort      bool    // the engines may ignore an abort, because they have no name for the request
	holdsLease          bool    // the lease of the prompt was not given back yet
	ClientLeft          bool    // the client left before the first event
	decodePromptTokens  int     // prompt tokens as the decode engine counted them; 0: it reported no count
	prefillPromptTokens int     // prompt tokens as the prefill engine counted them; 0: it reported no count
	Failed              bool    // one call has ended the other, or the answer may be wrong
	failureCause        CallEnd // the end of the call because of which Failed was set
}

// newPair returns the pair of a new attempt. The prompt already counts as load of its prefill engine, and from now on the pair gives this
// load back (holdsLease). noEarlyEvents says that the answer comes in one piece, or may have no event before its end. mayIgnoreAbort says
// that the engines may ignore an abort, because they have no name for the request.
func newPair(t ConnectorTraits, noEarlyEvents, mayIgnoreAbort bool) Pair {
	p := Pair{traits: t, prefill: mayBeSent, noEarlyEvents: noEarlyEvents, mayIgnoreAbort: mayIgnoreAbort, holdsLease: true}
	if t.CallsBack { // only the callback says where the KV goes
		p.prefill = awaitsCallback
	}
	return p
}

// PrefillAnswered says whether the prefill engine has answered without an error.
func (p *Pair) PrefillAnswered() bool { return p.prefill == answered }

// PrefillAborting says whether the prefill engine was told to abort the request. An answer that reports the abort is then no failure.
func (p *Pair) PrefillAborting() bool { return p.prefill == aborting }

// AnswerBegun says whether the first event has come.
func (p *Pair) AnswerBegun() bool { return p.decode == begun || p.decode == endedBegun }

// MayLeakBlocks says whether the decode engine may keep blocks for a prefill that may not come,
// which no call can free. A request of vllm-ascend that was aborted while it waited keeps its
// blocks until a prefill ends (vllm-ascend issue 16662). That a decode engine which is told of a
// failed prefill waits for ever is inferred from mooncake_layerwise_connector.py and vLLM pull
// request 50984.
func (p *Pair) MayLeakBlocks() bool { return p.decodeBlocks == blocksAwaitKV }

// PrefillDue says whether the prefill call may be sent.
func (p *Pair) PrefillDue() bool { return p.prefill == mayBeSent }

// DecodeEnded says whether the decode call has ended.
func (p *Pair) DecodeEnded() bool { return p.decode == endedUnbegun || p.decode == endedBegun }

// answerProvesKV says whether a begun answer proves that the decode engine has got all the KV. It does not if the engines can be told to
// abort a request (Aborts, with SGLang): then the answer may begin although KV is missing, and only the prefill engine's answer proves it.
func (p *Pair) answerProvesKV() bool { return !p.traits.Aborts }

// forgetCallback makes the proxy stop listening for the callback in which the decode engine says where the KV goes.
func forgetCallback(dst []Effect) []Effect { return append(dst, Effect{Kind: Forget}) }

// step takes an event of the pair and appends to dst the effects to carry out. The two calls report in any order, so every case must also
// be right if the other call has ended already.
func (p *Pair) step(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case CalledBack, NeedsNothing, Miscalled, Overdue, CalledLate, Uncallable:
		return p.stepCallback(e, dst)
	case ProbeDue, PrefillFailed, Found, NotFound, PrefillDone:
		return p.stepPrefill(e, dst)
	case Began, Confirmed, Quiet, DecodeFailed, DecodeOver:
		return p.stepDecode(e, dst)
	case NotSent: // neither call of the pair was sent
		p.prefill, p.decode = noPrefill, endedUnbegun
		return p.settleLease(Free, forgetCallback(dst))
	case ClientGone:
		return p.handleClientLeft(e, dst)
	case ClientWaited: // the grace period after the client left is over
		return p.fail(e.End, dst)
	case Unwanted:
		return p.handleUnwanted(e, dst)
	}
	return dst
}

// stepCallback handles the callback in which the decode engine says where the KV goes, or the end of a wait for it. The goroutine of the
// prefill call waits for the callback and reports these events. The decode engine reserves blocks for the KV before it calls back, and only
// the end of a prefill frees them. So a callback that comes after the end of the decode call still makes the proxy send the prefill call
// (DrainBeside), for at most the time that a prefill may take (ByProbe).
func (p *Pair) stepCallback(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Overdue: // no callback came in time
		return p.fail(e.End, dst)
	case CalledLate: // the callback came after the end of the decode call
		if !p.holdsLease { // the answer has begun without a prefill, and handleFirstEvent has given the lease back
			p.prefill = noPrefill
			return dst
		}
		p.decodeBlocks, p.prefill = blocksAwaitKV, mayBeSent
		return append(dst, Effect{Kind: DrainBeside, Until: ByProbe}) // the prefill runs only so that its end frees the blocks
	case Uncallable: // no usable callback came even after the end of the decode call, so nothing is to be prefilled
		p.prefill = noPrefill
		return p.settleLease(Free, dst)
	}
	return p.handleCallback(e, dst)
}

// stepPrefill handles an event that the goroutine of the prefill call reports about this call.
func (p *Pair) stepPrefill(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case ProbeDue:
		return p.handlePrefillDue(dst)
	case PrefillFailed:
		dst = p.settleLease(e.End.Verdict().KV, dst)
		// Again: one more engine may be tried, if the failed one did not take the request.
		// Else a layerwise decode engine would count the ends of both prefills together,
		// and begin too early (vllm-ascend 182b75ea, mooncake_layerwise_connector.py).
		mayTryAnotherEngine := e.Again && p.traits.CallsBack && e.End.MayReplaceEngine()
		if mayTryAnotherEngine {
			p.prefill = seekingEngine
			return append(dst, Effect{Kind: Seek, Until: ByProbe})
		}
		p.prefill = noPrefill // no KV will come, so the decode call is ended, too
		return p.fail(e.End, dst)
	case Found:
		p.holdsLease = true // the lease is on the replacement engine now
	case NotFound: // no KV will come
		p.prefill = noPrefill
		return p.fail(e.End, dst)
	case PrefillDone:
		return p.handlePrefillDone(e, dst)
	}
	return dst
}

// handlePrefillDue is called just before the prefill call is sent. It gives the lease of the prompt back instead if no prefill is needed
// any more.
func (p *Pair) handlePrefillDue(dst []Effect) []Effect {
	// With CallsBack, only the end of the prefill frees the blocks of the decode engine, so the
	// prefill is sent even after the end of the decode call. With Aborts it is then not needed.
	// A client that left before the prefill was sent has ended the decode call
	// (handleClientLeft).
	decodeGone := p.traits.Aborts && (p.DecodeEnded() || p.ClientLeft)
	if p.prefill == noPrefill || decodeGone {
		p.prefill = noPrefill
		return p.settleLease(Free, dst)
	}
	p.prefill = running
	return append(dst, Effect{Kind: SendBeside, Until: ByProbe})
}

// stepDecode handles an event that the goroutine of the decode call reports about this call, or the end of the time limit for the first
// event of the answer (Quiet).
func (p *Pair) stepDecode(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Began:
		return p.handleFirstEvent(e, dst)
	case Confirmed: // the wait for the prefill engine's answer is over, with or without that answer
		p.decodePromptTokens = max(p.decodePromptTokens, e.Prompt)
		dst = p.failIfKVMissing(dst)
		if !p.Failed && p.prefill == answered { // the decode engine has all the KV, so the prefill engine has freed it
			dst = p.settleLease(Free, dst)
		}
	case Quiet: // no first event came within its time limit
		if p.decode == unbegun { // otherwise the first event came, or the call ended, just before the time limit
			return p.fail(e.End, dst)
		}
	case DecodeFailed: // the decode call ended without a first event, or with one that the client must not get
		return p.handleDecodeFailed(e.Reason, dst)
	case DecodeOver: // the decode call ended after its first event
		if !p.DecodeEnded() { // otherwise an earlier event has ended the decode call already
			p.decode = endedBegun
			if p.decodeBlocks != blocksUnknown { // with blocksUnknown, a callback may still come, and the proxy listens on
				dst = forgetCallback(dst)
			}
		}
	}
	return dst
}

// handleUnwanted is called when the proxy waits no longer for the prefill engine to confirm the KV, because the answer has ended or was
// given up. The client must not get the end of an unconfirmed answer, so the pair counts as failed. A prefill call that still runs is
// aborted.
func (p *Pair) handleUnwanted(e Event, dst []Effect) []Effect {
	unconfirmed := p.prefill == running || p.prefill == aborting // the prefill engine has not answered
	if unconfirmed && !p.Failed {
		p.Failed, p.failureCause = true, e.End
	}
	if p.prefill == running {
		return p.abortPrefill(dst)
	}
	return dst
}

// abortPrefill tells the prefill engine to end the request. Callers make sure that the engines of the connector can be told to abort
// (ConnectorTraits.Aborts).
//
// The abort is repeated until the prefill call ends. While the answer has no first event, the prefill call usually stays open, but not
// longer than the grace period (ByGrace): only its answer shows that the engine writes no more KV to the blocks of the decode engine. A
// closed connection would not show this: the engine's HTTP server closes its half long before the scheduler learns of the abort, between
// two batches. Once the first event has come, the proxy closes the prefill call at once (HangUp).
func (p *Pair) abortPrefill(dst []Effect) []Effect {
	if p.prefill == running {
		p.prefill = aborting
	}
	dst = append(dst, Effect{Kind: AbortPrefill, Until: ByGrace})
	if p.mayIgnoreAbort || p.AnswerBegun() { // mayIgnoreAbort: the engine may notice only that the connection is closed
		dst = append(dst, Effect{Kind: HangUp})
	}
	return dst
}

// settleLease gives back the lease of the prompt, with which the prompt counts as load of its prefill engine. Later calls do nothing.
func (p *Pair) settleLease(disposition Disposition, dst []Effect) []Effect {
	if !p.holdsLease {
		return dst
	}
	p.holdsLease = false
	return append(dst, Effect{Kind: Settle, Resource: Lease, Disposition: disposition})
}

// fail marks the pair as failed and ends the decode call. Later calls do nothing. With most connectors a begun answer proves that the KV is
// complete, and fail then does nothing. With the others (ConnectorTraits.Aborts) fail also tells the decode engine to abort the request. It
// also marks an answer that has ended already, so that the client does not get it. cause is the end of the call that is at fault.
func (p *Pair) fail(cause CallEnd, dst []Effect) []Effect {
	kvComplete := p.AnswerBegun() && p.answerProvesKV()
	hadNoAnswer := p.decode == endedUnbegun // the decode call ended without a first event, so there is no answer to withhold
	if kvComplete || p.Failed || hadNoAnswer {
		return dst
	}
	p.Failed, p.failureCause = true, cause
	if p.decode == endedBegun { // the answer has come to its end, so no call is left to end
		return dst
	}
	if p.traits.Aborts {
		dst = append(dst, Effect{Kind: AbortDecode})
	}
	return append(dst, Effect{Kind: EndDecode})
}

// handleCallback handles a callback that came in time. If the decode call has ended already, the proxy stops listening for a callback,
// which it otherwise does when that call ends. The prefill then depends on the callback:
//   - Miscalled: the callback is not usable. Nothing is prefilled, and the decode call is ended (fail).
//   - If the answer has begun without the callback, nothing is prefilled.
//   - NeedsNothing: the decode engine needs no KV. The pair goes on as if the prefill engine had answered.
//   - CalledBack: the decode engine says where the KV goes. The prefill call may be sent.
func (p *Pair) handleCallback(e Event, dst []Effect) []Effect {
	p.decodeBlocks = blocksAwaitKV // also if the callback is not usable: the decode engine allocates its blocks before it calls back
	if e.Kind == NeedsNothing {
		p.decodeBlocks = noKVNeeded
	}
	if p.DecodeEnded() { // just before the callback came
		dst = forgetCallback(dst)
	}
	switch {
	case e.Kind == Miscalled: // it is not known where the KV goes, so the decode call waits in vain, and fail ends it
		p.prefill = noPrefill
		dst = p.fail(e.End, dst)
		return p.settleLease(Free, dst)
	case !p.holdsLease: // handleFirstEvent has given the lease back, because the answer began without the callback
		p.prefill = noPrefill
		return dst
	case e.Kind == NeedsNothing:
		p.prefill = answered
		dst = p.settleLease(Free, dst) // Free: the prefill engine holds no KV
		return p.startFirstEventLimit(dst)
	}
	p.prefill = mayBeSent // the goroutine that got the callback sends the prefill call now, and reports ProbeDue
	return dst
}

// startFirstEventLimit starts the time limit for the first event, unless that event has come or the decode call has ended. The limit is the
// usual one (ByFirstEvent), except for answers in one piece (ByWhole).
func (p *Pair) startFirstEventLimit(dst []Effect) []Effect {
	if p.decode != unbegun {
		return dst
	}
	wait := Effect{Kind: AwaitFirst, Until: ByFirstEvent}
	if p.noEarlyEvents { // the answer has no event before its end
		wait.Until = ByWhole
	}
	return append(dst, wait)
}

// liftFirstEventLimit ends the time limit that startFirstEventLimit has started.
func liftFirstEventLimit(dst []Effect) []Effect { return append(dst, Effect{Kind: StopWaiting}) }

// ConfirmTimeout is how long the proxy waits, once an answer has ended or was lost, for the prefill engine to confirm that the KV of the
// answer was complete. If the begun answer already proves this, there is no wait (NoTimeout).
func (p *Pair) ConfirmTimeout() Timeout {
	if p.answerProvesKV() {
		return NoTimeout
	}
	return ByGrace
}

// handlePrefillDone handles an answer without an error from the prefill engine, and starts the time
// limit for the first event. It gives the lease of the prompt back if the prefill engine has no KV
// any more. Otherwise the first event or the end of the decode call gives the lease back. If KV is
// missing, handlePrefillDone ends the decode call (failIfKVMissing).
func (p *Pair) handlePrefillDone(e Event, dst []Effect) []Effect {
	p.prefill, p.prefillPromptTokens = answered, e.Prompt
	// A prefill engine that can be told to abort neither keeps nor writes any KV after its
	// answer. The other kind answers when it has written all KV to the decode engine.
	switch {
	case p.traits.CallsBack, p.AnswerBegun(), p.DecodeEnded(): // the prefill engine has no KV any more
		dst = p.settleLease(Free, dst)
	// After its client had left, the decode call waited only for this answer, and now ends.
	// With CallsBack it waits for its first event instead (handleClientLeft).
	case p.ClientLeft:
		dst = p.settleLease(Free, dst)
		dst = p.fail(e.End, dst)
	}
	dst = p.failIfKVMissing(dst)
	return p.startFirstEventLimit(dst)
}

// handleFirstEvent handles the first event of the answer, and lifts the time limit for it. With
// engines that can be told to abort (SGLang), a first event does not prove that all KV has come
// (answerProvesKV). It is then held back for a short time (ByConfirm) until the prefill engine has
// answered.
func (p *Pair) handleFirstEvent(e Event, dst []Effect) []Effect {
	p.decode, p.decodePromptTokens = begun, e.Prompt
	// The decode engine has begun without a callback that says where KV should go.
	neededNoPrefill := p.traits.CallsBack && p.decodeBlocks == blocksUnknown
	if neededNoPrefill {
		dst = p.settleLease(Free, dst) // Free: the prefill engine holds no KV
	}
	dst = liftFirstEventLimit(dst)
	kvUnconfirmed := !p.answerProvesKV() && p.prefill != answered
	if !p.Failed && kvUnconfirmed {
		dst = append(dst, Effect{Kind: AwaitPrefill, Until: ByConfirm})
	}
	return dst
}

// failIfKVMissing ends the decode call if the decode engine counted more prompt tokens than the prefill engine: then KV is missing. If a
// begun answer proves that the KV is complete, nothing is compared.
func (p *Pair) failIfKVMissing(dst []Effect) []Effect {
	bothCounted := p.AnswerBegun() && p.prefill == answered && p.prefillPromptTokens > 0
	if !p.answerProvesKV() && bothCounted && p.prefillPromptTokens < p.decodePromptTokens {
		return p.fail(CallEnd{Progress: Through, Reason: Incomplete}, dst)
	}
	return dst
}

// handleDecodeFailed handles the end of a decode call that brought no first event, or one that the client must not get. It ends the prefill
// call if the connector needs it, and reports blocks that may leak (endPrefillOfFailedDecode).
func (p *Pair) handleDecodeFailed(reason DecodeFailure, dst []Effect) []Effect {
	if p.decode == begun { // the first event came, but the client must not get it
		p.decode = endedBegun
	} else {
		p.decode = endedUnbegun
	}
	dst = liftFirstEventLimit(dst)
	dst = p.endPrefillOfFailedDecode(reason, dst)
	callbackMayCome := p.decodeBlocks == blocksUnknown // the decode engine has reported nothing yet
	if p.traits.CallsBack && !callbackMayCome {
		dst = forgetCallback(dst)
	}
	if reason != Declined && !p.ClientLeft { // else the request was wrong or its client has left, and no rank was lost
		dst = append(dst, Effect{Kind: CountLoss})
	}
	engineMayHaveRequest := reason == Died
	// Aborts: the prefill engine was told to abort just now, and may write KV until it has done so. The decode call is closed only
	// after this wait, or its engine could reuse pages that are still written.
	prefillMayWrite := !p.Failed && engineMayHaveRequest && p.traits.Aborts
	if prefillMayWrite {
		dst = append(dst, Effect{Kind: AwaitPrefill, Until: ByGrace})
	}
	if p.prefill == answered { // the prefill engine keeps no KV after its answer
		dst = p.settleLease(Free, dst)
	}
	return dst
}

// endPrefillOfFailedDecode ends the prefill call after the decode call has failed, if the connector needs it (endPrefill). It also reports
// KV blocks that the decode engine may keep for ever (LeakBlocks). If the pair had failed before, for example because the prefill call had
// failed, the decode call was ended for that reason, and nothing more is to be ended.
func (p *Pair) endPrefillOfFailedDecode(reason DecodeFailure, dst []Effect) []Effect {
	var leaks bool
	if p.Failed {
		leaks = p.leaksAfterFailure()
	} else {
		dst, leaks = p.endPrefill(reason, dst)
	}
	if leaks {
		dst = append(dst, Effect{Kind: LeakBlocks})
	}
	return dst
}

// leaksAfterFailure says whether the decode engine may keep blocks for ever after the pair has failed, for the reason in failureCause, and
// the decode call has ended. The end of a prefill frees the blocks. But if the prompt was prefilled and the decode engine still did not
// begin (Unbegun), the end of the prefill seems not to have reached that engine.
func (p *Pair) leaksAfterFailure() bool {
	neverBegan := p.failureCause.Reason == Unbegun
	prefillFreesBlocks := p.prefill == answered && !neverBegan
	return p.MayLeakBlocks() && !prefillFreesBlocks
}

// endPrefill ends the prefill call after the decode call has ended by itself, in the way that the
// connector needs. leaks says whether the decode engine may keep blocks for ever, because it waits
// for KV that may never come.
func (p *Pair) endPrefill(reason DecodeFailure, dst []Effect) (_ []Effect, leaks bool) {
	decodeMayHaveRequest := reason == Died // otherwise the decode engine has neither the request nor blocks for it
	if p.traits.CallsBack {
		return p.endCalledPrefill(decodeMayHaveRequest, dst)
	}
	dst = p.abortPrefill(dst)
	if !decodeMayHaveRequest { // there are no blocks for the KV, so it does not matter when the prefill engine stops writing
		dst = append(dst, Effect{Kind: HangUp})
	}
	return dst, false
}

// endCalledPrefill is endPrefill for connectors whose decode engine calls back (CallsBack). Such an engine reserves blocks for the KV and
// calls back to say where they are, which begins the prefill. It frees the blocks when the prefill ends, so it may keep them for ever
// (leaks) if the proxy breaks the prefill off.
func (p *Pair) endCalledPrefill(decodeMayHaveRequest bool, dst []Effect) (_ []Effect, leaks bool) {
	prefillEnded := p.prefill == answered
	prefilled := prefillEnded && p.decodeBlocks != noKVNeeded      // with noKVNeeded, no prefill engine was asked
	underWay := p.prefill == running || p.prefill == seekingEngine // seekingEngine: another engine is about to get the request
	noCallbackWillCome := p.decodeBlocks == blocksUnknown && !decodeMayHaveRequest
	mayBreakOff := !p.ClientLeft // after the client has left, the prefill runs to its end, which frees the blocks of the decode engine
	switch {
	// The prefill engine must not write to a decode engine that has dropped the request. If the prompt is prefilled already, no prefill
	// call is left, and HangUp does nothing.
	case (underWay || prefilled) && mayBreakOff:
		leaks = decodeMayHaveRequest && !prefillEnded
		return append(dst, Effect{Kind: HangUp}), leaks
	case noCallbackWillCome:
		return forgetCallback(dst), false
	}
	return dst, false // a callback may still come, or no prefill call is to be ended
}

// handleClientLeft handles a client that leaves before the first event. The decode call ends at once only if no KV is written to its
// engine, now or later. Otherwise the call goes on, because its engine must not reuse blocks that are still written. It lasts no longer
// than the grace period: then the engines have to free the blocks by themselves.
func (p *Pair) handleClientLeft(e Event, dst []Effect) []Effect {
	if p.ClientLeft || p.decode != unbegun { // handled already, or the first event has come, or the decode call has ended
		return dst
	}
	p.ClientLeft = true
	noBlocksYet := p.traits.CallsBack && p.decodeBlocks == blocksUnknown // the decode engine has not reported that it reserved blocks
	// Of engines that can be told to abort, only a running prefill call writes KV: one that was not sent yet will not be sent any more,
	// because the client has left (handlePrefillDue).
	nothingWritten := p.traits.Aborts && p.prefill != running
	switch {
	case noBlocksYet, nothingWritten:
		dst = p.fail(e.End, dst)
	case p.traits.Aborts: // the end of the prefill call will then end the decode call
		dst = p.abortPrefill(dst)
	default: // the decode call lasts until its first event, which proves that both engines can free their blocks
	}
	if !p.Failed { // otherwise fail has ended the decode call already
		dst = append(dst, Effect{Kind: WaitGone, Until: ByGrace}) // the event ClientWaited then ends the decode call
	}
	return dst
}
