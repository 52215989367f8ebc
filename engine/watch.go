package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"
)

// ErrCredential is in Status.Err while an engine refuses our API key: every
// request would fail, so it counts as down.
var ErrCredential = errors.New("engine refused our credential; check the API key of its profile (api_key_env)")

// ErrNotAnEngine is in Status.Err of an address that answers, but not as an
// engine does: a web server's page for every path, for one.
var ErrNotAnEngine = errors.New("the answer is not a list of models; check that the address is an engine's")

// StatusError is an answer whose HTTP status was not the wanted one.
type StatusError struct {
	Target string
	Method string // empty: GET
	Path   string
	Status int
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("engine %s: %s %s answered %d %s", e.Target, cmp.Or(e.Method, http.MethodGet), e.Path, e.Status, http.StatusText(e.Status))
	if cause := e.Unwrap(); cause != nil {
		s += ": " + cause.Error()
	}
	return s
}

// Unwrap makes a 401 or 403 an ErrCredential.
func (e *StatusError) Unwrap() error {
	if e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden {
		return ErrCredential
	}
	return nil
}

const answerLimit = 1 << 20 // bytes of a health, models or version answer

// watch is one instance's checks and state.
type watch struct {
	m       *Monitor
	in      Instance      // Slots under m.mu
	kick    chan struct{} // check now
	doubt   chan struct{} // a canary may be due
	stop    context.CancelFunc
	traffic *Traffic

	factsAt  time.Time // last read; only run's goroutine
	facts    facts     // only run's goroutine
	pulse    pulse     // only run's goroutine
	answered time.Time // the last good health check; only run's goroutine
	said     string    // what keeps it from serving, as the log has it; under m.mu
	saidAt   time.Time

	counting  sync.Mutex // held while ExpiredNow asks; m.mu is taken within it, and never the other way round
	countedAt time.Time  // it began to ask; under counting

	// Under m.mu:
	status  Status
	suspect suspicion
	rtt     time.Duration
	failed  int     // checks in a row
	expired float64 // hand-offs that it gave away unfetched, as it last said; below 0: it does not say
	reports uint64  // failures to connect that callers told of
	broke   bool    // a caller lost its connection since the last check began
	alarmed bool    // the credential alarm was given and stands
	gone    bool    // not watched any more: a check still under way changes nothing
}

// facts change only with the process, or with a LoRA adapter loaded.
type facts struct {
	models   []Model
	version  string
	capacity map[string]int64
	start    float64
	err      error // why models are unknown or old
}

// newWatch needs m.mu.
func newWatch(m *Monitor, in Instance) *watch {
	return &watch{
		m: m, in: in, kick: make(chan struct{}, 1), doubt: make(chan struct{}, 1), stop: func() {},
		traffic: m.trafficOf(in.ID), expired: -1, status: Status{Since: time.Now()},
	}
}

func (w *watch) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.kick:
		case <-timer.C:
		}
		w.check(ctx)
		timer.Reset(jitter(w.m.cfg.HealthInterval))
	}
}

