package engine

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine/circuit"
)

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

// watch is one instance's checks and state.
type watch struct {
	m       *Monitor
	in      Instance      // Slots under m.mu
	kick    chan struct{} // check now
	doubt   chan struct{} // a canary may be due
	stop    context.CancelFunc
	traffic *Traffic

	factsAt  time.Time    // last read; only run's goroutine
	facts    facts        // only run's goroutine
	scrapes  scrapes      // only run's goroutine
	addrs    []netip.Addr // that the engine's name had when it was last looked up; only run's goroutine
	unproven bool         // it has others since, and no new connection was answered there; only run's goroutine
	answered time.Time    // the last good health check; only run's goroutine
	said     string       // what keeps it from serving, as the log has it; under m.mu
	saidAt   time.Time

	counting  sync.Mutex // held while ExpiredNow asks; m.mu is taken within it, and never the other way round
	countedAt time.Time  // it began to ask; under counting

	// Under m.mu:
	status   Status
	suspect  suspicion
	absent   absent // but for its reports, which are run's
	rtt      time.Duration
	sample   *Sample // the last reading that was felt; nil: there was none
	readAt   time.Time
	gauges   map[int]Gauges // of it, by rank
	failed   int            // checks in a row
	expired  float64        // hand-offs that it gave away unfetched, as it last said; below 0: it does not say
	reports  uint64         // failures to connect, and refusals of all requests, that callers told of
	broke    bool           // a caller lost its connection since the last check began
	redial   bool           // a caller could not connect in time since then: that check is over a new connection
	moved    Moved          // of the status that is told next
	odd      bool           // a page that cannot be right was told of; only the goroutine that reads facts uses it
	relist   bool           // a request found that the engine's list has changed
	relisted time.Time      // when a check was last made because of that
	alarmed  bool           // the credential alarm was given and stands
	gone     bool           // not watched any more: a check still under way changes nothing
}

// Instance is one engine process to watch: one URL, whatever number of DP ranks.
type Instance struct {
	ID     string
	Role   string // prefill or decode: the gauge's label
	Target *Target
	Slots  int // requests a rank runs at once; 0 unknown
	// Ready is a path that says at once whether the engine takes requests. It is used if GET /health
	// computes something; empty: /health costs nothing.
	Ready string

	Ranks   int    // it is configured with; 0 reads as 1
	Version string // the path that tells the engine's version; empty: /version
	// Canaries are the ranks to try with a request of one token when it is in
	// doubt whether the engine still computes; none: nobody is to doubt it here.
	Canaries []*Target
	// Canary makes the body of that request, which then names the rank by itself; nil: a plain
	// completion is enough.
	Canary func(model string, rank int) []byte
	// Held is why nothing is sent to it for now; nil: it may be. What it answers meanwhile, or does not, says nothing about it.
	Held *Held
}

// Held is why an operator has nothing sent to an engine that is alive. It is an error, as what a Status says of an engine.
type Held struct{ Why string }

func (h *Held) Error() string { return h.Why }

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
	Late           bool      // down, but for less than Standstill, and only because its answers do not come: requests wait for it
	Hangs          bool      // its port takes connections, its last health check got no answer, and nothing else came from it meanwhile
	Err            error     // why it is down, or what is amiss though it is up
	Since          time.Time // of Up
	Changed        time.Time // since when its State is so
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

	// Moved is set once the engine's name has had another address.
	Moved Moved

	// Halt is why nothing new goes there for now, and requests wait for it: its group re-forms, or waits for its recovery.
	Halt error
	// Lost are its ranks that are out of its group, each with the reason. They get no requests.
	Lost map[int]string
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

// suspicion is what is held against an instance that answers its health check.
type suspicion struct {
	circuit circuit.Circuit
	doubted bool // the canary is to say whether it computes
	wedged  bool // the canary failed, and nothing was served since
	tried   time.Time
	why     error // of the outage
	accused int   // failures of which it is open whose they are
	// quiet is since when requests wait there for KV without a sign of life of its core; zero: the core gives signs. It
	// counts until a sign comes or the canary passes, even if nothing waits there any more.
	quiet time.Time
}

// facts change only with the process, or with a LoRA adapter loaded.
type facts struct {
	models   []Model
	version  string
	capacity map[string]int64
	start    float64
	err      error // why models are unknown or old
	tolerant bool  // vLLM with --enable-fault-tolerance
	pauses   bool  // vLLM that tells whether it is paused
	unsure   bool  // it could not be asked for these
	elastic  bool  // SGLang with --elastic-ep-backend
}

// equal compares what a callback can see.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Hangs == o.Hangs && s.Version == o.Version && s.StartTime == o.StartTime &&
		text(s.Err) == text(o.Err) &&
		text(s.Out) == text(o.Out) && text(s.Halt) == text(o.Halt) && maps.Equal(s.Lost, o.Lost) && s.Wedged == o.Wedged && s.Moved == o.Moved &&
		text(s.Accused) == text(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.CapacityTokens, o.CapacityTokens)
}

func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.CapacityTokens = maps.Clone(s.CapacityTokens)
	s.Lost = maps.Clone(s.Lost)
	return s
}

// unreachable says that nobody took the connection: the process is gone, or its
// machine. An engine that is only busy lets the time pass.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}

// same reports whether the instance is the one already watched.
func (in Instance) same(other Instance) bool {
	a, b := in.Target, other.Target
	return in.Role == other.Role && in.Ranks == other.Ranks && in.Ready == other.Ready && in.Version == other.Version &&
		len(in.Canaries) == len(other.Canaries) && (a == b ||
		a.URL.String() == b.URL.String() && a.APIKey == b.APIKey && a.Rank == b.Rank && a.TLS == b.TLS)
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
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

// misses is how many checks in a row must fail to take an instance down. One
// good check takes it up.
const misses = 2
