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

// A concurrentPrefill is the prefill call of an attempt whose decode call runs at the same time.
// Its goroutine may outlive the attempt. The lifecycle decides when each call ends.
type concurrentPrefill struct {
	job            *job
	pairNumber     int    // in the lifecycle, from 1
	id             string // X-Request-Id of both calls, never used before
	traits         lifecycle.ConnectorTraits
	decodeCall     *engine.Call
	rank           *roster.Rank // that decodes
	slot           *dispatcher.Slot
	rendezvous     *mooncake.Rendezvous // how the two engines find each other
	headers        []engine.Header
	body           mooncake.Body
	changes        *mooncake.Patch
	promptEstimate int  // in tokens
	maxTokens      int  // of the answer
	noEarlyEvents  bool // the engine may send nothing before the whole answer is computed
	streamed       bool
	callback       *metaserver.PendingCallback // nil: the engine does not call back
	decodeOver     chan struct{}               // closed when the decode call has ended
	prefillOver    chan struct{}               // closed when the prefill call has ended
	tried          []string                    // ids of the prefill engines that were asked
	endedByOther   bool                        // another program had the engine end the prefill
	waitLimit      lifecycle.Timeout           // of the prefill call's present wait

	// The job's mutex guards the fields below.
	heldLease        *prefill.Lease // of the prompt; nil once it was given back
	lastLease        *prefill.Lease // of the engine that was asked last
	lastRefusal      *failure.Fault // fault of the last engine that did not take the prompt
	endFault         *failure.Fault // why one call has ended the other; nil: neither has
	prefillCall      *engine.Call   // nil: none is under way
	decodeOverClosed bool
	blocksMayLeak    bool // the decode engine may keep KV blocks for ever
	answeredAt       time.Time
	probed           mooncake.ProbeAnswer
	calledBackAfter  time.Duration // 0: not yet
	prefillTook      time.Duration
	firstTimer       *time.Timer // ends the wait for the first event; nil: no such wait

	// prefillWait: how long the goroutine of the decode call must now wait for the end of the prefill
	// call; 0: not at all.
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

// awaitCallback waits for the decode engine's callback. If the decode call ends first, or the time
// is over, it waits for a late one: the engine may have allocated KV blocks, which only a prefill
// frees.
func (p *concurrentPrefill) awaitCallback() (prefillNeeded bool) {
	began := time.Now()
	select {
	case callback := <-p.callback.Received():
		return p.calledBack(callback, time.Since(began))
	case <-time.After(p.timeout(p.waitLimit)):
		uncalled := failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Uncalled},
			failure.NoAnswer("decode", errNoCallback), errNoCallback)
		p.report(lifecycle.Event{Kind: lifecycle.Overdue}, uncalled)
		<-p.decodeOver // if the answer has begun without a callback, the call ends with the answer
	case <-p.decodeOver:
	}
	return p.awaitLateCallback()
}

// calledBack reports a callback that took this long, and whether the prefill call must be sent now.
func (p *concurrentPrefill) calledBack(callback metaserver.Callback, took time.Duration) (prefillNeeded bool) {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	p.calledBackAfter, p.rendezvous.Callback = took, callback.KV
	if callback.Err == nil {
		// The scheduler learns how long callbacks take. heldLease may be nil by now.
		p.lastLease.CalledBack(took)
	}
	event := lifecycle.Event{Kind: lifecycle.CalledBack}
	var fault *failure.Fault
	switch {
	case callback.Err != nil:
		event.Kind = lifecycle.Miscalled
		fault = failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Garbled},
			failure.BadGateway("decode", "it named no place for the KV"), callback.Err)
		// KV is sent only to hosts of known engines. Misplaced ends the request. After Garbled,
		// another attempt may follow.
		if errors.Is(callback.Err, mooncake.ErrUnknownHost) {
			fault.Reason = lifecycle.Misplaced
		}
	case callback.Empty: // the decode engine has the whole prompt
		event.Kind = lifecycle.NeedsNothing
	}
	p.step(event, fault)
	return p.pairState().PrefillDue()
}

// awaitLateCallback waits a little longer after the decode call has ended. An engine that calls
// back frees its KV blocks only when a prefill has ended, so one is needed if the callback names
// blocks.
func (p *concurrentPrefill) awaitLateCallback() (prefillNeeded bool) {
	grace := p.timeout(lifecycle.ByGrace)
	p.stopListeningAfter(grace)
	event := lifecycle.Event{Kind: lifecycle.Uncallable} // nothing is to be prefilled
	select {
	case callback := <-p.callback.Received():
		if callback.Err == nil && !callback.Empty {
			p.rendezvous.Callback = callback.KV
			event.Kind = lifecycle.CalledLate
		}
	case <-time.After(grace):
	case <-p.callback.Ended(): // the grace is over, or Forget was carried out
	}
	return p.report(event, nil)
}

