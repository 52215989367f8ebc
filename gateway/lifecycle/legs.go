package lifecycle

import "evenkeel/mooncake"

// Traits has an entry for each connector that may bind a decode rank before the prefill, by the name of the connector.
var Traits = map[string]ConnectorTraits{
	mooncake.AscendLayerwise: {CallsBack: true, LeaksBlocks: true, Retries: true},
	mooncake.SGLang:          {Aborts: true},
	mooncake.NIXLPush:        {Keeps: true, LeaksBlocks: true},
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
	reservesAtOnce := t.Keeps // with nixl-push, the only connector here with Keeps, the decode engine reserves its blocks at once
	if reservesAtOnce {
		p.decodeBlocks = blocksAwaitKV // no callback will report the blocks
	}
	return p
}

// PrefillAnswered says whether the prefill engine has answered without an error.
func (p *Pair) PrefillAnswered() bool { return p.prefill == answered }

// PrefillAborting says whether the prefill engine was told to abort the request. An answer that reports the abort is then no failure.
func (p *Pair) PrefillAborting() bool { return p.prefill == aborting }

// AnswerBegun says whether the first event has come.
func (p *Pair) AnswerBegun() bool { return p.decode == begun || p.decode == endedBegun }

// MayLeakBlocks says whether the decode engine may keep blocks for a prefill that may not come.
func (p *Pair) MayLeakBlocks() bool { return p.traits.LeaksBlocks && p.decodeBlocks == blocksAwaitKV }

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
// prefill call waits for the callback and reports these events.
func (p *Pair) stepCallback(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Overdue: // no callback came in time
		return p.fail(e.End, dst)
	case CalledLate: // the decode call is over, but its engine has taken blocks for the request, and only the end of a prefill frees them
		if !p.holdsLease { // the lease was given back because the answer began without a prefill, so no prefill is needed
			p.prefill = noPrefill
			return dst
		}
		p.decodeBlocks, p.prefill = blocksAwaitKV, mayBeSent
		return append(dst, Effect{Kind: DrainBeside, Until: ByProbe}) // the prefill runs only so that its end frees them
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
		if e.Again && p.traits.Retries && e.End.MayReplaceEngine() {
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
	// With CallsBack the prefill is sent all the same, because only its end frees the blocks of the decode engine. With Keeps it is
	// also sent after the client has left: the decode call goes on, and its first event shows that both engines can free their blocks.
	decodeGone := p.DecodeEnded() && (p.traits.Aborts || p.traits.Keeps)
	clientGone := p.ClientLeft && p.traits.Aborts
	if p.prefill == noPrefill || decodeGone || clientGone {
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
		if !p.Failed && p.prefill == answered { // the decode engine has all the KV
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
			if p.decodeBlocks != blocksUnknown { // with blocksUnknown, a callback may still say that the decode engine needs no KV
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
// While the answer has no first event, the prefill call usually stays open for the grace period: only its answer shows that the engine
// writes no more KV to the blocks of the decode engine. A closed connection would not show this: the engine's HTTP server closes its half
// long before the scheduler learns of the abort, between two batches.
func (p *Pair) abortPrefill(dst []Effect) []Effect {
	if p.prefill == running {
		p.prefill = aborting
	}
	dst = append(dst, Effect{Kind: AbortPrefill, Until: ByGrace}) // repeated until the prefill call ends, or until it is closed after ByGrace
	if p.mayIgnoreAbort || p.AnswerBegun() {                      // mayIgnoreAbort: the engine may notice only that the connection is closed
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

// handleCallback handles a callback that came in time. In it the decode engine says where the KV goes (CalledBack) or that it needs no KV
// (NeedsNothing), or the callback is not usable (Miscalled). If the decode call has ended already, the proxy stops listening for a
// callback, which it otherwise does when that call ends.
func (p *Pair) handleCallback(e Event, dst []Effect) []Effect {
	p.decodeBlocks = blocksAwaitKV // also if the callback is not usable: the decode engine allocates its blocks before it calls back
	if e.Kind == NeedsNothing {
		p.decodeBlocks = noKVNeeded
	}
	if p.DecodeEnded() { // just before the callback came
		dst = forgetCallback(dst)
	}
	answerNeededNoPrefill := !p.holdsLease // the answer has begun without the callback, and handleFirstEvent has given the lease back
	switch {
	case e.Kind == Miscalled: // it is not known where the KV goes, so nothing can be prefilled, and the decode call waits in vain
		p.prefill = noPrefill
		dst = p.fail(e.End, dst)
		return p.settleLease(Free, dst)
	case answerNeededNoPrefill:
		p.prefill = noPrefill
		return dst
	case e.Kind == NeedsNothing: // as if the prefill engine had answered already; Free: it holds no KV
		p.prefill = answered
		dst = p.settleLease(Free, dst)
		return p.startFirstEventLimit(dst)
	}
	p.prefill = mayBeSent // the goroutine that got the callback sends the prefill call now, and reports ProbeDue
	return dst
}

// startFirstEventLimit starts the time limit for the first event, unless that event has come or the decode call has ended. The limit is the
// usual one (ByFirstEvent), except for answers in one piece (ByWhole) and for prefill engines that keep the KV only for a limited time
// (ByHold).
func (p *Pair) startFirstEventLimit(dst []Effect) []Effect {
	if p.decode != unbegun {
		return dst
	}
	wait := Effect{Kind: AwaitFirst, Until: ByFirstEvent}
	switch {
	case p.noEarlyEvents: // the answer has no event before its end
		wait.Until = ByWhole
	case p.traits.Keeps: // once the prefill engine may have freed the KV, the answer could come from the KV of another prompt
		wait.Until = ByHold
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

// handlePrefillDone handles an answer without an error from the prefill engine, and starts the time limit for the first event. It gives the
// lease of the prompt back if it is known what becomes of the KV: the prefill engine has none or has freed it (Free), or keeps it until its
// hold timeout (Orphan). Otherwise the first event or the end of the decode call gives the lease back. If KV is missing, handlePrefillDone
// ends the decode call (failIfKVMissing).
func (p *Pair) handlePrefillDone(e Event, dst []Effect) []Effect {
	p.prefill, p.prefillPromptTokens = answered, e.Prompt
	// The connectors have three kinds of prefill engines. One kind keeps the KV until the decode engine has read it. Another can be told
	// to abort, and neither keeps nor writes any KV after its answer. The third answers when it has written all KV to the decode engine.
	keepsKV, canAbort := p.traits.Keeps, p.traits.Aborts
	answersAfterWriting := !keepsKV && !canAbort
	decodeHasKV := answersAfterWriting || p.AnswerBegun()
	switch {
	case decodeHasKV, canAbort && p.DecodeEnded(): // the prefill engine has no KV any more
		dst = p.settleLease(Free, dst)
	case canAbort && p.ClientLeft: // the engine was told to abort, but had nearly answered; the decode call waited only for this answer
		dst = p.settleLease(Free, dst)
		dst = p.fail(e.End, dst)
	case p.DecodeEnded(): // the prefill engine keeps the KV, and no decode engine will fetch it
		dst = p.settleLease(Orphan, dst)
	}
	dst = p.failIfKVMissing(dst)
	return p.startFirstEventLimit(dst)
}

// handleFirstEvent handles the first event of the answer, and lifts the time limit for it. If this event does not prove that all KV has
// come, it is held back for a short time (ByConfirm) until the prefill engine has answered. An answer that may come from another prompt's
// KV fails the pair, which makes the proxy close the decode call. The end of that call is reported later, by an event of its own.
func (p *Pair) handleFirstEvent(e Event, dst []Effect) []Effect {
	// Expired: the prefill engine may have reused the memory before the decode engine read the KV.
	mayBeOtherPromptsKV := p.prefill == answered && e.Expired
	if mayBeOtherPromptsKV {
		dst = p.fail(e.End, dst) // before decode is set, because fail trusts the KV of an answer that has begun
	}
	p.decode, p.decodePromptTokens = begun, e.Prompt
	neededNoPrefill := p.traits.CallsBack && p.decodeBlocks == blocksUnknown // it has not even called back to say where KV should go
	if neededNoPrefill {
		dst = p.settleLease(Free, dst)
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
// call if the connector needs it (endPrefill), and reports KV blocks that the decode engine may keep for ever (LeakBlocks).
func (p *Pair) handleDecodeFailed(reason DecodeFailure, dst []Effect) []Effect {
	if p.decode == begun { // the first event came, but the client must not get it
		p.decode = endedBegun
	} else {
		p.decode = endedUnbegun
	}
	dst = liftFirstEventLimit(dst)
	var leaks bool // the decode engine may keep blocks for ever
	if p.Failed {  // e.g. because the prefill call failed; the decode call was ended for that reason, and endPrefill is not needed
		leaks = p.leaksAfterFailure()
	} else {
		dst, leaks = p.endPrefill(reason, dst)
	}
	if leaks {
		dst = append(dst, Effect{Kind: LeakBlocks})
	}
	callbackMayCome := p.decodeBlocks == blocksUnknown // the decode engine has reported nothing yet
	if p.traits.CallsBack && !callbackMayCome {
		dst = forgetCallback(dst)
	}
	if reason != Declined && !p.ClientLeft { // otherwise the request or its client ended the call, and no rank was lost
		dst = append(dst, Effect{Kind: CountLoss})
	}
	engineMayHaveRequest := reason == Died
	prefillMayWrite := !p.Failed && engineMayHaveRequest && p.traits.Aborts
	if prefillMayWrite { // the decode call is closed only after this wait, or its engine could reuse pages that are still written
		dst = append(dst, Effect{Kind: AwaitPrefill, Until: ByGrace})
	}
	if p.prefill == answered { // no decode engine will fetch KV that is left, so the prefill engine frees it at its hold timeout (Orphan)
		dst = p.settleLease(Orphan, dst)
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

// endPrefill ends the prefill call after the decode call has ended by itself, in the way that the connector needs. leaks says whether
// the decode engine may keep blocks for ever, because it waits for KV that may never come.
func (p *Pair) endPrefill(reason DecodeFailure, dst []Effect) (_ []Effect, leaks bool) {
	decodeMayHaveRequest := reason == Died // otherwise the decode engine has neither the request nor blocks for it
	switch {
	case p.traits.Aborts:
		dst = p.abortPrefill(dst)
		if !decodeMayHaveRequest { // there are no blocks for the KV, so it does not matter when the prefill engine stops writing
			dst = append(dst, Effect{Kind: HangUp})
		}
		return dst, false
	case p.traits.CallsBack:
		return p.endCalledPrefill(decodeMayHaveRequest, dst)
	case p.traits.Keeps && decodeMayHaveRequest: // the prefill goes on: if no KV comes, the decode engine keeps its blocks
		kvMayNeverCome := p.prefill != answered // a prefill that has not ended can still fail
		return dst, kvMayNeverCome
	case p.traits.Keeps: // no engine will fetch the KV
		return append(dst, Effect{Kind: HangUp}), false
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
	switch {
	// The prefill engine would write to a decode engine that has dropped the request. But after the client has left, the prefill runs to
	// its end, which frees the blocks of the decode engine.
	case (underWay || prefilled) && !p.ClientLeft:
		return append(dst, Effect{Kind: HangUp}), decodeMayHaveRequest && !prefillEnded
	case noCallbackWillCome:
		return forgetCallback(dst), false
	}
	return dst, false // a callback may still come, or no prefill call is to be ended
}

// handleClientLeft handles a client that leaves before the first event. It ends the calls at once only if no KV is written to the decode
// engine, now or later. Otherwise the decode call goes on, because its engine must not reuse blocks that are still written. If the engines
// can be told to abort, the prefill engine is told so, and the end of its call ends the decode call. With other connectors, the decode call
// lasts until its first event, which proves that both engines can free their blocks. In any case it lasts no longer than the grace period:
// then the engines have to free the blocks by themselves.
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
	case p.traits.Aborts:
		dst = p.abortPrefill(dst)
	}
	if !p.Failed { // otherwise fail has ended the calls already
		dst = append(dst, Effect{Kind: WaitGone, Until: ByGrace})
	}
	return dst
}
