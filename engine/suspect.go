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

// Verdict is what the end of a request says about its engine. An end that the request or its client caused says
// nothing, and is not passed to Judge.
type Verdict uint8

// The verdicts.
const (
	Served  Verdict = iota // the whole answer came
	Faulted                // the engine failed the request
	Silent                 // nothing came in time, at first or within the answer: the engine may be wedged
	Unclear                // the request failed by the engine's fault or by its own: only the canary can show which
)

// Judge takes how a request on an instance ended. An instance that failed several in a row gets no more until the
// canary passes. An instance that may be wedged gets a canary at once. An instance without canaries is not judged,
// because its caller has other means. The monitor does not touch running requests, or what is charged for them.
func (m *Monitor) Judge(id string, v Verdict, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil && len(w.in.Canaries) > 0 && w.in.Held == nil {
		w.judge(v, why)
	}
}

// maxAccused is how many failures whose fault is open an instance may have until it gets no new requests. An engine
// that fails requests at once is always free, and would get every request until the first failed one was answered by
// another engine.
const maxAccused = 3

// Accuse counts a failure against an instance that may be the request's own fault. Once it is known whose fault it
// was, settle must be called, and then Judge.
func (m *Monitor) Accuse(id string) (settle func()) {
	m.accused(id, 1)
	return sync.OnceFunc(func() { m.accused(id, -1) })
}

// accused adds n to the failures of an instance that may be the request's own fault, and publishes whether the instance
// gets new requests.
func (m *Monitor) accused(id string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || len(w.in.Canaries) == 0 {
		return
	}
	s := &w.suspect
	s.accused = max(0, s.accused+n) // a restart forgives the accusations before it, so this may be below 0
	next := w.status
	next.Accused = s.accusation()
	w.setStatus(next)
}

var (
	errAccused = fmt.Errorf("%d requests failed there with 500; until another engine has answered one of them, it is open whether the engine "+
		"or the requests are at fault", maxAccused)
	errQuiet = errors.New("its core gave no sign of life for so long that the KV of requests that wait there may be lost: there was no " +
		"event on any stream, and no gauge moved")
)

// accusation is the reason why the engine should get no new requests for a moment; nil: there is none.
func (s *suspicion) accusation() error {
	switch {
	case s.accused >= maxAccused:
		return errAccused
	case !s.quiet.IsZero():
		return errQuiet
	}
	return nil
}

// listen checks whether the core of an engine on which requests wait for KV gives signs of life. It needs m.mu.
func (w *watch) listen(now time.Time) {
	if w.in.Held != nil {
		return
	}
	s := &w.suspect
	switch quiet := w.traffic.quiet(now) > 1; {
	case !s.quiet.IsZero() && !quiet && w.traffic.seenSince(s.quiet):
		s.quiet = time.Time{}
		w.m.cfg.Log.Info("an engine gives signs of life again", zap.String("engine", w.in.ID))
	case !s.quiet.IsZero() && !quiet: // no request waits there any more, so only the canary can show it
		s.doubted = s.circuit.In()
	case s.quiet.IsZero() && quiet:
		s.quiet = now
		s.doubted = s.circuit.In()
		w.m.cfg.Log.Warn("an engine gets no new requests for a moment; a request of one token will tell whether it computes",
			zap.String("engine", w.in.ID), zap.Error(errQuiet))
	}
}

// judge is Judge for one instance; m.mu must be held.
func (w *watch) judge(v Verdict, why error) {
	now := time.Now()
	s := &w.suspect
	switch {
	case v == Served:
		s.circuit.Succeed()
		s.doubted, s.wedged = false, false
	case v != Unclear && s.circuit.Fail(0, now):
		w.takeOut(outFailures, fmt.Errorf("%d requests in a row failed, the last: %w", circuit.Limit, why))
	case v != Faulted && s.circuit.In():
		s.doubted = true
	}
	w.publishSuspicion()
}

// Reasons why an instance was taken out, as values of a label.
const (
	outFailures = "failures"
	outCanary   = "canary"
)

