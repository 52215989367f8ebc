package geo

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/geo/policy"
	"evenkeel/sse"
)

// AbortByClient records that the client has left, and closes the connection to the peer at once, so that the peer notices it.
// AbortByClient never blocks.
func (f *Forward) AbortByClient() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clientLeft = true
	if f.carrier != nil {
		f.carrier.Abort()
	}
}

// DropUnsent ends a forward that was not sent, and takes back what it had booked on the peer.
func (f *Forward) DropUnsent() { f.End(OutcomeGone) }

// End ends a forward whose client got an answer or left. Only the first of all calls of DropUnsent, End and Fail has an effect.
func (f *Forward) End(outcome string) { f.end(outcome, "") }

// Fail ends a forward of which the client got nothing, and returns how to continue with the request.
func (f *Forward) Fail(err error) *Failure {
	fail := f.classifyFailure(err)
	fail.Sibling = f.peer.sibling
	f.end(fail.outcome(), fail.Reason)
	return fail
}

// RejectedError is the error of a forward that the peer refused. reason is the value of RejectHeader.
func RejectedError(reason string) error {
	return &refusedError{status: http.StatusServiceUnavailable, reject: reason}
}

// abandon aborts the forward for this cause, unless the client has a part of the answer or has left.
func (f *Forward) abandon(cause string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.clientHasAnswer || f.clientLeft {
		return
	}
	f.abandonCause = cause
	if f.carrier != nil {
		f.carrier.Abort()
	}
}

// SetCarrier sets the carrier, which is aborted when the client leaves or the peer is lost. It returns false if one of these has
// happened already. A caller that carries a forward without Send must call Written and AnswerBegun, and must end the forward once,
// by Fail or by End.
func (f *Forward) SetCarrier(carrier Carrier) (mayStart bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.carrier = carrier
	return !f.clientLeft && f.abandonCause == ""
}

// Written records that the request was written to the peer: the answer to any later probe counts it.
func (f *Forward) Written() {
	ps := f.peers
	ps.mu.Lock()
	defer ps.mu.Unlock()
	f.peer.reserved.MarkWritten(f.number, ps.sinceStartMs(ps.clock.Now()))
}

// AnswerBegun records that the client gets the begin of the answer, so that the request cannot be served elsewhere any more. whole
// says that the answer is not streamed: it is complete, and does not show when the first token was ready. cached is the
// number of prompt tokens that the peer found in a cache; -1: not known. The answer counts as a success of the peer.
// AnswerBegun also updates what is learned of the peer's times and of its cached prompts. From then on the request does not count as
// unanswered.
func (f *Forward) AnswerBegun(whole bool, cached int) {
	ps, p := f.peers, f.peer
	f.mu.Lock()
	f.clientHasAnswer = true
	f.mu.Unlock()
	f.firstAt, f.cached = ps.clock.Now(), cached
	ps.metrics.ttft.WithLabelValues(routeForward, p.id).Observe(f.firstAt.Sub(f.queuedAt).Seconds())
	ps.mu.Lock()
	roomAgain := f.releaseUnanswered()
	defer f.unlockAndWake(roomAgain)
	p.circuit.Succeed()
	learnTimes(f, whole)
	learnCached(f)
}

// learnTimes updates what is learned of the peer's times: how many requests may be unanswered there (trust), how much more gain the next
// forwards must promise because predictions were too low (distrust), and the correction of the next predictions (residual). whole says that
// the answer is not streamed. The answer has begun at firstAt. learnTimes is called with the lock of Peers held.
func learnTimes(f *Forward, whole bool) {
	ps, p := f.peers, f.peer
	nowMs, tookMs, predictedMs := ps.sinceStartMs(f.firstAt), ms(f.firstAt.Sub(f.decidedAt)), f.predicted.TTFT()
	if whole { // tookMs is the time of the whole answer, and cannot be compared with the predicted time of the first token
		p.trust.WholeAnswer(nowMs)
		return
	}
	p.trust.FirstEvent(nowMs, tookMs, predictedMs)
	if predictedMs > 0 { // a policy has predicted the time
		p.distrust.Add(nowMs, tookMs-predictedMs)
		p.residual.Add(tookMs, f.predicted.WithoutResidual(), f.firstAt)
		ps.metrics.costError.WithLabelValues(p.id).Observe((tookMs - predictedMs) / 1000)
	}
}

// learnCached updates the index of the prompts that are cached at the peer. The peer may have found less of the prompt in its cache than
// predicted. Now it has computed the whole prompt. learnCached is called with the lock of Peers held.
func learnCached(f *Forward) {
	p := f.peer
	overPredicted := f.cached >= 0 && float64(f.hitTokens-f.cached) >= f.blockTokens // by at least one block; below 0: not known
	if overPredicted && len(f.prompt.Keys) > 0 {
		p.prompts.Correct(p.indexSlot, f.prompt.Keys, int(float64(f.cached)/f.blockTokens))
	}
	p.prompts.Confirm(&f.speculation) // the prompt was assumed to be cached at the peer since the decision, and is cached there now
}

