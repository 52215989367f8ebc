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

// AbortByClient records that the client has left, and closes the connection at once, so that the
// peer notices. It never blocks.
func (f *Forward) AbortByClient() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clientLeft = true
	if f.carrier != nil {
		f.carrier.Abort()
	}
}

// DropUnsent takes back what the forward had booked.
func (f *Forward) DropUnsent() { f.End(OutcomeGone) }

// End ends a forward whose client got an answer or left. Only the first call of DropUnsent, End and
// Fail has an effect.
func (f *Forward) End(outcome string) { f.end(outcome, "") }

// Fail ends a forward of which the client got nothing, and returns how to continue.
func (f *Forward) Fail(err error) *Failure {
	fail := f.classifyFailure(err)
	fail.Sibling = f.peer.sibling
	f.end(fail.outcome(), fail.Reason)
	return fail
}

// RejectedError takes the value of RejectHeader.
func RejectedError(reason string) error {
	return &refusedError{status: http.StatusServiceUnavailable, reject: reason}
}

// abandon does nothing if the client has a part of the answer or has left.
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

// SetCarrier sets what is aborted when the client leaves or the peer is lost. Without Send, the
// caller must call Written and AnswerBegun, and end the forward once by Fail or End.
func (f *Forward) SetCarrier(carrier Carrier) (mayStart bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.carrier = carrier
	return !f.clientLeft && f.abandonCause == ""
}

// Written records the write: the answer to any later probe counts the request.
func (f *Forward) Written() {
	ps := f.peers
	ps.mu.Lock()
	defer ps.mu.Unlock()
	f.peer.reserved.MarkWritten(f.number, ps.sinceStartMs(ps.clock.Now()))
}

// AnswerBegun records that the client gets the begin of the answer, so that the request cannot be
// served elsewhere any more. whole: the answer is no stream, and does not show when the first token
// was ready. cached is what the peer found in a cache; -1: not known.
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

// The lock of Peers is held.
func learnTimes(f *Forward, whole bool) {
	ps, p := f.peers, f.peer
	nowMs, tookMs, predictedMs := ps.sinceStartMs(f.firstAt), ms(f.firstAt.Sub(f.decidedAt)), f.predicted.TTFT()
	if whole { // the time of the whole answer is not that of the first token
		p.trust.WholeAnswer(nowMs)
		return
	}
	p.trust.FirstEvent(nowMs, tookMs, predictedMs)
	if predictedMs > 0 {
		p.distrust.Add(nowMs, tookMs-predictedMs)
		p.residual.Add(tookMs, f.predicted.WithoutResidual(), f.firstAt)
		ps.metrics.costError.WithLabelValues(p.id).Observe((tookMs - predictedMs) / 1000)
	}
}

// learnCached: the peer may have found less in its cache than predicted. Now it has computed the
// whole prompt. The lock of Peers is held.
func learnCached(f *Forward) {
	p := f.peer
	// By at least one block; cached below 0 is not known.
	overPredicted := f.cached >= 0 && float64(f.hitTokens-f.cached) >= f.blockTokens
	if overPredicted && len(f.prompt.Keys) > 0 {
		p.prompts.Correct(p.indexSlot, f.prompt.Keys, int(float64(f.cached)/f.blockTokens))
	}
	p.prompts.Confirm(&f.speculation)
}

// startUnansweredTimer is for an answer that is no stream: the request counts as unanswered only
// until a first event would be late. Otherwise a peer with a small window would get no other
// request meanwhile. limit bounds the timer, because the peer's numbers may predict any time.
func (f *Forward) startUnansweredTimer(limit time.Duration) (stop func() bool) {
	lateMs := min(policy.LateMs(f.predicted.TTFT()), ms(limit))
	return f.peers.clock.After(time.Duration(lateMs*float64(time.Millisecond)), func() {
		f.peers.mu.Lock() // unlockAndWake unlocks it
		f.unlockAndWake(f.releaseUnanswered())
	})
}

// releaseUnanswered reports whether the peer's window was full, so that it has room again. The lock
// of Peers is held.
func (f *Forward) releaseUnanswered() (wasFull bool) {
	ps, p := f.peers, f.peer
	wasFull = f.unansweredCount > 0 && p.unanswered >= p.trust.Window(ps.sinceStartMs(ps.clock.Now()))
	p.unanswered -= f.unansweredCount
	f.unansweredCount = 0
	return wasFull
}

// unlockAndWake releases the lock of Peers first: Wake takes the scheduler's lock, under which a
// RoutingQuery takes that of Peers.
func (f *Forward) unlockAndWake(roomAgain bool) {
	f.peers.mu.Unlock()
	if roomAgain {
		f.peers.cfg.Queue.Wake()
	}
}

