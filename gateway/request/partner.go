package request

import (
	"context"
	"errors"
	"math"
	"net/http"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A partner is the prefill leg (the request to the prefill engine) of an attempt whose decode leg runs at the same time. It has a goroutine
// of its own, which may outlive the attempt. The request's lifecycle decides about both legs.
type partner struct {
	job         *job
	pair        int    // the number of the two legs in the request's lifecycle, from 1
	id          string // X-Request-Id of both legs, never used before
	dialect     lifecycle.Dialect
	decode      *engine.Call // the call of the decode leg
	rank        *fleet.Rank  // the rank that decodes
	slot        *dispatcher.Slot
	meeting     *mooncake.Meeting
	headers     []engine.Header // of the prefill leg
	body        mooncake.Body
	changes     *mooncake.Changes
	prompt      int                     // tokens of the prompt, as estimated
	maxTokens   int                     // tokens that the answer may have
	silent      bool                    // the engine may send nothing before the end of the answer: it comes in one piece, or is held back
	streamed    bool                    // the answer comes event by event
	expected    *metaserver.Expectation // the decode engine's callback; nil: nothing is called back
	decodeOver  chan struct{}           // closed when the decode leg has ended
	prefillOver chan struct{}           // closed when the prefill leg has ended
	born        fleet.Birth             // which process and weights the prefill engine had when the leg was sent
	tried       []string                // ids of the prefill engines that were asked
	waitLimit   lifecycle.Limit         // how long the prefill leg's present wait may last

	// These are guarded by the job's mutex.
	lease           *prefill.Lease       // nil once it is settled
	lastLease       *prefill.Lease       // the lease of the engine asked last, settled or not
	refusal         *failure.Fault       // the fault of the last prefill engine that did not take the prompt
	failed          *failure.Fault       // the fault of one leg that made the lifecycle end the other leg
	call            *engine.Call         // the call of the prefill leg; nil: no call is under way
	closed          bool                 // decodeOver is closed
	stranded        bool                 // the decode engine may keep KV blocks for ever
	answeredAt      time.Time            // when the prefill engine answered
	probed          mooncake.ProbeAnswer // the prefill engine's answer
	calledBackAfter time.Duration        // how long the decode engine took to call back; 0: it has not
	prefillTook     time.Duration        // how long the call of the prefill leg took
	firstTimer      *time.Timer          // ends the wait for the first event

	// how long the goroutine of the decode leg waits for the end of the prefill leg before it goes on; 0: it does not wait
	firstWait time.Duration
}

// The reasons why the prefill leg and the decode leg of a request failed to work together.
var (
	errUnknown    = errors.New("it is not known yet at which address decode engines reach the prefill engine")
	errUnheard    = errors.New("evenkeel does not listen for callbacks of decode engines yet; bind.listen takes effect with a restart")
	errNoCallback = errors.New("the decode engine did not say in time where the KV goes")
	errRestarted  = errors.New("the prefill engine restarted after the decode engine had got its address")
	errSilent     = errors.New("the prompt was prefilled, but the decode engine did not begin its answer")
	errLate       = errors.New("the decode engine did not begin its answer while the prefill engine certainly kept the KV; a later answer " +
		"could be made of another prompt's KV")
	errUnconfirmed = errors.New("the prefill engine did not say in time whether the KV is complete")
	errBroken      = errors.New("the prefill engine broke off while it handed the KV over")
	errLeft        = errors.New("the client left")
)

// awaitCallback waits until the decode engine has called back to say where the KV goes. It returns whether the prompt is to be prefilled.
func (p *partner) awaitCallback() bool {
	began := time.Now()
	select {
	case callback := <-p.expected.Came():
		return p.calledBack(callback, time.Since(began))
	case <-time.After(p.limit(p.waitLimit)):
		uncalled := failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Uncalled},
			failure.Transport("decode", errNoCallback), errNoCallback)
		p.tell(lifecycle.Event{What: lifecycle.Overdue}, uncalled)
		<-p.decodeOver // an answer may have begun without a callback
	case <-p.decodeOver:
	}
	return p.lateCallback()
}

// calledBack reports the decode engine's callback to the request's lifecycle. took is how long the engine took to call back. calledBack
// returns whether the prompt is to be prefilled.
func (p *partner) calledBack(callback metaserver.Callback, took time.Duration) bool {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	p.calledBackAfter, p.meeting.Callback = took, callback.KV
	if callback.Err == nil {
		p.lastLease.CalledBack(took)
	}
	event := lifecycle.Event{What: lifecycle.CalledBack}
	var fault *failure.Fault
	switch {
	case callback.Err != nil:
		event.What = lifecycle.Miscalled
		fault = failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Garbled},
			failure.BadGateway("decode", "it named no place for the KV"), callback.Err)
		if errors.Is(callback.Err, mooncake.ErrUnknownHost) {
			fault.Why = lifecycle.Misplaced
		}
	case callback.Empty: // the decode engine has the whole prompt
		event.What = lifecycle.NeedsNothing
	}
	p.step(event, fault)
	return p.legs().Due()
}

