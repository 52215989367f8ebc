package prefill

import (
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine/circuit"
	"evenkeel/prefill/cache"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/ledger"
)

// defaultHold is how long an engine holds a hand-off if its profile does not say: the longest time of all known engines, so
// that KV never counts as free too early.
const defaultHold = 480 * time.Second

// Usage is the token counts in an engine's answer to a probe.
type Usage = cache.Usage

// MarkSent notes that the probe, which is the call that makes the engine compute the prompt, is sent now. It is used for a lease whose
// decode rank is chosen before the prefill.
func (l *Lease) MarkSent() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	l.inFlight.MarkSent(s.now)
}

// Answered notes that the engine answered the probe with a hand-off. The answer brings the candidate's circuit back into
// service, and prefill times and the content of the prefix cache are learned from it. expires is when the engine frees the KV
// blocks by itself: its hold timeout after the response headers; zero: the profile's timeout from now. If predicted cache hits are wrong
// too often, the candidate's prefix cache is suspected to hold less or more than its capacity says, which Answered logs.
func (l *Lease) Answered(u Usage, expires time.Time) {
	s := l.scheduler
	s.lock()
	wasOut := !l.chargedTo.circuit.InService()
	suspicion := l.bookAnswer(u, expires)
	cameBack := wasOut && l.chargedTo.circuit.InService()
	s.unlock()
	if suspicion != nil { // it has begun, or has ended
		logSuspicion(s.cfg.Log, l.Candidate.ID, suspicion)
	}
	if cameBack {
		s.cfg.Log.Info("a prefill engine is back, because it answered a probe", zap.String("candidate", l.Candidate.ID))
	}
}

// bookAnswer does the work of Answered under the scheduler's lock. The engine's counts also show how good the predicted cache hit was. If
// this begins or ends the suspicion that the candidate has another KV capacity than it reports, bookAnswer returns this change, and
// otherwise nil.
func (l *Lease) bookAnswer(u Usage, expires time.Time) *cache.SuspicionChange {
	s := l.scheduler
	if !l.inFlight.CheckAnswerable() { // the probe was not sent, or was answered or ended before: this call is a bug, which is counted
		return nil
	}
	if expires.IsZero() {
		expires = s.now.Add(l.holdTimeout())
	}
	if u.PromptTokens > 0 && u.CachedTokens > u.PromptTokens {
		u.CachedTokens = -1 // no more than the prompt can be cached, so the count is wrong
	}
	kvTokens := l.inFlight.Weight.Tokens // counted or estimated before; replaced if the engine reports its own count
	if u.PromptTokens > 0 {
		kvTokens = int64(u.PromptTokens)
	}

	// The engine works.
	l.recordProbeEnd(probeAnswered)
	l.chargedTo.circuit.Succeed()
	l.chargedTo.lastFault = ""

	// Learn from the answer.
	if m := s.models[l.model]; m != nil { // nil: no candidate serves the model any more
		m.throughput.Answered(s.now, float64(s.now.Sub(l.inFlight.Sent()))/float64(time.Millisecond))
	}
	l.learnPrefillTime(u)
	hitVerdict := l.predictedHit.Answered(u, l.chargedTo.load.Capacity(), l.chargedTo.blockTokens(), s.now)
	s.metrics.observeHitError(hitVerdict)

	// The engine holds the prompt's KV from now on.
	l.inFlight.Answer(kvTokens, expires, s.now)
	return hitVerdict.Suspected
}

// learnPrefillTime learns prefill times from a probe's answer. The candidate's computeTimer turns answers into times without the wait for
// other prompts and without the round trip to the engine. Engines of one kind may be at different distances, so prefillEndMs adds the round
// trip again. An engine may compute several prompts in one step. The timer collects their answers into one sample, and returns it with
// the first answer of another step, or once no probe is unanswered.
func (l *Lease) learnPrefillTime(u Usage) {
	s := l.scheduler
	// The timer also sees by oldestUnanswered whether the engine has answered this probe before an older one: it then cannot be
	// measured.
	oldestUnanswered := l.chargedTo.load.NextSent(&l.inFlight) // when the oldest of the other probes was sent; zero: all are answered
	for _, sample := range l.chargedTo.computeTimer.Answered(l.timedAnswer(u), oldestUnanswered, s.now) {
		s.fit.Learn(l.model, l.chargedTo.Hardware, sample)
		if sample.Predicted > 0 { // 0: there was no prediction, and so no error, which residual averages
			l.chargedTo.residual.Add(sample.Ms, sample.Predicted, s.now)
		}
	}
}

