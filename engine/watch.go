package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"go.uber.org/zap"

	"evenkeel/internal/words"
)

// ErrNotAnEngine is in Status.Err if the address answers, but not as an engine does: for example, it may be a web server
// that returns a page for every path.
var ErrNotAnEngine = errors.New("the answer is not a list of models; check that the address is an engine's")

// newWatch returns the watch of an instance. The instance counts as down until its first check. The caller holds m.mu.
func newWatch(m *Monitor, in Instance) *watch {
	return &watch{
		m: m, in: in, checkDue: make(chan struct{}, 1), canaryWake: make(chan struct{}, 1), stop: func() {},
		lastCheck: lastCheck{next: make(chan struct{})},
		traffic:   m.trafficOf(in.ID), status: Status{Since: time.Now(), Changed: time.Now()},
	}
}

// alive asks an engine whether it takes requests: at its path Ready, or at /health if it has none. An engine with a path Ready computes a
// token for GET /health, which takes longer. Even so, alive also asks at /health in two cases. If Ready answers 503, this may only be left
// over from an earlier GET /health whose token came too late: the engine then answers 503 until another GET /health succeeds. If Ready
// answers 404, the engine may be an older version without this path. withoutComputing says that the engine computed nothing for the answer.
//
// fresh says to ask over a new connection, to the current address of the engine's name. An idle connection may lead to a process that
// accepts no new connections.
func (w *watch) alive(ctx context.Context, fresh bool) (withoutComputing bool, err error) {
	ask := func(path string) error {
		call := w.m.cfg.Client.NewCall(w.in.Target)
		if fresh {
			call.Fresh()
		}
		_, err := w.ask(ctx, call, path, w.m.cfg.Timeout, answerLimit)
		return err
	}
	hasReady := w.in.Ready != ""
	if hasReady {
		err = ask(w.in.Ready)
		var answered *StatusError
		unsure := errors.As(err, &answered) && (answered.Status == http.StatusNotFound || answered.Status == http.StatusServiceUnavailable)
		if !unsure {
			return true, err
		}
	}
	return !hasReady, ask("/health")
}

// setStatus replaces the status, logs the change and queues it for the callback. next says what a
// check or a caller has found out. The rest follows from the facts of the watch. It sets Since if
// Up has changed, and Changed if State has changed. An engine that does not serve may get many new
// statuses with the same reason, so the reason is logged only if it differs from loggedReason. The
// caller holds m.mu.
func (w *watch) setStatus(next Status) {
	old := w.status
	w.addFacts(&next)
	if next.equal(old) {
		return
	}
	log := w.m.cfg.Log.With(zap.String("engine", w.in.ID), zap.String("role", w.in.Role))
	if next.State().String() != old.State().String() {
		next.Changed = time.Now()
	}
	switch {
	case next.Up && !old.Up:
		next.Since = time.Now()
		log.Info("an engine is up", zap.String("version", next.Version), zap.Int("models", len(next.Models)))
	case old.Up && !next.Up:
		next.Since = time.Now()
		log.Warn("an engine is down", zap.Error(next.Err))
		w.m.cfg.Client.idle.closeHost(w.in.Target.key()) // idle connections lead to no process, or to another one
	case old.StartTime != 0 && next.StartTime != old.StartTime:
		log.Warn("an engine restarted between two health checks, so the KV that it held is lost")
	}
	switch { // loggedReason is why the engine does not serve, as the log has it already
	case next.Err == nil:
		w.loggedReason = ""
	case old.Up && !next.Up: // the line above that the engine is down has the reason
		w.loggedReason, w.loggedAt = kindOf(next.Err), time.Now()
	case !next.Up || len(next.Models) == 0: // the engine stays down, or is up but gets no requests without a list of models
		w.logDownReason(log, next)
	}
	w.status = next
	w.m.metrics.setState(w.in, next)
	w.m.queueChange(w.in.ID)
}

