package lifecycle

import "evenkeel/mooncake"

// Traits of the connectors of two engines that bind a decode rank before the prefill.
var Traits = map[string]ConnectorTraits{
	mooncake.AscendLayerwise: {CallsBack: true},
	mooncake.SGLang:          {Aborts: true},
}

type prefilling uint8

const (
	awaitsCallback prefilling = iota // until the decode engine says where the KV goes
	mayBeSent
	running
	aborting      // but the engine was told to abort
	seekingEngine // the engine did not take the request
	answered
	noPrefill // ended without an answer, or not needed
)

type decoding uint8

const (
	unbegun decoding = iota
	begun
	endedUnbegun
	endedBegun
)

type blocks uint8

const (
	blocksUnknown blocks = iota // the decode engine has not reported any yet
	blocksAwaitKV               // they wait for KV from the prefill engine
	noKVNeeded                  // the decode engine has the KV of the whole prompt
)

// A Pair is the prefill call and the decode call of an attempt whose decode rank was bound before
// its prefill. Both are under way at once. An engine whose counterpart is gone may wait for minutes
// or for ever, so the end of one call ends the other. A prefill call may outlive its attempt.
type Pair struct {
	traits              ConnectorTraits
	prefill             prefilling
	decode              decoding
	decodeBlocks        blocks
	noEarlyEvents       bool    // perhaps no event comes before the end of the answer
	mayIgnoreAbort      bool    // because they have no name for the request
	holdsLease          bool    // the lease of the prompt was not given back yet
	ClientLeft          bool    // before the first event
	decodePromptTokens  int     // as the decode engine counted them; 0: not reported
	prefillPromptTokens int     // as the prefill engine counted them; 0: not reported
	Failed              bool    // one call has ended the other, or the answer may be wrong
	failureCause        CallEnd // why Failed was set
}

func newPair(t ConnectorTraits, noEarlyEvents, mayIgnoreAbort bool) Pair {
	p := Pair{traits: t, prefill: mayBeSent, noEarlyEvents: noEarlyEvents, mayIgnoreAbort: mayIgnoreAbort, holdsLease: true}
	if t.CallsBack { // only the callback says where the KV goes
		p.prefill = awaitsCallback
	}
	return p
}

// PrefillAnswered says whether the prefill engine has answered without an error.
func (p *Pair) PrefillAnswered() bool { return p.prefill == answered }

// PrefillAborting says whether the prefill engine was told to abort. An answer that reports the
// abort is then no failure.
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

// With Aborts (SGLang), an answer may begin although KV is missing. Only the prefill engine's
// answer proves it.
func (p *Pair) answerProvesKV() bool { return !p.traits.Aborts }

func forgetCallback(dst []Effect) []Effect { return append(dst, Effect{Kind: Forget}) }

// The calls report in any order, so each case must also be right if the other call has ended.
func (p *Pair) step(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case CalledBack, NeedsNothing, Miscalled, Overdue, CalledLate, Uncallable:
		return p.stepCallback(e, dst)
	case ProbeDue, PrefillFailed, Found, NotFound, PrefillDone:
		return p.stepPrefill(e, dst)
	case Began, Confirmed, Quiet, DecodeFailed, DecodeOver:
		return p.stepDecode(e, dst)
	case NotSent:
		p.prefill, p.decode = noPrefill, endedUnbegun
		return p.settleLease(Free, forgetCallback(dst))
	case ClientGone:
		return p.handleClientLeft(e, dst)
	case ClientWaited:
		return p.fail(e.End, dst)
	case Unwanted:
		return p.handleUnwanted(e, dst)
	}
	return dst
}

// stepCallback: the decode engine reserves blocks before it calls back, and only the end of a
// prefill frees them. So a late callback still makes the proxy prefill (DrainBeside).
func (p *Pair) stepCallback(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Overdue:
		return p.fail(e.End, dst)
	case CalledLate:
		if !p.holdsLease { // the answer began without it
			p.prefill = noPrefill
			return dst
		}
		p.decodeBlocks, p.prefill = blocksAwaitKV, mayBeSent
		return append(dst, Effect{Kind: DrainBeside, Until: ByProbe})
	case Uncallable: // no usable callback will come
		p.prefill = noPrefill
		return p.settleLease(Free, dst)
	}
	return p.handleCallback(e, dst)
}