// classifyFailure takes the first case that applies. MayHaveRun is false only if the client has
// left, if the peer has refused the request, or if the call's error shows that it was not sent.
func (f *Forward) classifyFailure(err error) *Failure {
	f.mu.Lock()
	defer f.mu.Unlock()
	var callErr *engine.Error
	var refusal *refusedError
	isCall := errors.As(err, &callErr)
	// A slow connect counts as causeDial.
	callTooLong := isCall && callErr.Timeout && callErr.Phase != engine.PhaseConnect
	tooLate := callTooLong || errors.Is(err, errLate) || errors.Is(err, sse.ErrSilent)
	switch {
	case f.clientLeft:
		return &Failure{ClientLeft: true, Err: err}
	case f.abandonCause != "": // err is only a consequence; the peer may be working
		return &Failure{Reason: f.abandonCause, MayHaveRun: true, Err: err}
	case errors.As(err, &refusal):
		switch {
		case refusal.relay != nil: // no other proxy could answer better
			return &Failure{Relay: refusal.relay, Err: err}
		case slices.Contains(causes, refusal.reject): // metrics need a known reason
			return &Failure{Reason: refusal.reject, Err: err}
		}
		return &Failure{Reason: causeStatus, Err: err}
	case isCall && callErr.Phase == engine.PhaseRequest: // before anything was sent
		return &Failure{Reason: causeUnfit, Err: err}
	case errors.Is(err, engine.ErrTooLarge): // it has begun to answer, so it has the request
		return &Failure{Reason: causeLarge, MayHaveRun: true, Err: err}
	case f.clientDeadline && tooLate: // no fault of the peer
		return &Failure{Reason: RejectDeadline, MayHaveRun: true, Err: err}
	case tooLate: // the limit of this proxy
		return &Failure{Reason: causeTimeout, MayHaveRun: true, Err: err}
	case isCall && callErr.Phase == engine.PhaseConnect: // nothing was sent
		return &Failure{Reason: causeDial, Err: err}
	}
	// An error that is not the call's is about the answer, so the request was sent.
	return &Failure{Reason: causeBroken, MayHaveRun: !isCall || callErr.Sent, Err: err}
}

func (fail *Failure) outcome() string {
	switch {
	case fail.ClientLeft:
		return OutcomeGone
	case fail.Relay != nil:
		return OutcomeRelayed
	}
	return OutcomeFallback
}

// end acts only the first time.
func (f *Forward) end(outcome, cause string) {
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		return
	}
	f.ended = true
	carrier := f.carrier // nil: the request was not sent
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

func (f *Forward) makeReceipt(carrier Carrier, now time.Time) *Receipt {
	p := f.peer
	receipt := &Receipt{At: f.decidedAt, RID: f.rid, Origin: f.peers.cfg.Self.ID, Peer: p.id, Model: f.model}
	receipt.Predicted.Terms, receipt.Predicted.LocalCost = f.predicted, f.localMs
	receipt.Actual.TotalMs, receipt.Actual.CachedTokens = ms(now.Sub(f.decidedAt)), f.cached
	if !f.firstAt.IsZero() {
		receipt.Actual.TTFTMs = ms(f.firstAt.Sub(f.decidedAt))
	} else {
		receipt.Actual.CachedTokens = -1
	}
	if carrier != nil {
		receipt.BytesOut, receipt.BytesIn = carrier.Bytes()
	}
	receipt.USD = usd(receipt.BytesOut, receipt.BytesIn, p.conf.PriceOut, p.conf.PriceIn)
	return receipt
}

// updatePeer removes what bookForward has booked: unanswered requests, the reservation, and the
// speculation on cached blocks.
func (f *Forward) updatePeer(outcome, cause string, costUSD float64, now time.Time) {
	ps, p := f.peers, f.peer
	ps.mu.Lock()
	roomAgain := f.releaseUnanswered()
	defer f.unlockAndWake(roomAgain)
	delete(p.inflight, f)
	// This has no effect after a write: then an answer to a probe drops the reservation.
	p.reserved.Withdraw(f.number)
	p.egress.add(costUSD, now)
	f.judgePeer(outcome, cause, now)
	p.prompts.Drop(&f.speculation) // no effect after AnswerBegun
}

// judgePeer updates the circuit, which keeps requests from a peer after many failures, and the
// trust, which bounds its unanswered requests. The lock of Peers is held.
func (f *Forward) judgePeer(outcome, cause string, now time.Time) {
	ps, p := f.peers, f.peer
	clientMayBeCause := cause == RejectDeadline || cause == causeLarge
	if outcome == OutcomeFallback && !clientMayBeCause {
		// A sibling that did not serve the request perhaps does not own its decode groups now.
		p.assumeNoGroups()
	}
	switch {
	case !f.firstAt.IsZero(), outcome == OutcomeRelayed: // it has answered or judged the request
		p.circuit.Succeed()
	case outcome == OutcomeFallback && !slices.Contains(blameless, cause):
		p.trust.Failed(ps.sinceStartMs(now))
		// The peer is out of service. When that is over, the queue decides again.
		if p.circuit.Fail(f.number, now) {
			ps.clock.After(p.circuit.OutageLength(), ps.cfg.Queue.Wake)
		}
	default: // it is not shown whether the peer works
		p.circuit.Neutral(f.number)
	}
}
