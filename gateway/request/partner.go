package request

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A concurrentPrefill is the prefill call of an attempt whose decode call runs at the same time. It has a goroutine of its own, which may
// outlive the attempt. The request's lifecycle decides when each call ends.
type concurrentPrefill struct {
	job            *job
	pairNumber     int    // number of the pair of calls in the request's lifecycle, from 1
	id             string // X-Request-Id of both calls, never used before
	traits         lifecycle.ConnectorTraits
	decodeCall     *engine.Call // the decode call, which runs at the same time
	rank           *roster.Rank // the rank that decodes
	slot           *dispatcher.Slot
	rendezvous     *mooncake.Rendezvous // how the two engines find each other
	headers        []engine.Header      // HTTP headers of the prefill call
	body           mooncake.Body
	changes        *mooncake.Patch
	promptEstimate int                         // estimated tokens of the prompt
	maxTokens      int                         // tokens that the answer may have
	noEarlyEvents  bool                        // the engine may send nothing before the whole answer is computed
	streamed       bool                        // the answer comes event by event
	callback       *metaserver.PendingCallback // waits for the decode engine's callback; nil: the engine does not call back
	decodeOver     chan struct{}               // closed when the decode call has ended
	prefillOver    chan struct{}               // closed when the prefill call has ended
	tried          []string                    // ids of the prefill engines that were asked
	endedByOther   bool                        // another program has had the prefill engine end the request
	waitLimit      lifecycle.Timeout           // how long the prefill call's present wait may last

	// The job's mutex guards the fields below.
	heldLease        *prefill.Lease       // the lease of the prompt; nil once it was given back
	lastLease        *prefill.Lease       // the lease of the engine that was asked last, given back or not
	lastRefusal      *failure.Fault       // the fault of the last engine that did not take the prompt
	endFault         *failure.Fault       // why one call has ended the other; nil: neither has
	prefillCall      *engine.Call         // the prefill call; nil: none is under way
	decodeOverClosed bool                 // decodeOver was closed, and must not be closed again
	blocksMayLeak    bool                 // the decode engine may keep KV blocks for ever
	answeredAt       time.Time            // when the answer of the prefill engine came
	probed           mooncake.ProbeAnswer // the answer of the prefill engine
	calledBackAfter  time.Duration        // how long the decode engine took to call back; 0: it has not called back
	prefillTook      time.Duration        // how long the prefill call took
	firstTimer       *time.Timer          // ends the wait for the first event of the answer; nil: no such wait is under way

	// prefillWait is how long the goroutine of the decode call must now wait for the end of the prefill call; 0: it need not wait.
	prefillWait time.Duration
}

// Why a prefill call and its decode call failed to transfer the KV.
var (
	errNoListener   = errors.New("evenkeel does not listen for callbacks of decode engines yet; bind.listen takes effect with a restart")
	errNoCallback   = errors.New("the decode engine did not say in time where the KV goes")
	errNoFirstEvent = errors.New("the prompt was prefilled, but the decode engine did not begin its answer")
	errUnconfirmed  = errors.New("the prefill engine did not say in time whether the KV is complete")
	errPrefillBroke = errors.New("the prefill engine broke off while it handed the KV over")
	errLeft         = errors.New("the client left")
)

// awaitCallback waits until the decode engine calls back to say where the KV goes. If the decode call ends before that, or the time is
// over, it waits for a late callback: the engine may have allocated KV blocks, which only a prefill frees. It returns whether the prefill
// call must be sent.
func (p *concurrentPrefill) awaitCallback() (prefillNeeded bool) {
	began := time.Now()
	select {
	case callback := <-p.callback.Received():
		return p.calledBack(callback, time.Since(began))
	case <-time.After(p.timeout(p.waitLimit)):
		uncalled := failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Uncalled},
			failure.NoAnswer("decode", errNoCallback), errNoCallback)
		p.report(lifecycle.Event{Kind: lifecycle.Overdue}, uncalled)
		<-p.decodeOver // Overdue ends the decode call, unless its answer has begun without a callback; then the call ends with the answer
	case <-p.decodeOver:
	}
	return p.awaitLateCallback()
}

