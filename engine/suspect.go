package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine/circuit"
)

// Verdict is what the end of a request says about its engine. If the request or its client caused the end, there is no verdict, and
// RecordOutcome is not called.
type Verdict uint8

// The verdicts, from which RecordOutcome decides whether the engine gets a canary or is taken out of service.
const (
	Served  Verdict = iota // the whole answer came, so the engine works
	Faulted                // the request failed, and the engine is at fault
	Silent                 // the engine sent nothing in time, so it may hang
	Unclear                // the request failed, and only a canary can show whether the engine is at fault
)

// RecordOutcome records how a request on an instance ended. After several failures in a row the instance gets no new requests until a
// canary passes. An instance that may hang gets a canary at once. RecordOutcome ignores failures of the proxy itself, instances to which an
// operator has stopped requests, and instances without canaries, whose callers detect failures in other ways.
func (m *Monitor) RecordOutcome(id string, v Verdict, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil && len(w.in.Canaries) > 0 && w.in.Held == nil && !isOwnFault(why) {
		w.recordOutcome(v, why)
	}
}

// maxAccused is the number of failed requests that are not judged yet (see Accuse) at which an instance gets no new requests. An engine
// that fails each request at once always has free slots, so without this bound it would get every request until the first accusation is
// settled.
const maxAccused = 3

// Accuse counts a failed request on an instance while it is not known whether the engine or the request is at fault. Once the caller
// knows, it must call closeAccusation, which takes the count back, and then RecordOutcome.
func (m *Monitor) Accuse(id string) (closeAccusation func()) {
	m.addAccusations(id, 1)
	return sync.OnceFunc(func() { m.addAccusations(id, -1) })
}

// addAccusations adds n to the accusations of an instance, and publishes whether the instance may get new requests.
func (m *Monitor) addAccusations(id string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || len(w.in.Canaries) == 0 { // an instance without canaries is no suspect (see RecordOutcome)
		return
	}
	s := &w.suspect
	s.openAccusations = max(0, s.openAccusations+n) // max is needed, because a restart sets the number to 0 before its accusations are settled
	w.setStatus(w.status)
}

var (
	errAccused = fmt.Errorf("%d requests failed there with 500; until another engine has answered one of them, it is open whether the engine "+
		"or the requests are at fault", maxAccused)
	errSilent = errors.New("its core gave no sign of life for so long that the KV of requests that wait there may be lost: there was no " +
		"event on any stream, and no gauge moved")
)

// accusedError returns why the engine should get no new requests for now; nil: it may get them. A request that failed there is an open
// accusation until its caller knows whether the engine or the request is at fault (see Accuse).
func (s *suspicion) accusedError() error {
	switch {
	case s.openAccusations >= maxAccused:
		return errAccused
	case !s.silentSince.IsZero(): // the core gives no sign of life while requests wait for their KV
		return errSilent
	}
	return nil
}

// checkSilence checks whether the engine's core gives signs of life while requests wait there for their KV. After too long a silence, the
// engine gets a canary, and no new requests until a sign comes or the canary passes. The caller holds m.mu.
func (w *watch) checkSilence(now time.Time) {
	if w.in.Held != nil { // an operator has stopped requests to the engine, so it gets no canary either
		return
	}
	s := &w.suspect
	isSilent := w.traffic.maxSilenceShare(now) > 1 // for some waiting request, the silence is longer than allowed
	wasSilent := !s.silentSince.IsZero()
	switch {
	case wasSilent && !isSilent && w.traffic.hasSignSince(s.silentSince):
		s.silentSince = time.Time{}
		w.m.cfg.Log.Info("an engine gives signs of life again", zap.String("engine", w.in.ID))
	case wasSilent && !isSilent: // no request waits any more, so only a canary can show whether the core works
		s.canaryPending = s.circuit.InService() // an engine that is out of service gets a canary anyway
	case !wasSilent && isSilent:
		s.silentSince = now
		s.canaryPending = s.circuit.InService()
		w.m.cfg.Log.Warn("an engine gets no new requests for a moment; a request of one token will tell whether it computes",
			zap.String("engine", w.in.ID), zap.Error(errSilent))
	}
}