// startUnansweredTimer is for a request whose answer is not streamed, so that the time of its first token is not known. The
// request counts as unanswered only until a first event would be late, when the timer runs out. Otherwise a peer with a small window
// would get no other request while it generates the answer. limit is the time limit of the whole answer, which bounds the timer
// because the peer's numbers may predict any time. stop ends the timer.
func (f *Forward) startUnansweredTimer(limit time.Duration) (stop func() bool) {
	lateMs := min(policy.LateMs(f.predicted.TTFT()), ms(limit))
	return f.peers.clock.After(time.Duration(lateMs*float64(time.Millisecond)), func() {
		f.peers.mu.Lock() // unlockAndWake unlocks it
		f.unlockAndWake(f.releaseUnanswered())
	})
}

// releaseUnanswered removes the forward from the peer's unanswered requests, unless an earlier call has done so. It reports whether the
// peer's window had no room for another request before, so that it has room again now. It is called with the lock of Peers held.
func (f *Forward) releaseUnanswered() (wasFull bool) {
	ps, p := f.peers, f.peer
	wasFull = f.unansweredCount > 0 && p.unanswered >= p.trust.Window(ps.sinceStartMs(ps.clock.Now()))
	p.unanswered -= f.unansweredCount
	f.unansweredCount = 0
	return wasFull
}

// unlockAndWake releases the lock of Peers, and then wakes the arrival queue if a peer has room again.
func (f *Forward) unlockAndWake(roomAgain bool) {
	f.peers.mu.Unlock()
	if roomAgain {
		f.peers.cfg.Queue.Wake()
	}
}

// classifyFailure returns how to continue with a request whose forward failed with err. Several cases may apply, and the first one counts.
// MayHaveRun is false only if the client has left, if the peer has refused the request, or if the error of the call shows that the request
// was not sent.
func (f *Forward) classifyFailure(err error) *Failure {
	f.mu.Lock()
	defer f.mu.Unlock()
	var callErr *engine.Error
	var refusal *refusedError
	isCall := errors.As(err, &callErr)
	callTooLong := isCall && callErr.Timeout && callErr.Phase != engine.PhaseConnect // a slow connect counts as causeDial
	tooLate := callTooLong || errors.Is(err, errLate) || errors.Is(err, sse.ErrSilent)
	switch {
	case f.clientLeft:
		return &Failure{ClientLeft: true, Err: err}
	case f.abandonCause != "": // this proxy aborted the call, so that err is only a consequence; the peer may be working on the request
		return &Failure{Reason: f.abandonCause, MayHaveRun: true, Err: err}
	case errors.As(err, &refusal):
		switch {
		case refusal.relay != nil: // no other proxy could answer better
			return &Failure{Relay: refusal.relay, Err: err}
		case slices.Contains(causes, refusal.reject): // metrics name the reason, so that it must be a known one
			return &Failure{Reason: refusal.reject, Err: err}
		}
		return &Failure{Reason: causeStatus, Err: err}
	case isCall && callErr.Phase == engine.PhaseRequest: // the call failed before anything was sent
		return &Failure{Reason: causeUnfit, Err: err}
	case errors.Is(err, engine.ErrTooLarge): // the peer has begun to answer, so it has the request
		return &Failure{Reason: causeLarge, MayHaveRun: true, Err: err}
	case f.clientDeadline && tooLate: // the limit was the client's own deadline, which is no fault of the peer
		return &Failure{Reason: RejectDeadline, MayHaveRun: true, Err: err}
	case tooLate: // the limit was that of this proxy
		return &Failure{Reason: causeTimeout, MayHaveRun: true, Err: err}
	case isCall && callErr.Phase == engine.PhaseConnect: // nothing was sent
		return &Failure{Reason: causeDial, Err: err}
	}
	// An error that does not come from the call is about the peer's answer, so the request was sent.
	return &Failure{Reason: causeBroken, MayHaveRun: !isCall || callErr.Sent, Err: err}
}

// outcome is the outcome of the failed forward, as receipts and metrics name it.
func (fail *Failure) outcome() string {
	switch {
	case fail.ClientLeft:
		return OutcomeGone
	case fail.Relay != nil: // the client gets the peer's refusal as its answer
		return OutcomeRelayed
	}
	return OutcomeFallback // the request is served in another way, such as by an engine of this region
}