// lateCallback waits a little longer for the callback of a request that is over. If the callback comes, the decode engine has allocated KV
// blocks that only the end of a prefill frees. So lateCallback then returns true, and the prompt is prefilled although no client waits.
func (p *partner) lateCallback() bool {
	grace := p.limit(lifecycle.ByGrace)
	p.forget(grace)
	event := lifecycle.Event{What: lifecycle.Uncallable}
	select {
	case callback := <-p.expected.Came():
		if callback.Err == nil && !callback.Empty {
			p.meeting.Callback = callback.KV
			event.What = lifecycle.CalledLate
		}
	case <-time.After(grace):
	case <-p.expected.Forgotten():
	}
	return p.tell(event, nil)
}

// tryAnother looks for another prefill engine after one has refused the prompt, and moves the prefill leg to it. It returns false if there
// is no other engine.
func (p *partner) tryAnother() bool {
	srv := p.job.srv
	ctx, cancel := context.WithTimeout(srv.Serving(), p.limit(p.waitLimit))
	defer cancel()
	lease, err := p.lastLease.Another(ctx, p.tried)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if err != nil {
		return p.step(lifecycle.Event{What: lifecycle.NotFound}, p.refusal)
	}
	p.tried = append(p.tried, lease.Candidate.ID)
	p.step(lifecycle.Event{What: lifecycle.Found}, nil)
	p.moveTo(lease)
	return true
}

// lookForSooner moves the prefill leg to another engine if the prefill would end there at least one step of the decode rank sooner. It runs
// when the decode engine has called back: during that wait, other prefills may have ended earlier or later than predicted.
func (p *partner) lookForSooner() {
	shunned := p.job.srv.Dispatcher.Shunned(p.slot)
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	if p.lease == nil {
		return
	}
	step := time.Duration(p.slot.StepMs * float32(time.Millisecond))
	if lease := p.lease.Sooner(step, shunned); lease != nil {
		p.tried[len(p.tried)-1] = lease.Candidate.ID // the engine of the old lease was sent nothing
		p.moveTo(lease)
	}
}

// moveTo moves the prefill to the engine of lease. It is called with the job's mutex held.
func (p *partner) moveTo(lease *prefill.Lease) {
	lease.PassOn()
	p.job.srv.Dispatcher.Rerouted(p.slot, lease.Candidate.Instance)
	p.lease, p.lastLease = lease, lease
}

// legs is the state of both legs in the request's life. It is called with the job's mutex held.
func (p *partner) legs() *lifecycle.Pair { return p.job.life.Pair(p.pair) }

// tell is step for callers that do not hold the job's mutex.
func (p *partner) tell(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	p.locked(func() { goesOn = p.step(event, fault) })
	return goesOn
}

// locked calls f with the job's mutex held. The mutex is free again even if f panics, because what cleans up after a panic needs it.
func (p *partner) locked(f func()) {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	f()
}

// step reports an event of a leg to the request's lifecycle, and carries out the effects. fault is why the leg has failed; nil: it has not.
// step is called with the job's mutex held, and returns whether the prefill leg goes on.
func (p *partner) step(event lifecycle.Event, fault *failure.Fault) (goesOn bool) {
	if fault != nil {
		event.End = fault.Ended
	}
	event.Pair = p.pair
	hadFailed := p.legs().Failed
	var buffer [8]lifecycle.Effect
	effects := p.job.stepped(event, buffer[:0])
	if !hadFailed && p.legs().Failed {
		if p.failed = fault; fault == nil {
			p.failed = failure.Of(lifecycle.Ended{Far: lifecycle.Through, Why: lifecycle.Incomplete},
				failure.BadGateway("prefill", errBroken.Error()), errBroken)
		}
	}
	for _, effect := range effects {
		goesOn = p.do(effect, fault) || goesOn
	}
	p.notice()
	return goesOn
}

// notice closes decodeOver if the decode leg has ended. It is called with the job's mutex held.
func (p *partner) notice() {
	if p.legs().Closed() && !p.closed {
		p.closed = true
		close(p.decodeOver)
	}
}

// carryOut carries out an effect of a pair after a panic.
func (p *partner) carryOut(effect lifecycle.Effect) {
	p.locked(func() {
		p.do(effect, nil)
		p.notice()
	})
}