// calledBack reports the decode engine's callback to the request's lifecycle. The callback says where the KV goes (CalledBack), says that
// no KV is needed (NeedsNothing), or is not usable (Miscalled). took is how long the engine took to call back. prefillNeeded says that the
// prefill call must be sent now.
func (p *concurrentPrefill) calledBack(callback metaserver.Callback, took time.Duration) (prefillNeeded bool) {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	p.calledBackAfter, p.rendezvous.Callback = took, callback.KV
	if callback.Err == nil {
		p.lastLease.CalledBack(took) // the scheduler learns how long callbacks take; heldLease may be nil by now
	}
	event := lifecycle.Event{Kind: lifecycle.CalledBack}
	var fault *failure.Fault
	switch {
	case callback.Err != nil: // the callback is not usable
		event.Kind = lifecycle.Miscalled
		fault = failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Garbled},
			failure.BadGateway("decode", "it named no place for the KV"), callback.Err)
		// KV is sent only to hosts of known engines. Misplaced ends the request; after Garbled another attempt may follow.
		if errors.Is(callback.Err, mooncake.ErrUnknownHost) {
			fault.Reason = lifecycle.Misplaced
		}
	case callback.Empty: // the decode engine has the whole prompt
		event.Kind = lifecycle.NeedsNothing
	}
	p.step(event, fault)
	return p.pairState().PrefillDue()
}

// awaitLateCallback waits a little longer for the callback after the decode call has ended. A decode engine that calls back has allocated
// KV blocks, and it frees them only when a prefill has ended. So a prefill is needed if the callback comes and names blocks. It is not
// needed after an empty callback (the engine has the KV of the whole prompt), or if the lifecycle finds that none is needed.
func (p *concurrentPrefill) awaitLateCallback() (prefillNeeded bool) {
	grace := p.timeout(lifecycle.ByGrace)
	p.stopListeningAfter(grace)
	event := lifecycle.Event{Kind: lifecycle.Uncallable} // no usable callback came, so nothing is to be prefilled
	select {
	case callback := <-p.callback.Received():
		if callback.Err == nil && !callback.Empty {
			p.rendezvous.Callback = callback.KV
			event.Kind = lifecycle.CalledLate
		}
	case <-time.After(grace):
	case <-p.callback.Ended(): // no callback can come any more: the grace is over, or the effect Forget was carried out
	}
	return p.report(event, nil)
}

// moveToAnother looks for another prefill engine after the last one did not take the prompt, and moves the prefill to that engine. It
// returns false if no engine is left.
func (p *concurrentPrefill) moveToAnother() bool {
	srv := p.job.srv
	ctx, cancel := context.WithTimeout(srv.Serving(), p.timeout(p.waitLimit))
	defer cancel()
	lease, err := p.lastLease.AcquireAnother(ctx, p.tried)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if err != nil { // NotFound also ends the decode call; the reason is the refusal of the last engine
		p.step(lifecycle.Event{Kind: lifecycle.NotFound}, p.lastRefusal)
		return false
	}
	p.tried = append(p.tried, lease.Candidate.ID)
	p.step(lifecycle.Event{Kind: lifecycle.Found}, nil)
	p.moveTo(lease)
	return true
}

// moveToSooner moves a prefill that was not sent yet to another engine, if it would end at least one decode step sooner there. It runs once
// the decode engine has room. During the wait for room, other prefills may have ended earlier or later than predicted.
func (p *concurrentPrefill) moveToSooner() {
	quarantined := p.job.srv.Dispatcher.Quarantined(p.slot)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if p.heldLease == nil { // the lease was given back, so nothing is prefilled
		return
	}
	step := time.Duration(p.slot.StepMs * float32(time.Millisecond))
	if lease := p.heldLease.MoveIfSooner(step, quarantined); lease != nil {
		p.tried[len(p.tried)-1] = lease.Candidate.ID // in place of the engine that was chosen last, which was not asked after all
		p.moveTo(lease)
	}
}

