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
)

// ErrNotAnEngine is in Status.Err of an address that answers, but not as an engine does: for example a web server
// that returns a page for every path.
var ErrNotAnEngine = errors.New("the answer is not a list of models; check that the address is an engine's")

// newWatch returns the watch of an instance that was not checked yet, and so counts as down. It needs m.mu.
func newWatch(m *Monitor, in Instance) *watch {
	return &watch{
		m: m, in: in, checkDue: make(chan struct{}, 1), canaryDue: make(chan struct{}, 1), stop: func() {},
		traffic: m.trafficOf(in.ID), expired: -1, status: Status{Since: time.Now(), Changed: time.Now()},
	}
}

// alive asks an engine whether it serves. quick says that the answer cost the engine nothing. If the quick path says
// no, it may only repeat what GET /health has found before, or an older version may lack the path. So the engine is
// then asked for its health.
//
// fresh: the engine is asked over a new connection, to the address that its name has now. A kept-alive connection may
// lead to a process that accepts no new ones.
func (w *watch) alive(ctx context.Context, fresh bool) (quick bool, err error) {
	ask := func(path string) error {
		call := w.m.cfg.Client.NewCall(w.in.Target)
		if fresh {
			call.Fresh()
		}
		_, err := w.ask(ctx, call, path, w.m.cfg.Timeout, answerLimit)
		return err
	}
	if w.in.Ready != "" {
		err = ask(w.in.Ready)
		var answered *StatusError
		if !errors.As(err, &answered) || answered.Status != http.StatusNotFound && answered.Status != http.StatusServiceUnavailable {
			return true, err
		}
	}
	return w.in.Ready == "", ask("/health")
}

// setStatus replaces the status, logs what has changed and tells the callback of it. Since moves with Up, and Changed
// with its State. It needs m.mu.
func (w *watch) setStatus(next Status) {
	old := w.status
	next.Moved = w.moved
	if next.equal(old) {
		return
	}
	log := w.m.cfg.Log.With(zap.String("engine", w.in.ID), zap.String("role", w.in.Role))
	if next.State() != old.State() {
		next.Changed = time.Now()
	}
	switch {
	case next.Up && !old.Up:
		next.Since = time.Now()
		log.Info("an engine is up", zap.String("version", next.Version), zap.Int("models", len(next.Models)))
	case old.Up && !next.Up:
		next.Since = time.Now()
		log.Warn("an engine is down", zap.Error(next.Err))
		w.m.cfg.Client.idle.drop(w.in.Target.key()) // kept-alive connections lead to nothing, or to another process
	case old.StartTime != 0 && next.StartTime != old.StartTime:
		log.Warn("an engine restarted between two health checks, so the KV that it held is lost")
	}
	switch {
	case next.Err == nil:
		w.loggedReason = ""
	case old.Up && !next.Up: // logged above
		w.loggedReason, w.loggedAt = kindOf(next.Err), time.Now()
	case !next.Up || len(next.Models) == 0:
		w.tellWhy(log, next)
	}
	w.status = next
	w.m.metrics.show(w.in, next)
	w.m.tell(w.in.ID)
}

// sayAgain is the least time between two log lines about an engine that stays away while its reason changes.
const sayAgain = time.Minute

// tellWhy logs why an engine does not serve: once, and again if the reason has changed. It needs m.mu.
func (w *watch) tellWhy(log *zap.Logger, next Status) {
	kind, now := kindOf(next.Err), time.Now()
	if kind == w.loggedReason || w.loggedReason != "" && now.Sub(w.loggedAt) < sayAgain {
		return
	}
	first := w.loggedReason == ""
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

// kindOf is the text of an error without the parts that differ each time, such as the port of our own side.
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

// Standstill is how long requests wait if the only engines of a model take connections and answer nothing, counted
// from the last good health check. A process that was stopped, or a host that pages, stands still in this way and
// then goes on. One that hangs for longer counts as dead.
const Standstill = 30 * time.Second

// late says that a server accepted the connection, but did not answer in time.
func late(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Timeout && e.Phase > PhaseConnect
}

// countExpired stores how many hand-offs the engine says it gave up.
func (w *watch) countExpired(s *Sample) (n float64, known bool) {
	n, known = s.Expired()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.expired = -1; known {
		w.expired = n
	}
	return n, known
}

// models reads the engine's list of models, for at most the monitor's timeout.
func (w *watch) models(ctx context.Context) ([]Model, error) {
	ctx, stop := context.WithTimeout(ctx, w.m.cfg.Timeout)
	defer stop()
	return Models(ctx, w.m.cfg.Client, w.in.Target)
}

// scrape reads the engine's metrics, for at most the time patience.
func (w *watch) scrape(ctx context.Context, patience time.Duration) (*Sample, error) {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	return Scrape(ctx, w.m.cfg.Client, w.in.Target)
}

// get reads a page of the engine that must be a 200, of at most limit bytes, for at most the time patience.
func (w *watch) get(ctx context.Context, path string, patience time.Duration, limit int) ([]byte, error) {
	return w.ask(ctx, w.m.cfg.Client.NewCall(w.in.Target), path, patience, limit)
}

// ask is get with a call of the caller's, which may ask for a fresh connection.
func (w *watch) ask(ctx context.Context, call *Call, path string, patience time.Duration, limit int) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	status, body, err := call.ask(ctx, http.MethodGet, path, limit)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: w.in.ID, Path: path, Status: status, Why: Withheld(status, body, w.in.Target.Unranked())}
	}
	return body, err
}

// longestVersion bounds an engine's version text, in bytes, because it is kept and logged.
const longestVersion = 256

// parseVersion returns the version; empty if the answer is not understood.
func parseVersion(body []byte) string {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil || len(v.Version) > longestVersion {
		return ""
	}
	return v.Version
}

// parseElastic says whether a server of SGLang goes on without ranks that have failed.
func parseElastic(body []byte) bool {
	var v struct {
		Backend string `json:"elastic_ep_backend"`
	}
	return json.Unmarshal(body, &v) == nil && v.Backend != ""
}

// jitter spreads the checks of many engines: a tenth to either side of d.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}
