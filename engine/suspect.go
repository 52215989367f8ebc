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

// Verdict is what the end of a request says about the engine that had it. What
// the request caused, or its client, says nothing and is not told.
type Verdict uint8

// The verdicts.
const (
	Served  Verdict = iota // the whole answer came
	Faulted                // the engine failed it
	Silent                 // nothing came in time: the engine may be wedged
	Unclear                // it failed, by its own fault or by the request's: only the canary can tell
)

// Judge tells how a request on an instance ended. An instance that failed
// several in a row gets no more until the canary passes; one that is suspected
// to be wedged is tried at once. One without canaries is not judged: its caller
// has other means. Requests that run, and what is charged for them, are none of
// the monitor's business.
func (m *Monitor) Judge(id string, v Verdict, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil && len(w.in.Canaries) > 0 && w.in.Held == nil {
		w.judge(v, why)
	}
}

// maxAccused is how many failures of which it is open whose they are an instance
// may have before it gets nothing new. An engine that fails at once is always
// free, and would draw every request there is until the first of them was
// answered elsewhere.
const maxAccused = 3

// Accuse holds a failure against an instance that may be the request's own
// fault. Once that is known, settle must be called, and then Judge.
func (m *Monitor) Accuse(id string) (settle func()) {
	m.accused(id, 1)
	return sync.OnceFunc(func() { m.accused(id, -1) })
}

func (m *Monitor) accused(id string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || len(w.in.Canaries) == 0 {
		return
	}
	s := &w.suspect
	s.accused = max(0, s.accused+n) // those of before a restart were forgiven
	next := w.status
	next.Accused = s.accusation()
	w.become(next)
}

var (
	errAccused = fmt.Errorf("%d requests failed there with 500; until another engine has answered one of them, it is open whether the engine "+
		"or the requests are at fault", maxAccused)
	errQuiet = errors.New("its core gave no sign of life for so long that the KV of requests that wait there may be lost: there was no " +
		"event on any stream, and no gauge moved")
)

// accusation returns the reason why the engine should get nothing new for a moment, or nil.
func (s *suspicion) accusation() error {
	switch {
	case s.accused >= maxAccused:
		return errAccused
	case !s.quiet.IsZero():
		return errQuiet
	}
	return nil
}

// listen looks whether the core of an engine on which requests wait for KV gives signs of life. It needs m.mu.
func (w *watch) listen(now time.Time) {
	if w.in.Held != nil {
		return
	}
	s := &w.suspect
	switch quiet := w.traffic.quiet(now) > 1; {
	case !s.quiet.IsZero() && !quiet && w.traffic.seenSince(s.quiet):
		s.quiet = time.Time{}
		w.m.cfg.Log.Info("an engine gives signs of life again", zap.String("engine", w.in.ID))
	case !s.quiet.IsZero() && !quiet: // nothing waits there any more, so only the canary can tell
		s.doubted = s.circuit.In()
	case s.quiet.IsZero() && quiet:
		s.quiet = now
		s.doubted = s.circuit.In()
		w.m.cfg.Log.Warn("an engine gets no new requests for a moment; a request of one token will tell whether it computes",
			zap.String("engine", w.in.ID), zap.Error(errQuiet))
	}
}

// judge needs m.mu.
func (w *watch) judge(v Verdict, why error) {
	now := time.Now()
	s := &w.suspect
	switch {
	case v == Served:
		s.circuit.Succeed()
		s.doubted, s.wedged = false, false
	case v != Unclear && s.circuit.Fail(0, now):
		w.out(outFailures, fmt.Errorf("%d requests in a row failed, the last: %w", circuit.Limit, why))
	case v != Faulted && s.circuit.In():
		s.doubted = true
	}
	w.judged()
}

// Why an instance was taken out, as a label.
const (
	outFailures = "failures"
	outCanary   = "canary"
)

// out notes an outage that has begun. It needs m.mu.
func (w *watch) out(reason string, why error) {
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

// judged publishes the suspicion and wakes the canary. It needs m.mu.
func (w *watch) judged() {
	next := w.status
	next.Out, next.Wedged = nil, w.suspect.wedged
	if !w.suspect.circuit.In() {
		next.Out = w.suspect.why
	}
	w.become(next)
	if w.suspect.doubted || !w.suspect.circuit.In() {
		select {
		case w.doubt <- struct{}{}:
		default: // it looks already
		}
	}
}

// forgive drops the suspicion: the process it was against is gone. It needs m.mu.
func (w *watch) forgive() { w.suspect = suspicion{} }

// tryOut sends the canary whenever one is due, until ctx ends.
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
		case <-w.doubt:
			w.tryLost(ctx)
		case <-timer.C:
			w.tryNow(ctx)
		}
	}
}

// canaryAt is when the next canary is due; false: none is. An instance that is
// down is the health check's.
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

// canaryRest is the least time between canaries to an engine in service: each is
// a prompt that its ranks prefill themselves, and while they do their group waits.
const canaryRest = 5 * time.Second

const theCanary = 1 // its number as the circuit's trial

// tryNow sends a canary and draws the conclusion.
func (w *watch) tryNow(ctx context.Context) {
	w.m.mu.Lock()
	s, model := &w.suspect, w.status.baseModel()
	s.doubted, s.tried = false, time.Now()
	s.circuit.Send(theCanary, time.Now())
	heard := w.traffic.events.Load()
	ask := w.asks(model)
	ranks := slices.DeleteFunc(slices.Clone(w.in.Canaries), func(t *Target) bool { return w.status.Lost[t.Rank] != "" })
	w.m.mu.Unlock()

	outcome, err := canaryPassed, error(nil)
	if limit := w.m.cfg.Canary; limit > 0 && model != "" {
		err = w.canary(ctx, ranks, ask, limit)
	}
	if ctx.Err() != nil { // stopped: what failed, failed by that
		return
	}
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded) && w.traffic.events.Load() != heard:
		outcome = canaryVouched // its batch was full, and runs
	default:
		outcome = canaryFailed
	}

	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone {
		return
	}
	if IsWithheld(err) { // it says nothing about the engine
		w.withheld(err)
		return
	}
	w.m.metrics.canaries.WithLabelValues(w.in.ID, outcome).Inc()
	if outcome == canaryPassed && w.traffic.quiet(time.Now()) <= 1 { // where canaries are off, it is tried with the next requests
		s.quiet = time.Time{}
	}
	switch in := s.circuit.In(); {
	case outcome == canaryFailed:
		s.circuit.Trip(time.Now())
		s.wedged = true
		w.out(outCanary, err)
	case !in:
		s.circuit.Return() // one token is not a request served: the next outage doubles
		s.wedged = false
		w.m.cfg.Log.Info("an engine is back in service", zap.String("engine", w.in.ID), zap.String("canary", outcome))
	}
	w.judged()
}