// moveTo moves the prefill to the engine of lease, and tells the dispatcher of the move. It is called with the job's mutex held.
func (p *concurrentPrefill) moveTo(lease *prefill.Lease) {
	lease.DetachOwner() // p gives the lease back, because the prefill may outlive the request
	p.job.srv.Dispatcher.Rerouted(p.slot, lease.Candidate.Instance)
	p.heldLease, p.lastLease = lease, lease
}

// pairState returns the state of both calls in the request's lifecycle. It is called with the job's mutex held.
func (p *concurrentPrefill) pairState() *lifecycle.Pair { return p.job.life.Pair(p.pairNumber) }

// report does what step does, for callers that do not hold the job's mutex.
func (p *concurrentPrefill) report(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	p.withLock(func() { goesOn = p.step(event, fault) })
	return goesOn
}

// withLock calls f with the job's mutex held. It releases the mutex even if f panics, because the cleanup after a panic locks it again.
func (p *concurrentPrefill) withLock(f func()) {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	f()
}

// step reports an event of one of the two calls (the pair) to the request's lifecycle, and carries out the effects that the lifecycle
// returns. fault says how a call has failed, or why one call must end the other; nil: the event has no such reason. step is called with the
// job's mutex held. goesOn says that the effects make the prefill call go on: it is sent, or another prefill engine is looked for.
func (p *concurrentPrefill) step(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	if fault != nil {
		event.End = fault.CallEnd
	}
	event.Pair = p.pairNumber
	hadFailed := p.pairState().Failed
	var buffer [8]lifecycle.Effect
	effects := p.job.stepLocked(event, buffer[:0])
	if !hadFailed && p.pairState().Failed { // because of this event, one call ends the other, or the client must not get the answer
		p.endFault = fault
		if fault == nil { // only a comparison of the prompt's lengths at both engines fails the pair without a fault
			p.endFault = missingKVFault()
		}
	}
	for _, effect := range effects {
		goesOn = p.do(effect, fault) || goesOn
	}
	p.closeIfDecodeEnded()
	return goesOn
}

// missingKVFault returns the fault of a pair whose prefill engine has counted fewer prompt tokens than the decode engine: KV is missing.
func missingKVFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Through, Reason: lifecycle.Incomplete},
		failure.BadGateway("prefill", errPrefillBroke.Error()), errPrefillBroke)
}

// closeIfDecodeEnded closes decodeOver if the decode call has ended, so that waits for this end are over. It is called with the job's mutex
// held.
func (p *concurrentPrefill) closeIfDecodeEnded() {
	if p.pairState().DecodeEnded() && !p.decodeOverClosed {
		p.decodeOverClosed = true
		close(p.decodeOver)
	}
}

// doAfterPanic carries out an effect of the cleanup after a panic, and ends the waits for the decode call if it is over. It locks the job's
// mutex, because the prefill call may still run on another goroutine.
func (p *concurrentPrefill) doAfterPanic(effect lifecycle.Effect) {
	p.withLock(func() {
		p.do(effect, nil)
		p.closeIfDecodeEnded()
	})
}