func (p *Pair) stepPrefill(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case ProbeDue:
		return p.handlePrefillDue(dst)
	case PrefillFailed:
		dst = p.settleLease(e.End.Verdict().KV, dst)
		// With a layerwise decode engine, only an engine that did not take the request may be replaced.
		// Otherwise it would count the ends of both prefills together, and begin too early (vllm-ascend
		// 182b75ea, mooncake_layerwise_connector.py).
		mayTryAnotherEngine := e.Again && p.traits.CallsBack && e.End.MayReplaceEngine()
		if mayTryAnotherEngine {
			p.prefill = seekingEngine
			return append(dst, Effect{Kind: Seek, Until: ByProbe})
		}
		p.prefill = noPrefill // no KV will come
		return p.fail(e.End, dst)
	case Found:
		p.holdsLease = true
	case NotFound:
		p.prefill = noPrefill
		return p.fail(e.End, dst)
	case PrefillDone:
		return p.handlePrefillDone(e, dst)
	}
	return dst
}

func (p *Pair) handlePrefillDue(dst []Effect) []Effect {
	// With CallsBack, only the end of the prefill frees the decode engine's blocks, so it is sent even
	// after the end of the decode call.
	decodeGone := p.traits.Aborts && (p.DecodeEnded() || p.ClientLeft)
	if p.prefill == noPrefill || decodeGone {
		p.prefill = noPrefill
		return p.settleLease(Free, dst)
	}
	p.prefill = running
	return append(dst, Effect{Kind: SendBeside, Until: ByProbe})
}

func (p *Pair) stepDecode(e Event, dst []Effect) []Effect {
	switch e.Kind {
	case Began:
		return p.handleFirstEvent(e, dst)
	case Confirmed: // with or without the prefill engine's answer
		p.decodePromptTokens = max(p.decodePromptTokens, e.Prompt)
		dst = p.failIfKVMissing(dst)
		if !p.Failed && p.prefill == answered { // and the prefill engine has freed it
			dst = p.settleLease(Free, dst)
		}
	case Quiet:
		if p.decode == unbegun {
			return p.fail(e.End, dst)
		}
	case DecodeFailed:
		return p.handleDecodeFailed(e.Reason, dst)
	case DecodeOver:
		if !p.DecodeEnded() {
			p.decode = endedBegun
			if p.decodeBlocks != blocksUnknown { // else a callback may still come
				dst = forgetCallback(dst)
			}
		}
	}
	return dst
}

// handleUnwanted: the client must not get the end of an unconfirmed answer.
func (p *Pair) handleUnwanted(e Event, dst []Effect) []Effect {
	unconfirmed := p.prefill == running || p.prefill == aborting
	if unconfirmed && !p.Failed {
		p.Failed, p.failureCause = true, e.End
	}
	if p.prefill == running {
		return p.abortPrefill(dst)
	}
	return dst
}

// abortPrefill needs a connector with Aborts. The abort is repeated until the prefill call ends.
// Before the first event, the call stays open for up to ByGrace: only its answer shows that the
// engine writes no more KV to the decode engine's blocks. A closed connection would not show this:
// the engine's HTTP server closes its half long before the scheduler learns of the abort, between
// two batches.
func (p *Pair) abortPrefill(dst []Effect) []Effect {
	if p.prefill == running {
		p.prefill = aborting
	}
	dst = append(dst, Effect{Kind: AbortPrefill, Until: ByGrace})
	// After the first event no call need stay open. An engine that may ignore the abort may notice
	// only a closed connection.
	if p.mayIgnoreAbort || p.AnswerBegun() {
		dst = append(dst, Effect{Kind: HangUp})
	}
	return dst
}

func (p *Pair) settleLease(disposition Disposition, dst []Effect) []Effect {
	if !p.holdsLease {
		return dst
	}
	p.holdsLease = false
	return append(dst, Effect{Kind: Settle, Resource: Lease, Disposition: disposition})
}