// addFacts sets those fields of a status that follow from the facts of the watch, and wakes
// runCanaries if a canary may be due. The caller holds m.mu.
func (w *watch) addFacts(next *Status) {
	s, r := &w.suspect, &w.restrictions
	next.Moved, next.Wedged, next.RankCount, next.Accused = w.moved, s.wedged, r.rankCount, s.accusedError()
	next.Out, next.Halt = nil, r.haltReason
	if !s.circuit.InService() {
		next.Out = s.outReason
	}
	// An operator may have stopped requests (Held), and may also have paused the engine for it.
	// Then Held has the reason. A halt of another kind stays: the group of the engine re-forms, or
	// it has met a fault, which Held does not explain.
	if w.in.Held != nil && (next.Halt == nil || errors.Is(next.Halt, ErrPaused)) {
		next.Halt = w.in.Held
	}
	if s.canaryPending || next.Out != nil {
		select {
		case w.canaryWake <- struct{}{}:
		default: // runCanaries has a wake-up pending already
		}
	}
}

// minLogInterval is the least time between two log lines about an engine that stays down while the reason changes.
const minLogInterval = time.Minute

// logDownReason logs why an engine does not serve: once, and again if the reason has changed and minLogInterval has passed. The caller
// holds m.mu.
func (w *watch) logDownReason(log *zap.Logger, next Status) {
	kind, now := kindOf(next.Err), time.Now()
	first := w.loggedReason == ""
	tooSoon := !first && now.Sub(w.loggedAt) < minLogInterval
	if kind == w.loggedReason || tooSoon {
		return
	}
	w.loggedReason, w.loggedAt = kind, now
	switch {
	case next.Up:
		log.Warn("an engine gets no requests, because its models are not known", zap.Error(next.Err))
	case first:
		log.Warn("an engine does not answer yet, so it gets no requests", zap.Error(next.Err))
	default:
		log.Warn("an engine is still down, now for another reason", zap.Error(next.Err))
	}
}

// kindOf returns the text of an error without the parts that differ each time, such as the local port of a connection.
func kindOf(err error) string {
	var e *Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	root := e.Err
	for inner := errors.Unwrap(root); inner != nil; inner = errors.Unwrap(root) {
		root = inner
	}
	return fmt.Sprint(e.Phase, " ", root)
}

// Standstill is how long requests wait for a model if all of its engines hang, counted from the last good health check. An engine
// hangs if it takes connections but does not answer. A stopped process, or a host that swaps memory, may hang and then
// continue. After this time the engine counts as dead.
const Standstill = 30 * time.Second

// isLate says that the engine accepted the connection but did not answer in time.
func isLate(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Timeout && e.Phase > PhaseConnect
}

// storeExpiries stores and returns how many hand-offs have expired since the engine's start, as the sample says.
func (w *watch) storeExpiries(s *Sample) Expiries {
	n, known := s.Expired()
	late, _ := s.ReadLate()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	before := w.expiries
	w.expiries = Expiries{HandOffs: n, Start: s.StartTime, Known: known, ReadLate: late, ReadLateAt: before.ReadLateAt}
	if before.Known && s.StartTime == before.Start && late > before.ReadLate {
		w.expiries.ReadLateAt = time.Now()
	}
	return w.expiries
}

// models reads the engine's list of models, within the monitor's timeout.
func (w *watch) models(ctx context.Context) ([]Model, error) {
	ctx, stop := context.WithTimeout(ctx, w.m.cfg.Timeout)
	defer stop()
	return Models(ctx, w.m.cfg.Client, w.in.Target)
}

// scrape reads the engine's metrics, within timeout, by the names of series that vLLM and SGLang use.
func (w *watch) scrape(ctx context.Context, timeout time.Duration) (*Sample, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	return Scrape(ctx, w.m.cfg.Client, w.in.Target)
}

// get reads a page of the engine, of at most limit bytes and within timeout. It fails unless the status is 200.
func (w *watch) get(ctx context.Context, path string, timeout time.Duration, limit int) ([]byte, error) {
	return w.ask(ctx, w.m.cfg.Client.NewCall(w.in.Target), path, timeout, limit)
}

// ask reads a page as get does, but by a call that the caller has prepared, for example one that uses a new connection.
func (w *watch) ask(ctx context.Context, call *Call, path string, timeout time.Duration, limit int) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	status, body, err := call.ask(ctx, http.MethodGet, path, limit)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: w.in.ID, Path: path, Status: status, Why: ParseRefusal(status, body, w.in.Target.Unranked())}
	}
	return body, err
}

// parseVersion returns the version in an answer; empty: there is none, or it is not a name by words.IsName.
func parseVersion(body []byte) string {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil || !words.IsName(v.Version) {
		return ""
	}
	return v.Version
}

// jitter returns a random duration within 10 % of d, so that the checks of many engines do not coincide.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}