// do carries out an effect without blocking, and says whether the effect makes the prefill call go on. If the effect gives the prefill
// lease back, fault is the reason.
func (p *concurrentPrefill) do(effect lifecycle.Effect, fault *failure.Fault) (goesOn bool) {
	switch effect.Kind {
	case lifecycle.EndDecode:
		p.decodeCall.Disconnect(upstream.NoticeTimeout)
	case lifecycle.AbortDecode:
		p.abort(p.rank.Target)
	case lifecycle.AbortPrefill: // at the engine that was asked last, even if its lease was given back, so that p.heldLease is nil
		answered := p.abort(p.lastLease.Candidate.Target)
		if p.prefillCall != nil { // the engine ignores an abort that comes before the request itself
			p.repeatAbort(answered, p.lastLease.Candidate.Target, p.timeout(effect.Until))
		}
	case lifecycle.HangUp: // the proxy closes the prefill call
		if p.prefillCall != nil {
			p.prefillCall.Disconnect(upstream.NoticeTimeout)
		}
	case lifecycle.Settle: // gives the lease back; lastLease still says which engine was asked
		handoff.SettleLease(p.heldLease, effect.Disposition, fault)
		p.heldLease = nil
	case lifecycle.AwaitFirst: // the time limit for the first event begins
		p.startFirstTimer(effect.Until)
	case lifecycle.AwaitPrefill: // the goroutine of the decode call will wait (awaitPrefill)
		p.prefillWait = p.timeout(effect.Until)
	case lifecycle.StopWaiting: // the time limit for the first event is lifted
		if p.firstTimer != nil {
			p.firstTimer.Stop()
			p.firstTimer = nil
		}
	case lifecycle.Forget: // no callback is expected any more
		p.stopListeningAfter(0)
	case lifecycle.DrainBeside: // only the end of this prefill frees the blocks of the decode engine; no client waits for it
		cause := drainLate
		if p.pairState().ClientLeft {
			cause = drainLeft
		}
		p.job.srv.metrics.drains.WithLabelValues(cause).Inc()
		p.waitLimit = effect.Until
		return true
	case lifecycle.CountLoss: // the request has lost its decode rank before the first event
		p.job.srv.metrics.countRebind(p.endFault)
	case lifecycle.LeakBlocks:
		p.blocksMayLeak = true
	case lifecycle.WaitGone: // the client has left; after this time, the lifecycle lets the decode call end
		time.AfterFunc(p.timeout(effect.Until), func() { p.report(lifecycle.Event{Kind: lifecycle.ClientWaited}, clientLeftFault()) })
	case lifecycle.SendBeside, lifecycle.Seek: // the prefill call is sent, or another prefill engine is looked for
		p.waitLimit = effect.Until
		return true
	default: // no other effect concerns a pair
	}
	return false
}

// timeout converts a limit of the request's lifecycle to a duration, for this pair of engines.
func (p *concurrentPrefill) timeout(limit lifecycle.Timeout) time.Duration {
	return timeoutOf(limit, p.job.srv.Settings(), p.rank.Profile)
}

// stopListeningAfter stops listening for the decode engine's callback after grace. It does nothing if the engine does not call back.
func (p *concurrentPrefill) stopListeningAfter(grace time.Duration) {
	if p.callback != nil {
		p.callback.StopWaiting(grace)
	}
}

// repeatAbort repeats the abort of the prefill call until the call has ended, because SGLang ignores
// an abort that comes before the request itself. It repeats none that has no answer yet (answered).
// When limit is over, it ends the call. It is called with the job's mutex held.
func (p *concurrentPrefill) repeatAbort(answered *atomic.Bool, target *engine.Target, limit time.Duration) {
	call, until := p.prefillCall, time.Now().Add(limit)
	handoff.Repeat(min(abortEvery, limit), func() time.Duration {
		p.job.mu.Lock()
		defer p.job.mu.Unlock()
		switch timeLeft := time.Until(until); {
		case p.prefillCall != call: // the prefill call has ended
			return 0
		case timeLeft <= 0:
			call.Disconnect(upstream.NoticeTimeout)
			return 0
		default:
			if answered.Load() {
				answered = p.abort(target)
			}
			return min(abortEvery, timeLeft)
		}
	})
}

// abortEvery is how often an abort is repeated.
const abortEvery = 250 * time.Millisecond