// moveToAnother moves the prefill to another engine, if one is left.
func (p *concurrentPrefill) moveToAnother() bool {
	srv := p.job.srv
	ctx, cancel := context.WithTimeout(srv.Serving(), p.timeout(p.waitLimit))
	defer cancel()
	lease, err := p.lastLease.AcquireAnother(ctx, p.tried)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if err != nil { // the decode call ends with the refusal of the last engine
		p.step(lifecycle.Event{Kind: lifecycle.NotFound}, p.lastRefusal)
		return false
	}
	p.tried = append(p.tried, lease.Candidate.ID)
	p.step(lifecycle.Event{Kind: lifecycle.Found}, nil)
	p.moveTo(lease)
	return true
}

// moveToSooner moves a prefill that was not sent yet, if it would end at least one decode step
// sooner elsewhere: during the wait for room, other prefills may have ended earlier or later than
// predicted.
func (p *concurrentPrefill) moveToSooner() {
	quarantined := p.job.srv.Dispatcher.Quarantined(p.slot)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if p.heldLease == nil { // nothing is prefilled
		return
	}
	step := time.Duration(p.slot.StepMs * float32(time.Millisecond))
	if lease := p.heldLease.MoveIfSooner(step, quarantined); lease != nil {
		p.tried[len(p.tried)-1] = lease.Candidate.ID // instead of the last one, which was not asked after all
		p.moveTo(lease)
	}
}

// moveTo is called with the job's mutex held.
func (p *concurrentPrefill) moveTo(lease *prefill.Lease) {
	lease.DetachOwner() // the prefill may outlive the request
	p.job.srv.Dispatcher.Rerouted(p.slot, lease.Candidate.Instance)
	p.heldLease, p.lastLease = lease, lease
}

// pairState is called with the job's mutex held.
func (p *concurrentPrefill) pairState() *lifecycle.Pair { return p.job.life.Pair(p.pairNumber) }

// report does what step does, for callers that do not hold the job's mutex.
func (p *concurrentPrefill) report(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	p.withLock(func() { goesOn = p.step(event, fault) })
	return goesOn
}

// withLock releases the mutex even if f panics, because the cleanup locks it again.
func (p *concurrentPrefill) withLock(f func()) {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	f()
}

// step reports an event of the pair to the lifecycle, and carries out its effects. fault says how a
// call has failed, or why one must end the other. goesOn: the prefill call is sent, or another
// engine is looked for. The job's mutex is held.
func (p *concurrentPrefill) step(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	if fault != nil {
		event.End = fault.CallEnd
	}
	event.Pair = p.pairNumber
	hadFailed := p.pairState().Failed
	var buffer [8]lifecycle.Effect
	effects := p.job.stepLocked(event, buffer[:0])
	// One call ends the other, or the client must not get the answer.
	if !hadFailed && p.pairState().Failed {
		p.endFault = fault
		if fault == nil { // only unequal lengths of the prompt fail the pair without a fault
			p.endFault = missingKVFault()
		}
	}
	for _, effect := range effects {
		goesOn = p.do(effect, fault) || goesOn
	}
	p.closeIfDecodeEnded()
	return goesOn
}

// missingKVFault: the prefill engine has counted fewer prompt tokens than the decode engine.
func missingKVFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Through, Reason: lifecycle.Incomplete},
		failure.BadGateway("prefill", errPrefillBroke.Error()), errPrefillBroke)
}

// closeIfDecodeEnded is called with the job's mutex held.
func (p *concurrentPrefill) closeIfDecodeEnded() {
	if p.pairState().DecodeEnded() && !p.decodeOverClosed {
		p.decodeOverClosed = true
		close(p.decodeOver)
	}
}

// doAfterPanic locks the job's mutex, because the prefill call may still run on another goroutine.
func (p *concurrentPrefill) doAfterPanic(effect lifecycle.Effect) {
	p.withLock(func() {
		p.do(effect, nil)
		p.closeIfDecodeEnded()
	})
}

