package engine

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Instance is one engine process to watch: one URL, whatever number of DP ranks.
type Instance struct {
	ID     string
	Role   string // prefill or decode: the gauge's label
	Target *Target
	Slots  int // requests a rank runs at once; 0 unknown
	// Ready is a path that says at once whether the engine takes requests. It is used if GET /health
	// computes something; empty: /health costs nothing.
	Ready string
	// Canaries are the ranks to try with a request of one token when it is in
	// doubt whether the engine still computes; none: nobody is to doubt it here.
	Canaries []*Target
	// Canary makes the body of that request, which then names the rank by itself; nil: a plain
	// completion is enough.
	Canary func(model string, rank int) []byte
}

// Model is an entry of an engine's /v1/models.
type Model struct {
	ID          string
	Parent      string // the base model of a LoRA adapter
	MaxModelLen int    // 0 unknown
}

// Status is what is known about an instance. Facts read once (models, version,
// capacity) stay when it goes down.
type Status struct {
	Up             bool
	Late           bool  // down, but for less than Standstill, and only because its answers do not come: requests wait for it
	Err            error // why it is down, or what is amiss though it is up
	Since          time.Time
	Models         []Model
	Version        string
	CapacityTokens map[string]int64 // by rank, see Sample.Capacities; empty where unknown
	StartTime      float64          // of the process in Unix seconds, 0 unknown; another value is a restart

	// Out is why no request should go there though the engine is up: those
	// before failed. Wedged: a request of our own failed too.
	Out    error
	Wedged bool

	// Accused is why nothing new should go there for a moment: several requests
	// failed, and whether by their own fault is open.
	Accused error
}

// MonitorConfig of a Monitor; Client is required.
type MonitorConfig struct {
	Client         *Client
	HealthInterval time.Duration // GET /health; default 1 s
	FactsInterval  time.Duration // GET /v1/models and /metrics; default 10 s
	Timeout        time.Duration // of one GET; default 5 s: a busy API server is slow, not dead
	Canary         time.Duration // of a completion of one token, on suspicion; 0: an engine that is out comes back by itself
	Registerer     prometheus.Registerer
	Log            *zap.Logger
}

// misses is how many checks in a row must fail to take an instance down. One
// good check takes it up.
const misses = 2

// Monitor watches engines: it asks each in turn, one request in flight an
// instance, and listens to what callers Report. Its methods may be called from
// any goroutine, before and after Start.
type Monitor struct {
	cfg     MonitorConfig
	metrics *metrics
	wg      sync.WaitGroup
	signal  chan struct{}              // something is in changed
	sampled func(id string, s *Sample) // nil: nobody asks

	mu       sync.Mutex
	ctx      context.Context // Start's; nil before and after it
	watches  map[string]*watch
	traffic  map[string]*Traffic
	changed  []string // ids whose status the callback has not seen, oldest first
	onChange func(id string, s Status)
}

// NewMonitor returns a monitor that watches nothing yet.
func NewMonitor(cfg MonitorConfig) *Monitor {
	cfg.HealthInterval = cmp.Or(cfg.HealthInterval, time.Second)
	cfg.FactsInterval = cmp.Or(cfg.FactsInterval, 10*time.Second)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	return &Monitor{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), signal: make(chan struct{}, 1), watches: map[string]*watch{}, traffic: map[string]*Traffic{},
	}
}

// Start watches until ctx ends, and returns when the last request is over. The
// callback of OnChange runs here.
func (m *Monitor) Start(ctx context.Context) {
	m.mu.Lock()
	m.ctx = ctx
	for _, w := range m.watches {
		m.launch(w)
	}
	m.mu.Unlock()
	for {
		select {
		case <-m.signal:
			m.notify()
		case <-ctx.Done():
			m.mu.Lock()
			m.ctx = nil // no launch from now on
			m.mu.Unlock()
			m.wg.Wait()
			return
		}
	}
}

// Set replaces the watched instances. One that stays, with the same target,
// keeps its state; one whose target changed is a new one.
func (m *Monitor) Set(instances []Instance) {
	m.mu.Lock()
	defer m.mu.Unlock()
	stay := make(map[string]*watch, len(instances))
	for _, in := range instances {
		w := m.watches[in.ID]
		if w == nil || !w.in.same(in) {
			w = newWatch(m, in)
		}
		w.in.Slots, w.in.Canary = in.Slots, in.Canary
		stay[in.ID] = w
	}
	for id, w := range m.watches {
		if stay[id] != w {
			w.gone = true
			w.stop()
			m.metrics.forget(w.in)
		}
		if stay[id] == nil {
			m.forgetTraffic(id)
		}
	}
	for id, w := range stay {
		if m.watches[id] != w {
			m.metrics.createSeries(w.in)
			m.launch(w)
		}
	}
	m.watches = stay
}