// takeOut records that the instance was taken out of service: reason is the metric's label, and why is what was seen.
// It needs m.mu.
func (w *watch) takeOut(reason string, why error) {
	s := &w.suspect
	s.doubted = false
	s.why = why
	w.m.metrics.outages.WithLabelValues(w.in.ID, reason).Inc()
	says := "an engine is out of service although it answers its health check; requests of one token will tell when it works again"
	switch {
	case unreachable(why):
		says = "an engine is out of service, because it takes no connection"
	case w.failed > 0:
		says = "an engine is out of service, because requests and its last health check failed"
	}
	w.m.cfg.Log.Warn(says,
		zap.String("engine", w.in.ID), zap.Duration("after", s.circuit.Out()), zap.Error(why))
}

// publishSuspicion puts into the status whether the instance is out of service, and wakes tryOut if a canary may be due.
// It needs m.mu.
func (w *watch) publishSuspicion() {
	next := w.status
	next.Out, next.Wedged = nil, w.suspect.wedged
	if !w.suspect.circuit.In() {
		next.Out = w.suspect.why
	}
	w.setStatus(next)
	if w.suspect.doubted || !w.suspect.circuit.In() {
		select {
		case w.canaryDue <- struct{}{}:
		default: // a wake-up is pending already
		}
	}
}

// forgive drops the suspicion, for example because the process that it was about is gone. It needs m.mu.
func (w *watch) forgive() { w.suspect = suspicion{} }

// tryOut sends a canary whenever one is due, until ctx ends. When it is woken, it also tries whether lost ranks are back.
func (w *watch) tryOut(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		at, due := w.canaryAt()
		if due {
			timer.Reset(time.Until(at))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.canaryDue:
			w.tryLost(ctx)
		case <-timer.C:
			w.tryNow(ctx)
		}
	}
}

// canaryAt is when the next canary is due; false: none is. If an instance is down, its health check finds out when it
// is up again.
func (w *watch) canaryAt() (time.Time, bool) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	switch s := &w.suspect; {
	case w.gone || !w.status.Up || w.absent.halt != nil || w.in.Held != nil:
		return time.Time{}, false
	case !s.circuit.In():
		return s.circuit.Until(), true
	default:
		return s.tried.Add(canaryRest), s.doubted
	}
}

// canaryRest is the least time between two canaries to an engine in service. The ranks prefill each canary
// themselves, and while they do, their group waits.
const canaryRest = 5 * time.Second

const theCanary = 1 // number of the canary as the circuit's trial

// tryNow sends a canary and judges the engine by it.
func (w *watch) tryNow(ctx context.Context) {
	w.m.mu.Lock()
	s, model := &w.suspect, w.status.baseModel()
	s.doubted, s.tried = false, time.Now()
	s.circuit.Send(theCanary, time.Now())
	eventsBefore := w.traffic.events.Load()
	ask := w.questionFor(model)
	ranks := slices.DeleteFunc(slices.Clone(w.in.Canaries), func(t *Target) bool { return w.status.Lost[t.Rank] != "" })
	w.m.mu.Unlock()

	outcome, err := canaryPassed, error(nil)
	if limit := w.m.cfg.Canary; limit > 0 && model != "" {
		err = w.canary(ctx, ranks, ask, limit)
	}
	if ctx.Err() != nil { // the watch was stopped, and failures may come from that
		return
	}
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded) && w.traffic.events.Load() != eventsBefore:
		outcome = canaryVouched // the engine's batch was full, and is running
	default:
		outcome = canaryFailed
	}

	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone {
		return
	}
	if IsWithheld(err) { // such a refusal does not say that the engine is broken
		w.withheld(err)
		return
	}
	w.m.metrics.canaries.WithLabelValues(w.in.ID, outcome).Inc()
	if outcome == canaryPassed && w.traffic.quiet(time.Now()) <= 1 { // if canaries are off, the next requests are the trial
		s.quiet = time.Time{}
	}
	switch in := s.circuit.In(); {
	case outcome == canaryFailed:
		s.circuit.Trip(time.Now())
		s.wedged = true
		w.takeOut(outCanary, err)
	case !in:
		s.circuit.Return() // one token is less than a served request: the next outage is twice as long
		s.wedged = false
		w.m.cfg.Log.Info("an engine is back in service", zap.String("engine", w.in.ID), zap.String("canary", outcome))
	}
	w.publishSuspicion()
}