// do carries out an effect without blocking. fault is why the lease is given back.
func (p *concurrentPrefill) do(effect lifecycle.Effect, fault *failure.Fault) (goesOn bool) {
	switch effect.Kind {
	case lifecycle.EndDecode:
		p.decodeCall.Disconnect(upstream.NoticeTimeout)
	case lifecycle.AbortDecode:
		p.abort(p.rank.Target)
	case lifecycle.AbortPrefill: // even if its lease was given back
		answered := p.abort(p.lastLease.Candidate.Target)
		if p.prefillCall != nil { // the engine ignores an abort that comes before the request itself
			p.repeatAbort(answered, p.lastLease.Candidate.Target, p.timeout(effect.Until))
		}
	case lifecycle.HangUp:
		if p.prefillCall != nil {
			p.prefillCall.Disconnect(upstream.NoticeTimeout)
		}
	case lifecycle.Settle:
		handoff.SettleLease(p.heldLease, effect.Disposition, fault)
		p.heldLease = nil
	case lifecycle.AwaitFirst:
		p.startFirstTimer(effect.Until)
	case lifecycle.AwaitPrefill: // see awaitPrefill
		p.prefillWait = p.timeout(effect.Until)
	case lifecycle.StopWaiting:
		if p.firstTimer != nil {
			p.firstTimer.Stop()
			p.firstTimer = nil
		}
	case lifecycle.Forget:
		p.stopListeningAfter(0)
	case lifecycle.DrainBeside: // only its end frees the blocks of the decode engine
		cause := drainLate
		if p.pairState().ClientLeft {
			cause = drainLeft
		}
		p.job.srv.metrics.drains.WithLabelValues(cause).Inc()
		p.waitLimit = effect.Until
		return true
	case lifecycle.CountLoss: // the decode rank, before the first event
		p.job.srv.metrics.countRebind(p.endFault)
	case lifecycle.LeakBlocks:
		p.blocksMayLeak = true
	case lifecycle.WaitGone: // then the lifecycle lets the decode call end
		time.AfterFunc(p.timeout(effect.Until), func() { p.report(lifecycle.Event{Kind: lifecycle.ClientWaited}, clientLeftFault()) })
	case lifecycle.SendBeside, lifecycle.Seek:
		p.waitLimit = effect.Until
		return true
	default:
	}
	return false
}

func (p *concurrentPrefill) timeout(limit lifecycle.Timeout) time.Duration {
	return timeoutOf(limit, p.job.srv.Settings(), p.rank.Profile)
}

func (p *concurrentPrefill) stopListeningAfter(grace time.Duration) {
	if p.callback != nil {
		p.callback.StopWaiting(grace)
	}
}

// repeatAbort repeats the abort until the call has ended, because SGLang ignores one that comes
// before the request itself. When limit is over, it ends the call. The job's mutex is held.
func (p *concurrentPrefill) repeatAbort(answered *atomic.Bool, target *engine.Target, limit time.Duration) {
	call, until := p.prefillCall, time.Now().Add(limit)
	handoff.Repeat(min(abortEvery, limit), func() time.Duration {
		p.job.mu.Lock()
		defer p.job.mu.Unlock()
		switch timeLeft := time.Until(until); {
		case p.prefillCall != call: // it has ended
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

const abortEvery = 250 * time.Millisecond

// abort asks an SGLang engine to end its call. answered says later whether the reply has come, or
// was given up.
func (p *concurrentPrefill) abort(target *engine.Target) (answered *atomic.Bool) {
	srv := p.job.srv
	answered = new(atomic.Bool)
	// Run fails only while the proxy shuts down: then its connections close, and engines notice that.
	_ = srv.prefillCalls.Run(anyNumberAtOnce, func() {
		defer answered.Store(true)
		if err := upstream.Abort(srv.Client, target, p.id, srv.Log); err != nil {
			srv.Log.Warn("an engine did not accept an abort, so it ends the request at its own timeout", zap.Inline(p.job),
				zap.String("engine", target.ID), zap.Error(err))
		}
	})
	return answered
}

// startFirstTimer ends the decode call if its first event does not come in time. The job's mutex is
// held.
func (p *concurrentPrefill) startFirstTimer(limit lifecycle.Timeout) {
	p.firstTimer = time.AfterFunc(p.timeout(limit), func() {
		p.job.mu.Lock()
		defer p.job.mu.Unlock()
		if p.firstTimer == nil {
			return // the wait ended while this goroutine waited for the mutex
		}
		if limit == lifecycle.ByWhole { // as long as the rank shows that it is working
			if timeLeft := handoff.RemainingWait(p.rank, p.job.srv.Settings(), p.answeredAt, p.maxTokens, time.Now()); timeLeft > 0 {
				p.firstTimer.Reset(timeLeft)
				return
			}
		}
		p.step(lifecycle.Event{Kind: lifecycle.Quiet}, unbegunFault())
	})
}

func unbegunFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Unbegun},
		openai.NewError(http.StatusGatewayTimeout, "decode_timeout", errNoFirstEvent.Error()), errNoFirstEvent)
}

func clientLeftFault() *failure.Fault {
	return failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Left}, failure.ClientGone, errLeft)
}