// check asks once and updates the engine's state. A health check that comes too
// late does not count against an engine that answered something else meanwhile:
// its API server is busy, and the work goes on.
func (w *watch) check(ctx context.Context) {
	w.m.mu.Lock()
	reports, up, broke := w.reports, w.status.Up, w.broke
	w.broke = false
	w.m.mu.Unlock()
	heard := w.traffic.heard.Load()
	began := time.Now()
	quick, err := w.alive(ctx)
	if err == nil && quick {
		now := time.Now()
		w.learnRTT(now.Sub(began), now)
	}
	unknown := w.facts.err != nil && len(w.facts.models) == 0
	switch {
	case err == nil && (!up || unknown || time.Since(w.factsAt) >= w.m.cfg.FactsInterval):
		w.readFacts(ctx, !up, !up || unknown)
	case (err == nil || late(err)) && w.traffic.quiet(began) > 0.5:
		w.lookForSigns(ctx)
	}
	if ctx.Err() != nil { // stopped: what failed, failed by that
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone {
		return
	}
	w.listen(time.Now())
	refused := errors.Is(err, ErrCredential) || (err == nil && errors.Is(w.facts.err, ErrCredential))
	w.alarm(refused)
	strange := err == nil && errors.Is(w.facts.err, ErrNotAnEngine)
	switch {
	case err == nil && reports != w.reports: // it could not be reached meanwhile: ask again
	case err == nil:
		w.failed = 0
		if w.facts.start != w.status.StartTime {
			w.forgive() // what it did was done by another process
		}
		w.become(w.learned(!refused && !strange))
		w.judged()
	case late(err) && w.traffic.heard.Load() != heard && len(w.facts.models) > 0:
		w.m.metrics.late.WithLabelValues(w.in.ID).Inc()
		if reports != w.reports { // it could not be reached meanwhile
			return
		}
		w.failed = 0
		next := w.status
		next.Accused = w.suspect.accusation()
		next.Up, next.Err = true, fmt.Errorf("a health check was answered too late, while requests go on: %w", err)
		w.become(next)
	default:
		w.failed++
		if broke && unreachable(err) { // two signs of one death
			w.failed = misses
		}
		next := w.status
		if refused || w.failed >= misses {
			next.Up = false
		}
		next.Late = !next.Up && late(err) && time.Since(w.answered) < Standstill
		next.Err = err
		w.become(next)
	}
}

// alive asks an engine whether it serves. quick says that the answer cost it nothing. If the quick path
// says no, it may only repeat what GET /health has found before, or an older version may lack the path.
// So the engine is then asked for its health.
func (w *watch) alive(ctx context.Context) (quick bool, err error) {
	if w.in.Ready != "" {
		_, err = w.get(ctx, w.in.Ready, w.m.cfg.Timeout)
		var answered *StatusError
		if !errors.As(err, &answered) || answered.Status != http.StatusNotFound && answered.Status != http.StatusServiceUnavailable {
			return true, err
		}
	}
	_, err = w.get(ctx, "/health", w.m.cfg.Timeout)
	return w.in.Ready == "", err
}

// learned is the status that the facts give.
func (w *watch) learned(up bool) Status {
	f := w.facts
	return Status{
		Up: up, Err: f.err, Since: w.status.Since,
		Models: f.models, Version: f.version, CapacityTokens: f.capacity, StartTime: f.start,
		Out: w.status.Out, Wedged: w.status.Wedged, Accused: w.suspect.accusation(),
	}
}

// become replaces the status; Since moves with Up. It needs m.mu.
func (w *watch) become(next Status) {
	old := w.status
	if next.equal(old) {
		return
	}
	log := w.m.cfg.Log.With(zap.String("engine", w.in.ID), zap.String("role", w.in.Role))
	switch {
	case next.Up && !old.Up:
		next.Since = time.Now()
		log.Info("engine is up", zap.String("version", next.Version), zap.Int("models", len(next.Models)))
	case old.Up && !next.Up:
		next.Since = time.Now()
		log.Warn("engine is down", zap.Error(next.Err))
	case old.StartTime != 0 && next.StartTime != old.StartTime:
		log.Warn("engine restarted between two checks: what it held for decode is lost")
	}
	switch {
	case next.Err == nil:
		w.said = ""
	case old.Up && !next.Up: // logged above
		w.said, w.saidAt = kindOf(next.Err), time.Now()
	case !next.Up || len(next.Models) == 0:
		w.tellWhy(log, next)
	}
	w.status = next
	w.m.metrics.show(w.in, next)
	w.m.tell(w.in.ID)
}

// sayAgain is the least time between two lines about an engine that stays away
// and whose reason changes.
const sayAgain = time.Minute

// tellWhy logs why an engine does not serve: once, and again when the reason is
// another. It needs m.mu.
func (w *watch) tellWhy(log *zap.Logger, next Status) {
	kind, now := kindOf(next.Err), time.Now()
	if kind == w.said || w.said != "" && now.Sub(w.saidAt) < sayAgain {
		return
	}
	first := w.said == ""
	w.said, w.saidAt = kind, now
	switch {
	case next.Up:
		log.Warn("engine takes no requests: its models are not known", zap.Error(next.Err))
	case first:
		log.Warn("engine does not answer yet: it gets no requests until it does", zap.Error(next.Err))
	default:
		log.Warn("engine is still down, for another reason", zap.Error(next.Err))
	}
}

// kindOf is what an error says without what differs from one time to the next,
// such as the port of our own side.
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

// Standstill is how long requests wait for the only engines of a model that take
// connections and answer nothing, counted from the last good health check. A
// process that was stopped or a host that pages stands still so and goes on; one
// that hangs for longer is as good as dead.
const Standstill = 30 * time.Second

// late says that a server took the connection, but its answer did not come in
// time.
func late(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Timeout && e.Phase > PhaseConnect
}

// alarm tells of a refused credential once, until it is accepted. It needs m.mu.
func (w *watch) alarm(refused bool) {
	if refused && !w.alarmed {
		w.m.cfg.Log.Error("ALARM: engine refuses our API key, no request can reach it",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(ErrCredential))
	}
	w.alarmed = refused
}

// readFacts asks for what /health does not tell. Version and capacity are read
// again after a restart, which shows as another start time. An engine that has
// no /version or /metrics (404, or anything but an answer) leaves them unknown:
// that does not make it worse at serving.
func (w *watch) readFacts(ctx context.Context, full, hurry bool) {
	f, patience := w.facts, w.m.cfg.Timeout
	if hurry { // it could serve already: what only helps must not keep it waiting
		patience = min(patience, time.Second)
	}
	w.pulse.pulls.before(w.traffic)
	began := time.Now()
	s, err := w.scrape(ctx, patience)
	if err == nil {
		w.countExpired(s)
		w.feel(s, began)
	}
	if err == nil && s.StartTime != 0 && s.StartTime != f.start {
		full, f.start = true, s.StartTime
	}
	if full {
		f.version, f.capacity = "", nil
	}
	if err == nil && len(f.capacity) == 0 {
		f.capacity = s.Capacities()
	}
	if f.version == "" {
		if body, err := w.get(ctx, "/version", patience); err == nil {
			f.version = parseVersion(body)
		}
	}
	var models []Model
	if models, f.err = w.models(ctx); f.err == nil {
		f.models = models // else those known before stay
	}
	w.facts, w.factsAt = f, time.Now()
}

// countExpired keeps what the engine says of hand-offs that it gave away.
func (w *watch) countExpired(s *Sample) (n float64, known bool) {
	n, known = s.Expired()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.expired = -1; known {
		w.expired = n
	}
	return n, known
}

// lookForSigns reads the gauges out of turn. The streams are quiet, and the gauges may show that the core goes on.
func (w *watch) lookForSigns(ctx context.Context) {
	began := time.Now()
	if s, err := w.scrape(ctx, min(w.m.cfg.Timeout, time.Second)); err == nil {
		w.feelRanks(s, began)
	}
}

func (w *watch) models(ctx context.Context) ([]Model, error) {
	ctx, stop := context.WithTimeout(ctx, w.m.cfg.Timeout)
	defer stop()
	return Models(ctx, w.m.cfg.Client, w.in.Target)
}

func (w *watch) scrape(ctx context.Context, patience time.Duration) (*Sample, error) {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	return Scrape(ctx, w.m.cfg.Client, w.in.Target)
}

func (w *watch) get(ctx context.Context, path string, patience time.Duration) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	status, body, err := w.m.cfg.Client.Get(ctx, w.in.Target, path, answerLimit)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: w.in.ID, Path: path, Status: status}
	}
	return body, err
}

func parseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			Parent      string `json:"parent"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil || list.Data == nil {
		return nil, ErrNotAnEngine
	}
	models := make([]Model, 0, len(list.Data))
	for _, d := range list.Data {
		if d.ID != "" {
			models = append(models, Model{ID: d.ID, Parent: d.Parent, MaxModelLen: d.MaxModelLen})
		}
	}
	return models, nil
}

// parseVersion returns "" for what is not understood: unknown.
func parseVersion(body []byte) string {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil {
		return ""
	}
	return v.Version
}

// jitter spreads the checks of many engines, a tenth to either side.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}