// abort asks an SGLang engine to end its call, and does not wait for the engine's answer. answered
// says later whether it has come, or was given up.
func (p *concurrentPrefill) abort(target *engine.Target) (answered *atomic.Bool) {
	srv := p.job.srv
	answered = new(atomic.Bool)
	// Run fails only while the proxy shuts down: then its connections close, and engines notice that
	_ = srv.prefillCalls.Run(anyNumberAtOnce, func() {
		defer answered.Store(true)
		if err := upstream.Abort(srv.Client, target, p.id, srv.Log); err != nil {
			srv.Log.Warn("an engine did not accept an abort, so it ends the request at its own timeout", zap.Inline(p.job),
				zap.String("engine", target.ID), zap.Error(err))
		}
	})
	return answered
}

// startFirstTimer starts the timer that ends the decode call if its first event does not come in
// time. limit says how long it may take: ByFirstEvent is the usual time, and ByWhole is for an
// answer whose first event comes only when all of it is computed. startFirstTimer is called with
// the job's mutex held.
func (p *concurrentPrefill) startFirstTimer(limit lifecycle.Timeout) {
	p.firstTimer = time.AfterFunc(p.timeout(limit), func() {
		p.job.mu.Lock()
		defer p.job.mu.Unlock()
		if p.firstTimer == nil {
			return // the wait ended while this goroutine waited for the mutex
		}
		if limit == lifecycle.ByWhole { // wait as long as the rank shows that it is working
			if timeLeft := handoff.RemainingWait(p.rank, p.job.srv.Settings(), p.answeredAt, p.maxTokens, time.Now()); timeLeft > 0 {
				p.firstTimer.Reset(timeLeft)
				return
			}
		}
		p.step(lifecycle.Event{Kind: lifecycle.Quiet}, unbegunFault()) // no first event came in time
	})
}

// unbegunFault returns the fault of a decode call whose first event did not come in time.
func unbegunFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Unbegun},
		openai.NewError(http.StatusGatewayTimeout, "decode_timeout", errNoFirstEvent.Error()), errNoFirstEvent)
}

// clientLeftFault returns the fault of a call that ends because the client has left.
func clientLeftFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Left}, failure.ClientGone, errLeft)
}

// firstEventCame reports the decode call's first event. counted is how many prompt tokens the decode engine has counted; 0: it has reported
// no count. With some connectors the KV may still be incomplete at the first event. Then firstEventCame waits a short time
// (lifecycle.ByConfirm) for the prefill engine's answer. The event Confirmed only reports that this wait is over, whether or not the answer
// has come: at the end of the decode engine's answer, confirmKV waits for it once more. firstEventCame returns why the decode engine's
// answer may be wrong; nil: nothing shows that it is.
func (p *concurrentPrefill) firstEventCame(counted int) *failure.Fault {
	p.report(lifecycle.Event{Kind: lifecycle.Began, Prompt: counted}, nil)
	p.awaitPrefill() // does nothing if Began has brought no effect AwaitPrefill
	p.report(lifecycle.Event{Kind: lifecycle.Confirmed}, nil)
	return p.pairFault()
}

// awaitPrefill waits for the end of the prefill call if the effects of the last step asked for this wait.
func (p *concurrentPrefill) awaitPrefill() {
	if p.prefillWait > 0 {
		p.awaitEnd(p.prefillWait)
	}
	p.prefillWait = 0
}

// awaitEnd waits at most limit for the end of the prefill call, and says whether the call has ended.
func (p *concurrentPrefill) awaitEnd(limit time.Duration) (ended bool) {
	select {
	case <-p.prefillOver:
		return true
	case <-time.After(limit):
		return false
	}
}