// end ends the forward, the first time it is called: it updates the peer's state and the metrics, and writes the receipt.
func (f *Forward) end(outcome, cause string) {
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		return
	}
	f.ended = true
	carrier := f.carrier // the call to the peer, which has counted its bytes; nil: the request was not sent
	f.mu.Unlock()
	ps, p, now := f.peers, f.peer, f.peers.clock.Now()
	receipt := f.makeReceipt(carrier, now)
	receipt.Outcome, receipt.Cause = outcome, cause
	f.updatePeer(outcome, cause, receipt.USD, now)
	ps.metrics.forwards.WithLabelValues(p.id, outcome).Inc()
	ps.metrics.inflight.WithLabelValues(p.id).Dec()
	ps.metrics.bytes.WithLabelValues(p.id, "out").Add(float64(receipt.BytesOut))
	ps.metrics.bytes.WithLabelValues(p.id, "in").Add(float64(receipt.BytesIn))
	ps.metrics.dollars.WithLabelValues(p.id).Add(receipt.USD)
	if outcome == OutcomeFallback {
		ps.metrics.fallbacks.WithLabelValues(p.id, cause).Inc()
	}
	ps.receipts.add(receipt)
	ps.cfg.Log.Info("a forwarded request has ended", receipt.fields()...)
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.dropRemovedSeries(p)
}

// makeReceipt returns the receipt of a forward that ends now, without its outcome and cause. carrier is nil if nothing was done to send
// the request.
func (f *Forward) makeReceipt(carrier Carrier, now time.Time) *Receipt {
	p := f.peer
	receipt := &Receipt{At: f.decidedAt, RID: f.rid, Origin: f.peers.cfg.Self.ID, Peer: p.id, Model: f.model}
	receipt.Predicted.Terms, receipt.Predicted.LocalCost = f.predicted, f.localMs
	receipt.Actual.TotalMs, receipt.Actual.CachedTokens = ms(now.Sub(f.decidedAt)), f.cached
	if !f.firstAt.IsZero() { // the answer had begun
		receipt.Actual.TTFTMs = ms(f.firstAt.Sub(f.decidedAt))
	} else { // without an answer, the peer has reported no cached tokens
		receipt.Actual.CachedTokens = -1
	}
	if carrier != nil {
		receipt.BytesOut, receipt.BytesIn = carrier.Bytes()
	}
	receipt.USD = usd(receipt.BytesOut, receipt.BytesIn, p.conf.PriceOut, p.conf.PriceIn)
	return receipt
}

// updatePeer removes what the forward had booked on the peer, and judges the peer by the outcome. costUSD is what the bytes of the forward
// have cost; it is added to what the peer has cost today. bookForward has booked:
//
//   - unanswered requests of the peer, one per leg, whose number is bounded;
//   - a reservation (reserved) of the tokens that the peer must prefill, because the peer's last answer to a probe does not count them yet;
//   - the prompt's blocks (speculation), which count as cached at the peer from the decision on.
func (f *Forward) updatePeer(outcome, cause string, costUSD float64, now time.Time) {
	ps, p := f.peers, f.peer
	ps.mu.Lock()
	roomAgain := f.releaseUnanswered()
	defer f.unlockAndWake(roomAgain)
	delete(p.inflight, f)
	p.reserved.Withdraw(f.number) // no effect if the request was written: then an answer to a probe drops the reservation
	p.egress.add(costUSD, now)
	f.judgePeer(outcome, cause, now)
	p.prompts.Drop(&f.speculation) // no effect if AnswerBegun has confirmed it
}

// judgePeer updates, by the outcome of the forward, whether the peer counts as working: its circuit, which keeps requests from a peer after
// many failures, and its trust, which bounds its unanswered requests. cause says why the client got nothing from the peer; empty unless the
// outcome is OutcomeFallback. judgePeer is called with the lock of Peers held.
func (f *Forward) judgePeer(outcome, cause string, now time.Time) {
	ps, p := f.peers, f.peer
	clientMayBeCause := cause == RejectDeadline || cause == causeLarge
	if outcome == OutcomeFallback && !clientMayBeCause {
		// A sibling got the request because it decodes the model. It did not serve the request, so perhaps another proxy owns its
		// decode groups now. For a peer that is no sibling, this changes nothing.
		p.assumeNoGroups()
	}
	switch {
	case !f.firstAt.IsZero(), outcome == OutcomeRelayed: // the peer has begun to answer, or has judged the request
		p.circuit.Succeed()
	case outcome == OutcomeFallback && !slices.Contains(blameless, cause): // the peer has failed
		p.trust.Failed(ps.sinceStartMs(now))
		if p.circuit.Fail(f.number, now) { // this failure took the peer out of service: when the outage is over, the queue decides again
			ps.clock.After(p.circuit.OutageLength(), ps.cfg.Queue.Wake)
		}
	default: // the outcome does not show whether the peer works
		p.circuit.Neutral(f.number)
	}
}