// fail ends the decode call, unless a begun answer proves the KV. An answer that has ended already
// is only marked, so that the client does not get it.
func (p *Pair) fail(cause CallEnd, dst []Effect) []Effect {
	kvComplete := p.AnswerBegun() && p.answerProvesKV()
	hadNoAnswer := p.decode == endedUnbegun
	if kvComplete || p.Failed || hadNoAnswer {
		return dst
	}
	p.Failed, p.failureCause = true, cause
	if p.decode == endedBegun {
		return dst
	}
	if p.traits.Aborts {
		dst = append(dst, Effect{Kind: AbortDecode})
	}
	return append(dst, Effect{Kind: EndDecode})
}

func (p *Pair) handleCallback(e Event, dst []Effect) []Effect {
	p.decodeBlocks = blocksAwaitKV // even with Miscalled: blocks are allocated before the callback
	if e.Kind == NeedsNothing {
		p.decodeBlocks = noKVNeeded
	}
	if p.DecodeEnded() { // just before the callback came
		dst = forgetCallback(dst)
	}
	switch {
	case e.Kind == Miscalled:
		p.prefill = noPrefill
		dst = p.fail(e.End, dst)
		return p.settleLease(Free, dst)
	case !p.holdsLease: // the answer began without the callback
		p.prefill = noPrefill
		return dst
	case e.Kind == NeedsNothing:
		p.prefill = answered
		dst = p.settleLease(Free, dst)
		return p.startFirstEventLimit(dst)
	}
	p.prefill = mayBeSent // by the goroutine that got the callback
	return dst
}

func (p *Pair) startFirstEventLimit(dst []Effect) []Effect {
	if p.decode != unbegun {
		return dst
	}
	wait := Effect{Kind: AwaitFirst, Until: ByFirstEvent}
	if p.noEarlyEvents {
		wait.Until = ByWhole
	}
	return append(dst, wait)
}

func liftFirstEventLimit(dst []Effect) []Effect { return append(dst, Effect{Kind: StopWaiting}) }

// ConfirmTimeout is how long the proxy waits, once an answer has ended or was lost, for the prefill
// engine to confirm that its KV was complete.
func (p *Pair) ConfirmTimeout() Timeout {
	if p.answerProvesKV() {
		return NoTimeout
	}
	return ByGrace
}

func (p *Pair) handlePrefillDone(e Event, dst []Effect) []Effect {
	p.prefill, p.prefillPromptTokens = answered, e.Prompt
	// With Aborts, a prefill engine neither keeps nor writes any KV after its answer. With CallsBack,
	// it answers when it has written all KV to the decode engine.
	switch {
	case p.traits.CallsBack, p.AnswerBegun(), p.DecodeEnded(): // the prefill engine has no KV any more
		dst = p.settleLease(Free, dst)
	case p.ClientLeft: // the decode call has waited only for this answer
		dst = p.settleLease(Free, dst)
		dst = p.fail(e.End, dst)
	}
	dst = p.failIfKVMissing(dst)
	return p.startFirstEventLimit(dst)
}