// confirmKV is called when the decode engine's answer has ended. It returns why the client must not get the answer's end; nil: the client
// may get it, or no prefill ran beside the decode call (p is nil). With some connectors the KV may be broken without any sign on the decode
// side. Then confirmKV waits for the prefill engine's answer until a limit, or until the client leaves. Without this wait a wrong answer
// would look complete to the client. The decode call needs no slot during the wait. counted is the number of prompt tokens that the decode
// engine has counted.
func (p *concurrentPrefill) confirmKV(counted int, clientGone <-chan struct{}) *failure.Fault {
	if p == nil {
		return nil
	}
	var limit lifecycle.Timeout
	p.withLock(func() { limit = p.pairState().ConfirmTimeout() })
	if limit != lifecycle.NoTimeout { // the answer itself does not prove that its KV is complete
		select {
		case <-p.prefillOver:
		case <-clientGone:
			p.report(lifecycle.Event{Kind: lifecycle.Unwanted}, clientLeftFault())
		case <-time.After(p.timeout(limit)):
			answer := openai.NewError(http.StatusGatewayTimeout, "prefill_timeout", errUnconfirmed.Error())
			p.report(lifecycle.Event{Kind: lifecycle.Unwanted},
				failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Sent, Reason: lifecycle.Unconfirmed}, answer, errUnconfirmed))
		}
	}
	// Confirmed says that the wait is over, and passes the count on. If the prefill engine has answered, both counts must agree.
	p.report(lifecycle.Event{Kind: lifecycle.Confirmed, Prompt: counted}, nil)
	return p.pairFault()
}

// decodeFailed reports that the decode call has ended without a first event. The lifecycle may end the prefill call, too. decodeFailed
// returns why the prefill call has ended the decode call; nil: the decode call ended by itself. blocksMayLeak says that the decode engine
// may keep KV blocks for ever.
func (p *concurrentPrefill) decodeFailed(reason lifecycle.DecodeFailure) (fault *failure.Fault, blocksMayLeak bool) {
	p.withLock(func() {
		p.step(lifecycle.Event{Kind: lifecycle.DecodeFailed, Reason: reason}, nil)
		fault, blocksMayLeak = p.endFault, p.blocksMayLeak
	})
	p.awaitPrefill()
	return fault, blocksMayLeak
}

// clientLeft reports that the client has left. After the decode call's first event it does nothing. It does not block, and any goroutine
// may call it.
func (p *concurrentPrefill) clientLeft() {
	p.report(lifecycle.Event{Kind: lifecycle.ClientGone}, clientLeftFault())
}

// awaitEndOrLeak is called after the client has left. It waits a limited time for the end of the prefill call. If the call has not ended by
// then, the decode engine may keep KV blocks to which the prefill engine still writes (mayLeak). The caller has the dispatcher count them.
func (p *concurrentPrefill) awaitEndOrLeak() (mayLeak bool) {
	if p.awaitEnd(p.timeout(lifecycle.ByGrace)) {
		return false
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.pairState().MayLeakBlocks() // false with SGLang, which frees the blocks of a call that was aborted
}

// prefillEngine returns the prefill engine that was asked last.
func (p *concurrentPrefill) prefillEngine() prefill.Candidate {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.lastLease.Candidate
}

// pairFault returns why the prefill call has made the answer unusable; nil: it has not, or there is no such call (p is nil).
func (p *concurrentPrefill) pairFault() *failure.Fault {
	if p == nil {
		return nil
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.endFault
}

// answerEnded reports that the decode call has ended after its first event. It closes no connection itself. abandoned says that the client
// does not wait for the answer any more. Then the prefill engine is told to end its call, too, if it supports aborts.
func (p *concurrentPrefill) answerEnded(abandoned bool) {
	if abandoned && p.traits.Aborts {
		p.report(lifecycle.Event{Kind: lifecycle.Unwanted}, clientLeftFault())
	}
	p.report(lifecycle.Event{Kind: lifecycle.DecodeOver}, nil)
}

// mayIgnoreAbort says whether an engine may ignore an abort, and may take seconds to notice that the proxy has closed the connection: for
// an answer in one piece, SGLang checks every 4 s whether the client still waits (0.5.23, SGLANG_REQUEST_STATE_WAIT_TIMEOUT in environ.py).
func mayIgnoreAbort(noEarlyEvents bool, p *mooncake.Profile, e mooncake.Endpoint) bool {
	return noEarlyEvents && p.Nameless(e)
}