// Status returns a copy of what is known; the zero Status for an unknown id.
func (m *Monitor) Status(id string) Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		return w.status.clone()
	}
	return Status{}
}

// OnChange sets the function told of every change, one call at a time; changes
// that come faster than it returns are told as one. Set it before Start.
func (m *Monitor) OnChange(f func(id string, s Status)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onChange = f
}

// OnSample has f see what is read of an engine's metrics, of every engine that is watched for its
// gauges. Call it before Start; f must not block.
func (m *Monitor) OnSample(f func(id string, s *Sample)) { m.sampled = f }

// Report tells how a call to an instance failed. If no connection could be
// made the instance is down from now to its next good check, which is made at
// once. So it is after a connection that broke; then the instance is down if
// that check cannot connect either. Anything else (a timeout, bytes that are no
// answer) may be the request's own fault: the checks find out in their time.
func (m *Monitor) Report(id string, err error) {
	var e *Error
	if !errors.As(err, &e) || e.Aborted || e.Timeout || errors.Is(err, ErrClosed) || errors.Is(err, ErrMalformed) || errors.Is(err, ErrTooLarge) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil {
		return
	}
	if unreachable(err) {
		w.reports++ // a check begun before this cannot take the instance up
	}
	if !w.status.Up {
		return
	}
	if unreachable(err) {
		next := w.status
		next.Up, next.Err = false, err
		w.become(next)
		w.failed = misses
	} else {
		w.broke = true
	}
	select {
	case w.kick <- struct{}{}:
	default: // one is due already
	}
}

// unreachable says that nobody took the connection: the process is gone, or its
// machine. An engine that is only busy lets the time pass.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}

// Expired is how many hand-offs a prefill engine has given away before anything had fetched them, as it said when its gauges
// were last read.
func (m *Monitor) Expired(id string) (n float64, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil || w.expired < 0 {
		return 0, false
	}
	return w.expired, true
}

// ExpiredNow asks the engine again, for at most a second. Callers that come meanwhile share the next answer.
func (m *Monitor) ExpiredNow(ctx context.Context, id string) (n float64, known bool) {
	asked := time.Now()
	m.mu.Lock()
	w := m.watches[id]
	m.mu.Unlock()
	if w == nil {
		return 0, false
	}
	w.counting.Lock()
	defer w.counting.Unlock()
	if w.countedAt.After(asked) { // another caller asked after we came
		return m.Expired(id)
	}
	w.countedAt = time.Now()
	s, err := w.scrape(ctx, time.Second)
	if err != nil {
		return 0, false
	}
	return w.countExpired(s)
}

// Heard tells that an instance answered something other than a check of the
// monitor: it lives, however late its health check comes.
func (m *Monitor) Heard(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		w.traffic.Heard()
	}
}

// notify calls back for what changed since it was last called.
func (m *Monitor) notify() {
	for {
		m.mu.Lock()
		if len(m.changed) == 0 {
			m.mu.Unlock()
			return
		}
		id := m.changed[0]
		m.changed = m.changed[1:]
		f, w := m.onChange, m.watches[id]
		var s Status
		if w != nil {
			s = w.status.clone()
		}
		m.mu.Unlock()
		if f != nil && w != nil {
			f(id, s)
		}
	}
}

// launch begins to watch, if Start was called and ctx lives. It needs mu.
func (m *Monitor) launch(w *watch) {
	if m.ctx == nil || m.ctx.Err() != nil {
		return
	}
	ctx, stop := context.WithCancel(m.ctx)
	w.stop = stop
	m.wg.Go(func() {
		defer stop()
		w.run(ctx)
	})
	if len(w.in.Canaries) > 0 {
		m.wg.Go(func() { w.tryOut(ctx) })
	}
}

// tell queues a change for the callback. It needs mu.
func (m *Monitor) tell(id string) {
	if !slices.Contains(m.changed, id) {
		m.changed = append(m.changed, id)
	}
	select {
	case m.signal <- struct{}{}:
	default:
	}
}

// same reports whether the instance is the one already watched.
func (in Instance) same(other Instance) bool {
	a, b := in.Target, other.Target
	return in.Role == other.Role && in.Ready == other.Ready && len(in.Canaries) == len(other.Canaries) && (a == b ||
		a.URL.String() == b.URL.String() && a.APIKey == b.APIKey && a.Rank == b.Rank && a.TLS == b.TLS)
}

func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.CapacityTokens = maps.Clone(s.CapacityTokens)
	return s
}

// equal compares what a callback can see.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Version == o.Version && s.StartTime == o.StartTime && text(s.Err) == text(o.Err) &&
		text(s.Out) == text(o.Out) && s.Wedged == o.Wedged && text(s.Accused) == text(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.CapacityTokens, o.CapacityTokens)
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
