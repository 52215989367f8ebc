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

// defaultHold is how long an engine holds a hand-off if its profile does not say: the longest time
// of all known engines, so that KV never counts as free too early.
const defaultHold = 480 * time.Second

// Usage is the token counts in an engine's answer to a probe.
type Usage = cache.Usage

// MarkSent is for a lease whose decode rank is chosen before the prefill: the probe is sent now.
func (l *Lease) MarkSent() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	l.inFlight.MarkSent(s.now)
}

// Answered notes that the engine answered the probe with a hand-off, which brings the candidate's
// circuit back into service. expires is when the engine frees the KV blocks by itself: its hold
// timeout after the response headers; zero: the profile's timeout from now.
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

// bookAnswer does the work of Answered under the scheduler's lock. nil: the suspicion about the KV
// capacity stays.
func (l *Lease) bookAnswer(u Usage, expires time.Time) *cache.SuspicionChange {
	s := l.scheduler
	if !l.inFlight.CheckAnswerable() { // a bug, which is counted
		return nil
	}
	if expires.IsZero() {
		expires = s.now.Add(l.holdTimeout())
	}
	if u.PromptTokens > 0 && u.CachedTokens > u.PromptTokens {
		u.CachedTokens = -1 // no more than the prompt can be cached, so the count is wrong
	}
	kvTokens := l.inFlight.Weight.Tokens // counted or estimated before
	if u.PromptTokens > 0 {
		kvTokens = int64(u.PromptTokens)
	}

	l.recordProbeEnd(probeAnswered)
	l.chargedTo.circuit.Succeed()
	l.chargedTo.lastFault = ""

	if m := s.models[l.model]; m != nil { // nil: no candidate serves the model any more
		m.throughput.Answered(s.now, float64(s.now.Sub(l.inFlight.Sent()))/float64(time.Millisecond))
	}
	l.learnPrefillTime(u)
	hitVerdict := l.predictedHit.Answered(u, l.chargedTo.load.Capacity(), l.chargedTo.blockTokens(), s.now)
	s.metrics.observeHitError(hitVerdict)

	l.inFlight.Answer(kvTokens, expires, s.now)
	return hitVerdict.Suspected
}

// learnPrefillTime learns times without the round trip, because engines of one kind may be at
// different distances. prefillEndMs adds it again.
func (l *Lease) learnPrefillTime(u Usage) {
	s := l.scheduler
	// The timer sees by it whether this probe has overtaken an older one: it then cannot be measured.
	oldestUnanswered := l.chargedTo.load.NextSent(&l.inFlight) // of the other probes
	for _, sample := range l.chargedTo.computeTimer.Answered(l.timedAnswer(u), oldestUnanswered, s.now) {
		s.fit.Learn(l.model, l.chargedTo.Hardware, sample)
		if sample.Predicted > 0 { // 0: no prediction
			l.chargedTo.residual.Add(sample.Ms, sample.Predicted, s.now)
		}
	}
}

// timedAnswer yields no sample (Unusable) if other proxies or clients had prompts on the engine
// when this prompt was charged, or have some now, because their part of the time is not known.
func (l *Lease) timedAnswer(u Usage) fit.Answer {
	c, now := l.chargedTo, l.scheduler.now
	hitTokens := l.inFlight.Weight.Tokens - l.inFlight.Weight.NewTokens // predicted
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

// Dispatched notes that the request was sent to a decode rank. It may be called again for another
// rank.
func (l *Lease) Dispatched() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	l.inFlight.Dispatch(s.now)
}