// firstEventCame reports the first event, and why the answer may be wrong. If the event does not
// prove that the KV is complete, it waits a short time (lifecycle.ByConfirm) for the prefill
// engine's answer. If that does not come, confirmKV waits once more at the end.
func (p *concurrentPrefill) firstEventCame(counted int) *failure.Fault {
	p.report(lifecycle.Event{Kind: lifecycle.Began, Prompt: counted}, nil)
	p.awaitPrefill()
	p.report(lifecycle.Event{Kind: lifecycle.Confirmed}, nil)
	return p.pairFault()
}

// awaitPrefill waits if the effects of the last step asked for it.
func (p *concurrentPrefill) awaitPrefill() {
	if p.prefillWait > 0 {
		p.awaitEnd(p.prefillWait)
	}
	p.prefillWait = 0
}

func (p *concurrentPrefill) awaitEnd(limit time.Duration) (ended bool) {
	select {
	case <-p.prefillOver:
		return true
	case <-time.After(limit):
		return false
	}
}

// confirmKV is called when the decode engine's answer has ended, and returns why the client must
// not get its end. With some connectors the KV may be broken without any sign on the decode side:
// without this wait for the prefill engine's answer, a wrong answer would look complete. The decode
// call needs no slot meanwhile. p is nil if no prefill ran beside it.
func (p *concurrentPrefill) confirmKV(counted int, clientGone <-chan struct{}) *failure.Fault {
	if p == nil {
		return nil
	}
	var limit lifecycle.Timeout
	p.withLock(func() { limit = p.pairState().ConfirmTimeout() })
	if limit != lifecycle.NoTimeout { // the answer itself does not prove its KV
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
	// Passes the count on: if the prefill engine has answered, both must agree.
	p.report(lifecycle.Event{Kind: lifecycle.Confirmed, Prompt: counted}, nil)
	return p.pairFault()
}

// decodeFailed reports that the decode call has ended without a first event. It returns why the
// prefill call has ended it; nil: it ended by itself.
func (p *concurrentPrefill) decodeFailed(reason lifecycle.DecodeFailure) (fault *failure.Fault, blocksMayLeak bool) {
	p.withLock(func() {
		p.step(lifecycle.Event{Kind: lifecycle.DecodeFailed, Reason: reason}, nil)
		fault, blocksMayLeak = p.endFault, p.blocksMayLeak
	})
	p.awaitPrefill()
	return fault, blocksMayLeak
}

// clientLeft does not block, and any goroutine may call it.
func (p *concurrentPrefill) clientLeft() {
	p.report(lifecycle.Event{Kind: lifecycle.ClientGone}, clientLeftFault())
}

// awaitEndOrLeak: if the prefill call does not end in time, the decode engine may keep KV blocks to
// which the prefill engine still writes. The caller has the dispatcher count them.
func (p *concurrentPrefill) awaitEndOrLeak() (mayLeak bool) {
	if p.awaitEnd(p.timeout(lifecycle.ByGrace)) {
		return false
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.pairState().MayLeakBlocks() // false with SGLang, which frees the blocks of an aborted call
}

// prefillEngine is the one that was asked last.
func (p *concurrentPrefill) prefillEngine() prefill.Candidate {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.lastLease.Candidate
}

// pairFault returns why the prefill call has made the answer unusable. p may be nil.
func (p *concurrentPrefill) pairFault() *failure.Fault {
	if p == nil {
		return nil
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.endFault
}

// answerEnded reports the end of the decode call after its first event. abandoned: the client does
// not wait any more.
func (p *concurrentPrefill) answerEnded(abandoned bool) {
	if abandoned && p.traits.Aborts {
		p.report(lifecycle.Event{Kind: lifecycle.Unwanted}, clientLeftFault())
	}
	p.report(lifecycle.Event{Kind: lifecycle.DecodeOver}, nil)
}

// mayIgnoreAbort: the engine may also take seconds to notice a closed connection. For an answer in
// one piece, SGLang checks every 4 s whether the client still waits (0.5.23,
// SGLANG_REQUEST_STATE_WAIT_TIMEOUT in environ.py).
func mayIgnoreAbort(noEarlyEvents bool, p *mooncake.Profile, e mooncake.Endpoint) bool {
	return noEarlyEvents && p.Nameless(e)
}