// do carries an effect out without blocking, and returns whether the prefill leg goes on. fault is why the leg has failed; nil: it has not.
func (p *partner) do(effect lifecycle.Effect, fault *failure.Fault) (goesOn bool) {
	switch effect.Do {
	case lifecycle.EndDecode:
		p.decode.Leave(upstream.Notice)
	case lifecycle.AbortDecode:
		p.abort(p.rank.Target)
	case lifecycle.AbortPrefill:
		p.abort(p.lastLease.Candidate.Target)
	case lifecycle.HangUp:
		if p.call != nil {
			p.call.Leave(upstream.Notice)
		}
	case lifecycle.Settle:
		handoff.Settle(p.lease, effect.How, fault)
		p.lease = nil
	case lifecycle.AwaitFirst:
		p.awaitFirst(effect.Until)
	case lifecycle.AwaitPrefill:
		p.firstWait = p.limit(effect.Until)
	case lifecycle.StopWaiting:
		if p.firstTimer != nil {
			p.firstTimer.Stop()
			p.firstTimer = nil
		}
	case lifecycle.Forget:
		p.forget(0)
	case lifecycle.DrainBeside:
		cause := drainLate
		if p.legs().Left {
			cause = drainLeft
		}
		p.job.srv.metrics.drains.WithLabelValues(cause).Inc()
		p.waitLimit = effect.Until
		return true
	case lifecycle.CountLoss:
		p.job.srv.metrics.rebound(p.failed)
	case lifecycle.Strand:
		p.stranded = true
	case lifecycle.WaitGone:
		time.AfterFunc(p.limit(effect.Until), func() { p.tell(lifecycle.Event{What: lifecycle.ClientWaited}, left()) })
	case lifecycle.SendBeside, lifecycle.Seek:
		p.waitLimit = effect.Until
		return true
	default: // nothing else is done for a pair
	}
	return false
}

// limit returns the duration of a limit of the request's lifecycle, for this pair of engines.
func (p *partner) limit(limit lifecycle.Limit) time.Duration {
	wait := waitAtMost(limit, p.job.srv.Settings(), p.rank.Profile)
	if limit == lifecycle.ByHold {
		wait = min(wait, p.kept())
	}
	return wait
}

// forget stops listening for the decode engine's callback after grace. Without a callback it does nothing.
func (p *partner) forget(grace time.Duration) {
	if p.expected != nil {
		p.expected.Forget(grace)
	}
}

// abort tells an engine of SGLang to end its leg. The request does not wait for the engine's answer.
func (p *partner) abort(target *engine.Target) {
	srv := p.job.srv
	_ = srv.legs.Run(math.MaxInt, func() { // Run fails only if the proxy is about to end, and then the engines lose their connections
		if err := upstream.Abort(srv.Client, target, p.id, srv.Log); err != nil {
			srv.Log.Warn("an engine did not accept an abort, so it ends the request at its own timeout", zap.Inline(p.job),
				zap.String("engine", target.ID), zap.Error(err))
		}
	})
}

// awaitFirst starts the timer that ends the decode call if its first event does not come in time. It is called with the job's mutex
// held.
func (p *partner) awaitFirst(limit lifecycle.Limit) {
	wait, cause := p.limit(limit), errSilent
	if limit == lifecycle.ByHold && wait < p.rank.Profile.FirstEventTimeout {
		cause = errLate
	}
	p.firstTimer = time.AfterFunc(wait, func() {
		p.job.mu.Lock()
		defer p.job.mu.Unlock()
		if p.firstTimer == nil {
			return // the wait ended while this goroutine waited for the mutex
		}
		if limit == lifecycle.ByWhole { // an answer in one piece may take longer while its rank gives signs of life
			if rest := handoff.Patience(p.rank, p.job.srv.Settings(), p.answeredAt, p.maxTokens, time.Now()); rest > 0 {
				p.firstTimer.Reset(rest)
				return
			}
		}
		p.step(lifecycle.Event{What: lifecycle.Quiet}, unbegun(cause))
	})
}

// kept is how long after its answer the prefill engine certainly keeps the KV. There is no limit if the engine keeps no KV, or if the
// answer gives no sign when the KV was pulled. A decode engine cannot extend this time: its heartbeats would have to name the request as
// the prefill engine does, and this name was not known when the decode leg was sent.
func (p *partner) kept() time.Duration {
	if !p.dialect.Keeps || p.silent {
		return math.MaxInt64
	}
	return p.lastLease.Candidate.Profile.PulledWithin()
}

// unbegun returns the fault of a decode leg whose first event did not come in time.
func unbegun(why error) *failure.Fault {
	return failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Unbegun},
		openai.NewError(http.StatusGatewayTimeout, "decode_timeout", why.Error()), why)
}

// left returns the fault of a call that ends because the client has left.
func left() *failure.Fault {
	return failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone, errLeft)
}