// timedAnswer returns a probe's answer for computeTimer. It yields no sample (Unusable) if it has no token counts, or if the candidate is a
// group of ranks that also decode (Aggregated). It yields none either if the engine had prompts of other proxies or clients when the prompt
// was charged, or has some now, because their part of the time is not known.
func (l *Lease) timedAnswer(u Usage) fit.Answer {
	c, now := l.chargedTo, l.scheduler.now
	hitTokens := l.inFlight.Weight.Tokens - l.inFlight.Weight.NewTokens // predicted hit; replaced below if the engine reports its own count
	if u.CachedTokens >= 0 {
		hitTokens = int64(u.CachedTokens)
	}
	return fit.Answer{
		Sent: l.inFlight.Sent(), RTT: c.rtt(),
		Unusable: u.PromptTokens <= 0 || c.Aggregated || l.hadOthersPrompts || c.load.HasOthersPrompts(c.Decodes, now),
		Sample: fit.Sample{New: float64(int64(u.PromptTokens) - hitTokens), Hit: float64(hitTokens),
			Concurrent: c.concurrentRequests(now), Predicted: l.predictedMs},
	}
}

// logSuspicion logs a change of the suspicion about a candidate's capacity: a warning when it begins, an info line when it ends.
func logSuspicion(log *zap.Logger, candidate string, s *cache.SuspicionChange) {
	log = log.With(zap.String("candidate", candidate), zap.Int64("capacity_tokens", s.CapacityTokens),
		zap.Float64("over_predicted_share", s.Over), zap.Float64("under_predicted_share", s.Under))
	switch s.Suspicion {
	case cache.HoldsLess:
		log.Warn("a prefill engine's prefix cache holds less than its capacity says; set kv_tokens_per_rank in its profile to what it has, or " +
			"find out who else uses the engine")
	case cache.HoldsMore:
		log.Warn("a prefill engine's prefix cache holds more than its capacity says; set kv_tokens_per_rank in its profile to what it has")
	default:
		log.Info("a prefill engine's prefix cache holds as much as its capacity says")
	}
}

// Dispatched notes that the request was sent to a decode rank, which fetches the KV. It may be called again for another rank.
func (l *Lease) Dispatched() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	l.inFlight.Dispatch(s.now)
}

// Failed notes that the probe failed by a fault of the candidate. written says that the request was written and no answer came.
// The engine may then have computed the prompt and hold its KV, so that the prompt stays charged for the time hold (0: the
// profile's timeout). written is false if the connection was refused or any answer came, even an unusable one.
func (l *Lease) Failed(written bool, hold time.Duration) {
	s := l.scheduler
	s.lock()
	outFor := l.bookFailure(written, hold)
	s.unlock()
	if outFor > 0 { // this failure took the candidate out of service
		s.cfg.Log.Warn("a prefill engine is out after failures in a row; one probe at a time tries it until it answers one",
			zap.String("candidate", l.Candidate.ID), zap.Int("failures", circuit.Limit), zap.Duration("first_trial_in", outFor))
	}
}

// Blame records a description of the fault, for status. It must be called before Failed.
func (l *Lease) Blame(why string) {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	l.chargedTo.lastFault = strings.ToValidUTF8(why[:min(len(why), maxFaultBytes)], "\uFFFD") // the cut may be inside a character
}

// maxFaultBytes bounds the recorded description of a fault.
const maxFaultBytes = 400

// bookFailure does the work of Failed under the scheduler's lock. If the request was written, the engine may hold the prompt's KV for the
// time hold (0: the profile's timeout). The charge is then orphaned, which means that it stays until the engine must have freed the KV.
// outFor is the time for which this failure opened the candidate's circuit; 0: it did not, or the circuit was open already.
func (l *Lease) bookFailure(written bool, hold time.Duration) (outFor time.Duration) {
	s := l.scheduler
	if !l.inFlight.ClaimEnd() { // the charge has expired or was ended before
		return 0
	}
	if l.inFlight.Phase() != ledger.Probing { // the probe was answered before: the candidate did not fail, and holds the KV
		l.inFlight.Orphan(l.holdTimeout(), s.now)
		return 0
	}
	wasInService := l.chargedTo.circuit.InService()
	if l.chargedTo.circuit.Fail(l.number, s.now) && wasInService { // not for a failed trial, which only prolongs the outage
		outFor = l.chargedTo.circuit.OutageLength()
	}
	if written { // the engine may have computed the prompt and hold its KV
		l.recordProbeEnd(probeLost)
		l.predictedHit.OutcomeUnknown(s.now)
		if hold <= 0 {
			hold = l.holdTimeout()
		}
		l.inFlight.Orphan(hold, s.now)
	} else { // the engine has computed nothing, and holds no KV
		l.recordProbeEnd(probeFailed)
		l.predictedHit.NotRun()
		l.endCharge()
	}
	return outFor
}