// Failed notes that the probe failed by a fault of the candidate. written says that the request was
// written and no answer came. The engine may then hold the KV, so that the prompt stays charged for
// the time hold (0: the profile's timeout). written is false if the connection was refused or any
// answer came, even an unusable one.
func (l *Lease) Failed(written bool, hold time.Duration) {
	s := l.scheduler
	s.lock()
	outFor := l.bookFailure(written, hold)
	s.unlock()
	if outFor > 0 {
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

const maxFaultBytes = 400

// bookFailure does the work of Failed under the scheduler's lock. outFor is the time for which this
// failure opened the circuit; 0: it did not.
func (l *Lease) bookFailure(written bool, hold time.Duration) (outFor time.Duration) {
	s := l.scheduler
	if !l.inFlight.ClaimEnd() { // the charge has expired or was ended before
		return 0
	}
	if l.inFlight.Phase() != ledger.Probing { // answered before: the candidate did not fail, and holds the KV
		l.inFlight.Orphan(l.holdTimeout(), s.now)
		return 0
	}
	wasInService := l.chargedTo.circuit.InService()
	if l.chargedTo.circuit.Fail(l.number, s.now) && wasInService { // a failed trial only prolongs the outage
		outFor = l.chargedTo.circuit.OutageLength()
	}
	if written {
		l.recordProbeEnd(probeLost)
		l.predictedHit.OutcomeUnknown(s.now)
		if hold <= 0 {
			hold = l.holdTimeout()
		}
		l.inFlight.Orphan(hold, s.now)
	} else { // nothing was computed
		l.recordProbeEnd(probeFailed)
		l.predictedHit.NotRun()
		l.endCharge()
	}
	return outFor
}

// Orphan notes that no decode engine will fetch the KV. The prompt stays charged until the engine
// frees the KV by itself.
func (l *Lease) Orphan() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	if !l.inFlight.ClaimEnd() {
		return
	}
	if l.inFlight.Phase() == ledger.Probing { // it is not known what the engine has computed
		l.recordProbeEnd(probeLost)
		l.predictedHit.OutcomeUnknown(s.now)
		l.chargedTo.circuit.Neutral(l.number)
	}
	l.inFlight.Orphan(l.holdTimeout(), s.now)
}

// Release notes that the prefill engine has freed the KV: the first decode event came, the hand-off
// was discarded, or the probe ended without a hand-off because the client left or the engine
// refused the request.
func (l *Lease) Release() {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	if !l.inFlight.ClaimEnd() {
		return
	}
	if l.inFlight.Phase() == ledger.Probing { // by no fault of the engine
		l.recordProbeEnd(probeDropped)
		l.predictedHit.NotRun()
		l.chargedTo.circuit.Neutral(l.number)
	}
	l.endCharge()
}

func (l *Lease) endCharge() {
	l.inFlight.Release(l.scheduler.now)
	l.scheduler.dropIfUnused(l.chargedTo)
}

// DetachOwner makes other code responsible for the last call (Release, Orphan or Failed).
func (l *Lease) DetachOwner() {
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.inFlight.DetachOwner()
}

// Ended notes that an owner makes no more calls. Leases that it still holds stay charged, because
// the engine may still hold the KV, and count as drift in the audit.
func (s *Scheduler) Ended(o *LeaseOwner) {
	s.mu.Lock()
	lost := s.ledger.OwnerEnded(o)
	s.mu.Unlock()
	if lost > 0 {
		s.cfg.Log.Error("a request ended without giving back its place on a prefill engine; this is a bug, please report it",
			zap.Int("leases", lost))
	}
}

// recordProbeEnd also stops the learning from probes that waited for one that was sent and not
// answered.
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
	if !sent.IsZero() { // the probe was never sent
		l.chargedTo.computeTimer.ProbeDropped(l.scheduler.now)
		m.probeSeconds.WithLabelValues(l.chargedTo.ID, outcome).Observe(seconds)
	}
	m.attempts.WithLabelValues(outcome).Inc()
}

// holdTimeout is how long the engine holds a hand-off that no decode engine fetches.
func (l *Lease) holdTimeout() time.Duration {
	if p := l.Candidate.Profile; p != nil && p.KVHoldTimeout > 0 {
		return p.KVHoldTimeout
	}
	return defaultHold
}