// handleFirstEvent: a first event that does not prove the KV is held back for up to ByConfirm.
func (p *Pair) handleFirstEvent(e Event, dst []Effect) []Effect {
	p.decode, p.decodePromptTokens = begun, e.Prompt
	neededNoPrefill := p.traits.CallsBack && p.decodeBlocks == blocksUnknown
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

// failIfKVMissing: KV is missing if the decode engine counted more prompt tokens than the prefill
// engine.
func (p *Pair) failIfKVMissing(dst []Effect) []Effect {
	bothCounted := p.AnswerBegun() && p.prefill == answered && p.prefillPromptTokens > 0
	if !p.answerProvesKV() && bothCounted && p.prefillPromptTokens < p.decodePromptTokens {
		return p.fail(CallEnd{Progress: Through, Reason: Incomplete}, dst)
	}
	return dst
}

func (p *Pair) handleDecodeFailed(reason DecodeFailure, dst []Effect) []Effect {
	if p.decode == begun { // the first event came, but the client must not get it
		p.decode = endedBegun
	} else {
		p.decode = endedUnbegun
	}
	dst = liftFirstEventLimit(dst)
	dst = p.endPrefillOfFailedDecode(reason, dst)
	callbackMayCome := p.decodeBlocks == blocksUnknown
	if p.traits.CallsBack && !callbackMayCome {
		dst = forgetCallback(dst)
	}
	if reason != Declined && !p.ClientLeft {
		dst = append(dst, Effect{Kind: CountLoss})
	}
	engineMayHaveRequest := reason == Died
	// The prefill engine was told to abort just now, and may write KV until it has done so. The decode
	// call is closed only after this wait, or its engine could reuse pages that are still written.
	prefillMayWrite := !p.Failed && engineMayHaveRequest && p.traits.Aborts
	if prefillMayWrite {
		dst = append(dst, Effect{Kind: AwaitPrefill, Until: ByGrace})
	}
	if p.prefill == answered {
		dst = p.settleLease(Free, dst)
	}
	return dst
}

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

// leaksAfterFailure: the end of a prefill frees the blocks. But with Unbegun, it seems not to have
// reached the decode engine.
func (p *Pair) leaksAfterFailure() bool {
	neverBegan := p.failureCause.Reason == Unbegun
	prefillFreesBlocks := p.prefill == answered && !neverBegan
	return p.MayLeakBlocks() && !prefillFreesBlocks
}

// endPrefill: leaks says whether the decode engine may keep its blocks for ever.
func (p *Pair) endPrefill(reason DecodeFailure, dst []Effect) (_ []Effect, leaks bool) {
	decodeMayHaveRequest := reason == Died // else the decode engine has neither request nor blocks
	if p.traits.CallsBack {
		return p.endCalledPrefill(decodeMayHaveRequest, dst)
	}
	dst = p.abortPrefill(dst)
	if !decodeMayHaveRequest { // no blocks are written to
		dst = append(dst, Effect{Kind: HangUp})
	}
	return dst, false
}

// endCalledPrefill: the decode engine frees its blocks when the prefill ends, so it may keep them
// for ever if the proxy breaks it off.
func (p *Pair) endCalledPrefill(decodeMayHaveRequest bool, dst []Effect) (_ []Effect, leaks bool) {
	prefillEnded := p.prefill == answered
	prefilled := prefillEnded && p.decodeBlocks != noKVNeeded      // else no prefill engine was asked
	underWay := p.prefill == running || p.prefill == seekingEngine // another may be about to get the request
	noCallbackWillCome := p.decodeBlocks == blocksUnknown && !decodeMayHaveRequest
	mayBreakOff := !p.ClientLeft // else the prefill runs to its end, which frees the blocks
	switch {
	// The prefill engine must not write to a decode engine that has dropped the request.
	case (underWay || prefilled) && mayBreakOff:
		leaks = decodeMayHaveRequest && !prefillEnded
		return append(dst, Effect{Kind: HangUp}), leaks
	case noCallbackWillCome:
		return forgetCallback(dst), false
	}
	return dst, false
}

// handleClientLeft ends the decode call at once only if no KV is written to its engine, now or
// later: the engine could reuse blocks that are still written. After ByGrace the engines have to
// free the blocks by themselves.
func (p *Pair) handleClientLeft(e Event, dst []Effect) []Effect {
	if p.ClientLeft || p.decode != unbegun {
		return dst
	}
	p.ClientLeft = true
	noBlocksYet := p.traits.CallsBack && p.decodeBlocks == blocksUnknown // no blocks reserved
	// With Aborts, only a running call writes: one not sent yet will not be sent.
	nothingWritten := p.traits.Aborts && p.prefill != running
	switch {
	case noBlocksYet, nothingWritten:
		dst = p.fail(e.End, dst)
	case p.traits.Aborts: // the end of the prefill call will end the decode call
		dst = p.abortPrefill(dst)
	default: // wait for the first event, which proves that both engines can free their blocks
	}
	if !p.Failed {
		dst = append(dst, Effect{Kind: WaitGone, Until: ByGrace})
	}
	return dst
}