// Orphan notes that no decode engine will fetch the KV. The prompt stays charged until the engine frees the KV by itself.
func (l *Lease) Orphan() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	if !l.inFlight.ClaimEnd() { // the charge has expired or was ended before
		return
	}
	if l.inFlight.Phase() == ledger.Probing { // the probe has no answer, and it is not known what the engine has computed
		l.recordProbeEnd(probeLost)
		l.predictedHit.OutcomeUnknown(s.now)
		l.chargedTo.circuit.Neutral(l.number)
	}
	l.inFlight.Orphan(l.holdTimeout(), s.now)
}

// Release notes that the prefill engine has freed the KV. The first decode event came, the hand-off was discarded, or the probe ended
// without a hand-off because the client left or the engine refused the request. It ends the charge, by which the prompt counts in the
// candidate's load. If the probe has no answer, Release also takes back what was expected of it: the prefix index forgets the blocks that
// the prefill would have left in the engine's cache, and the circuit counts neither a success nor a failure.
func (l *Lease) Release() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	if !l.inFlight.ClaimEnd() { // the charge has expired or was ended before
		return
	}
	if l.inFlight.Phase() == ledger.Probing { // the probe ended without a hand-off, by no fault of the engine
		l.recordProbeEnd(probeDropped)
		l.predictedHit.NotRun()
		l.chargedTo.circuit.Neutral(l.number)
	}
	l.endCharge()
}

// endCharge ends the charge. If the candidate was removed from the configuration and this was its last charge, endCharge drops
// the candidate.
func (l *Lease) endCharge() {
	l.inFlight.Release(l.scheduler.now)
	l.scheduler.dropIfUnused(l.chargedTo)
}

// DetachOwner separates the lease from its owner: from now on other code is responsible for the last call (Release, Orphan or
// Failed).
func (l *Lease) DetachOwner() {
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.inFlight.DetachOwner()
}

// Ended notes that an owner makes no more calls. Leases that it still holds stay charged, because the engine may still hold
// the KV, and count as drift in the audit.
func (s *Scheduler) Ended(o *LeaseOwner) {
	s.mu.Lock()
	lost := s.ledger.OwnerEnded(o)
	s.mu.Unlock()
	if lost > 0 {
		s.cfg.Log.Error("a request ended without giving back its place on a prefill engine; this is a bug, please report it",
			zap.Int("leases", lost))
	}
}

// recordProbeEnd records in the metrics how the probe ended and how long it took. If a probe was sent and not answered, the prefill
// times of the probes that waited meanwhile are not learned.
func (l *Lease) recordProbeEnd(outcome string) {
	m, sent := l.scheduler.metrics, l.inFlight.Sent()
	seconds := l.scheduler.now.Sub(sent).Seconds()
	if l.canary {
		m.canaries.WithLabelValues(l.chargedTo.ID, outcome).Inc()
	}
	if outcome == probeAnswered { // nearly all probes end so, and both series are looked up only once
		if l.chargedTo.answeredSeconds == nil {
			l.chargedTo.answeredSeconds = m.probeSeconds.WithLabelValues(l.chargedTo.ID, probeAnswered)
		}
		l.chargedTo.answeredSeconds.Observe(seconds)
		m.answered.Inc()
		return
	}
	if !sent.IsZero() { // zero: the probe was never sent, so that it took no time
		l.chargedTo.computeTimer.ProbeDropped(l.scheduler.now)
		m.probeSeconds.WithLabelValues(l.chargedTo.ID, outcome).Observe(seconds)
	}
	m.attempts.WithLabelValues(outcome).Inc()
}

// holdTimeout is how long the engine holds a hand-off that no decode engine fetches, as its profile says; defaultHold if the
// profile does not say.
func (l *Lease) holdTimeout() time.Duration {
	if p := l.Candidate.Profile; p != nil && p.KVHoldTimeout > 0 {
		return p.KVHoldTimeout
	}
	return defaultHold
}