// recordOutcome applies the verdict on a request to the suspicion of this instance. Served clears the suspicion. Faulted and Silent count
// as failures, and several in a row take the instance out of service. Silent and Unclear ask for a canary, which shows whether the engine
// computes. The caller holds m.mu.
func (w *watch) recordOutcome(v Verdict, why error) {
	now := time.Now()
	s := &w.suspect
	countsAsFailure := v == Faulted || v == Silent
	needsCanary := v == Silent || v == Unclear
	const noTrial = 0 // only canaries are trial requests of the circuit
	switch {
	case v == Served:
		s.circuit.Succeed()
		s.canaryPending, s.wedged = false, false
	case countsAsFailure && s.circuit.Fail(noTrial, now): // this failure took the instance out of service
		w.takeOut(outFailures, fmt.Errorf("%d requests in a row failed, the last: %w", circuit.Limit, why))
	case needsCanary && s.circuit.InService(): // out of service, it gets canaries anyway
		s.canaryPending = true
	}
	w.setStatus(w.status)
}

// Reasons why an instance was taken out of service, as values of a metric's label.
const (
	outFailures = "failures"
	outCanary   = "canary"
)

// takeOut records that the circuit has taken the instance out of service. reason is a label of the metric, why the error that caused it.
// The caller holds m.mu.
func (w *watch) takeOut(reason string, why error) {
	s := &w.suspect
	s.canaryPending = false // a canary that was pending because of a suspicion is not needed: from now on canaries are trials of the circuit
	s.outReason = why
	w.m.metrics.outages.WithLabelValues(w.in.ID, reason).Inc()
	message := "an engine is out of service although it answers its health check; requests of one token will tell when it works again"
	switch {
	case unreachable(why):
		message = "an engine is out of service, because it takes no connection"
	case w.failedChecks > 0:
		message = "an engine is out of service, because requests and its last health check failed"
	case w.m.cfg.Canary == 0: // no request of one token is sent
		message = "an engine is out of service although it answers its health check; it gets requests again after a while"
	}
	w.m.cfg.Log.Warn(message,
		zap.String("engine", w.in.ID), zap.Duration("after", s.circuit.OutageLength()), zap.Error(why))
}

// clearFailures clears the suspicion, for example after a restart of the engine. The caller holds m.mu.
func (w *watch) clearFailures() { w.suspect = suspicion{} }

// runCanaries sends the canaries of the instance at the times that nextCanary returns, until ctx ends. A send to canaryWake makes it ask
// nextCanary again, because a canary may be needed now.
func (w *watch) runCanaries(ctx context.Context) {
	timer := time.NewTimer(time.Hour) // the loop sets or stops it before it waits
	defer timer.Stop()
	for {
		next, isScheduled := w.nextCanary()
		if isScheduled {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.canaryWake:
		case <-timer.C:
			w.checkByCanaries(ctx)
		}
	}
}

// nextCanary returns when the next canary must be sent; isScheduled is false if none must be. An instance that is out of service gets one
// when its circuit allows a trial. An instance in service gets one only while canaryPending is set, because something made it a suspect:
// for example a request failed, or its gauges did not change. An instance that is down gets none, because its health checks will show when
// it is up again. An instance that gets no requests, because it is halted or an operator holds it, gets none either.
func (w *watch) nextCanary() (at time.Time, isScheduled bool) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	getsNoRequests := !w.status.Up || w.restrictions.haltReason != nil || w.in.Held != nil
	switch s := &w.suspect; {
	case w.removed || getsNoRequests:
		return time.Time{}, false
	case !s.circuit.InService(): // the canary is the trial of the circuit
		return s.circuit.TrialAt(), true
	default:
		return s.lastCanaryAt.Add(minCanaryInterval), s.canaryPending
	}
}