// started reports the decode leg's first event. prompt is the number of prompt tokens that the decode engine has counted; 0: unknown. If
// the connector may begin an answer before the KV is complete, started waits a moment for the prefill engine's answer. It returns why the
// answer may be wrong; nil: it is not known to be.
func (p *partner) started(prompt int) *failure.Fault {
	p.locked(func() {
		p.step(lifecycle.Event{What: lifecycle.Began, Prompt: prompt, Expired: time.Since(p.answeredAt) > p.kept()}, unbegun(errLate))
	})
	p.awaitPrefill()
	p.tell(lifecycle.Event{What: lifecycle.Confirmed}, nil)
	return p.lost()
}

// awaitPrefill waits for the end of the prefill leg if the lifecycle's last effects asked for this wait.
func (p *partner) awaitPrefill() {
	if p.firstWait > 0 {
		p.awaitOver(p.firstWait)
	}
	p.firstWait = 0
}

// awaitOver waits for the end of the prefill leg, for limit at most, and says whether it has come.
func (p *partner) awaitOver(limit time.Duration) (ended bool) {
	select {
	case <-p.prefillOver:
		return true
	case <-time.After(limit):
		return false
	}
}

// believe returns why an answer whose last event has come must end with an error; nil: it may end as complete. With some connectors the KV
// may be broken although both legs go on. Then believe waits for the prefill engine's answer, for a bounded time, because a client could
// not tell a wrong answer from a right one. The wait also ends when the client leaves. Meanwhile the decode leg needs no slot. prompt is
// the number of prompt tokens that the decode engine has counted by now.
func (p *partner) believe(prompt int, gone <-chan struct{}) *failure.Fault {
	if p == nil {
		return nil
	}
	var until lifecycle.Limit
	p.locked(func() { until = p.legs().Confirms() })
	if until != lifecycle.NotHere {
		select {
		case <-p.prefillOver:
		case <-gone:
			p.tell(lifecycle.Event{What: lifecycle.Unwanted}, left())
		case <-time.After(p.limit(until)):
			answer := openai.NewError(http.StatusGatewayTimeout, "prefill_timeout", errUnconfirmed.Error())
			p.tell(lifecycle.Event{What: lifecycle.Unwanted},
				failure.Of(lifecycle.Ended{Far: lifecycle.Sent, Why: lifecycle.Unconfirmed}, answer, errUnconfirmed))
		}
	}
	p.tell(lifecycle.Event{What: lifecycle.Confirmed, Prompt: prompt}, nil)
	return p.lost()
}

// decodeEnded reports that the decode leg has ended without a first event. The lifecycle may then end the prefill leg. fault is why the
// prefill leg has ended the decode leg; nil: the decode leg ended by itself. stranded says that the decode engine may keep KV blocks for
// ever.
func (p *partner) decodeEnded(how lifecycle.EndReason) (fault *failure.Fault, stranded bool) {
	p.locked(func() {
		p.step(lifecycle.Event{What: lifecycle.DecodeFell, Reason: how}, nil)
		fault, stranded = p.failed, p.stranded
	})
	p.awaitPrefill()
	return fault, stranded
}

// clientLeft reports that the client has left; after the first event it does nothing. It does not block, and may be called from any
// goroutine.
func (p *partner) clientLeft() { p.tell(lifecycle.Event{What: lifecycle.ClientGone}, left()) }

// outlived waits, for a bounded time, for the end of a prefill leg whose client has left. It returns whether the prefill engine may still
// write to KV blocks that the decode engine keeps for it. SGLang keeps no such blocks, and ends an aborted request.
func (p *partner) outlived() bool {
	if p.awaitOver(p.limit(lifecycle.ByGrace)) {
		return false
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.legs().Stranded()
}

// prefiller is the engine that was asked to prefill last.
func (p *partner) prefiller() prefill.Candidate {
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.lastLease.Candidate
}

// lost is why an answer that has begun may be wrong, because the prefill leg has failed since; nil: it has not.
func (p *partner) lost() *failure.Fault {
	if p == nil {
		return nil
	}
	p.job.mu.Lock()
	defer p.job.mu.Unlock()
	return p.failed
}

// close reports that the decode leg has ended after its first event. abandoned says that the client does not wait for the answer any more.
// The prefill leg is then aborted too, if its engine can be told to abort a request.
func (p *partner) close(abandoned bool) {
	if abandoned && p.dialect.Aborts {
		p.tell(lifecycle.Event{What: lifecycle.Unwanted}, left())
	}
	p.tell(lifecycle.Event{What: lifecycle.DecodeOver}, nil)
}

// deaf says whether an engine may ignore an abort, and notice only after some seconds that the proxy has closed the call. For an answer in
// one piece, SGLang checks every 4 s whether the client still waits (0.5.23, SGLANG_REQUEST_STATE_WAIT_TIMEOUT in environ.py).
func deaf(whole bool, p *mooncake.Profile, e mooncake.Endpoint) bool { return whole && p.Nameless(e) }