// minCanaryInterval is the least time between two canaries to an engine in service. It limits their cost: while a rank prefills a canary,
// all ranks of its group wait.
const minCanaryInterval = 5 * time.Second

const canaryID = 1 // the id of the canary for circuit.Circuit, which allows one trial request at a time

// checkByCanaries sends a canary to all ranks that are not lost, and updates the suspicion by its result.
func (w *watch) checkByCanaries(ctx context.Context) {
	w.m.mu.Lock()
	s, model := &w.suspect, w.status.baseModel()
	s.canaryPending, s.lastCanaryAt = false, time.Now()
	s.circuit.Send(canaryID, time.Now()) // if the engine is out of service, this canary is the trial
	eventsBefore := w.traffic.events.Load()
	ask := w.canaryRequestFor(model)
	ranks := slices.DeleteFunc(slices.Clone(w.in.Canaries), func(t *Target) bool { return w.status.Lacks(t.Rank) })
	w.m.mu.Unlock()

	outcome, err := canaryNotSent, error(nil)
	if limit := w.m.cfg.Canary; limit > 0 && model != "" {
		outcome, err = canaryPassed, w.sendCanaries(ctx, ranks, ask, limit)
	}
	if ctx.Err() != nil { // the watch was stopped, which may be the cause of failures
		return
	}
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded) && w.traffic.events.Load() != eventsBefore:
		outcome = canaryVouched // streams sent tokens meanwhile, so the engine computes, but its batch was full
	default:
		outcome = canaryFailed
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if !w.removed {
		applyCanary(w, outcome, err)
	}
}

// applyCanary updates the suspicion by the result of a canary, and publishes it. A refusal, or a fault of the proxy itself, says nothing
// about the suspicion. Otherwise, a failed canary takes the engine out of service, and every other outcome brings it back: the canary
// passed, or streams sent tokens while it waited (canaryVouched), or it was not sent, because then no canary would ever bring the engine
// back. The caller holds m.mu.
func applyCanary(w *watch, outcome string, err error) {
	s := &w.suspect
	if IsRefusal(err) { // the engine or a rank refuses requests, which does not mean that it is broken
		w.recordRefusal(err)
		return
	}
	if isOwnFault(err) { // the proxy could not send the canary
		scheduleNextCanary(w)
		return
	}
	if outcome != canaryNotSent {
		w.m.metrics.canaries.WithLabelValues(w.in.ID, outcome).Inc()
	}
	// A canary that was not sent proves nothing, but if no request waits any more and no canary is sent, the suspicion of silence might
	// never end. A vouched canary needs nothing here: streams sent tokens, which are signs of life, and checkSilence ends the suspicion
	// by them. In any case the silence must be over: no rank has been silent for longer than its waiting requests allow (a share of 1).
	mayEndSilence := outcome == canaryPassed || outcome == canaryNotSent
	if mayEndSilence && w.traffic.maxSilenceShare(time.Now()) <= 1 {
		s.silentSince = time.Time{}
	}
	switch outOfService := !s.circuit.InService(); {
	case outcome == canaryFailed:
		s.circuit.Trip(time.Now())
		s.wedged = true
		w.takeOut(outCanary, err)
	case outOfService:
		s.circuit.ReturnToService() // one token proves less than a served request, so the next outage lasts twice as long
		s.wedged = false
		w.m.cfg.Log.Info("an engine is back in service", zap.String("engine", w.in.ID), zap.String("canary", outcome))
	}
	w.setStatus(w.status)
}

// scheduleNextCanary makes runCanaries send another canary after a while. For an engine in service, canaryPending asks for it. Out of
// service, canaries are the trials of the circuit, and Trip sets the time of the next one. The caller holds m.mu.
func scheduleNextCanary(w *watch) {
	s := &w.suspect
	if s.circuit.InService() {
		s.canaryPending = true
	} else {
		s.canaryPending = false
		s.circuit.Trip(time.Now())
	}
	w.setStatus(w.status)
}
