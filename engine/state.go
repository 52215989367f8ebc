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

// Monitor watches engines: it checks each of them, with one health check at a time for each instance, and takes what
// callers Report. Its methods may be called from any goroutine, before and after Start.
type Monitor struct {
	cfg      MonitorConfig
	metrics  *metrics
	wg       sync.WaitGroup
	signal   chan struct{}                               // gets a token when an id is put into changed
	onSample func(id string, s *Sample, asked time.Time) // called with each reading, and when it began; nil: none

	mu       sync.Mutex
	ctx      context.Context // of Start; nil before and after it
	watches  map[string]*watch
	traffic  map[string]*Traffic
	changed  []string // ids whose status the callback has not seen, oldest first
	onChange func(id string, s Status)
}

// watch is one instance's checks and state.
type watch struct {
	m         *Monitor
	in        Instance      // Slots under m.mu
	checkDue  chan struct{} // holds a token if a check is due at once
	canaryDue chan struct{} // holds a token if a canary may be due
	stop      context.CancelFunc
	traffic   *Traffic

	factsAt      time.Time    // when facts were read last; only run's goroutine
	facts        facts        // only run's goroutine
	scrapes      scrapes      // only run's goroutine
	addrs        []netip.Addr // that the engine's name had when it was last looked up; only run's goroutine
	unproven     bool         // the addresses have changed since a new connection was last answered; only run's goroutine
	answered     time.Time    // the last good health check; only run's goroutine
	loggedReason string       // the reason why it does not serve, as it was logged; under m.mu
	loggedAt     time.Time

	counting  sync.Mutex // held while ExpiredNow asks; m.mu is taken within it, and never the other way round
	countedAt time.Time  // when ExpiredNow last began to ask; under counting

	// Under m.mu:
	status   Status
	suspect  suspicion
	absent   absent // all but its reports, which only run's goroutine uses
	rtt      time.Duration
	sample   *Sample // the last reading that crossCheck has kept; nil: there was none
	readAt   time.Time
	gauges   map[int]Gauges // of that reading, by rank
	failed   int            // failed checks in a row
	expired  float64        // hand-offs that the engine gave up unfetched, as it said last; below 0: it does not say
	reports  uint64         // failures to connect, and refusals of all requests, that callers reported
	broke    bool           // a caller lost its connection since the last check began
	redial   bool           // a caller could not connect in time since the last check began, so the next check takes a new connection
	moved    Moved          // goes into the next status that is published
	odd      bool           // an impossible page was logged already; only the goroutine that reads facts uses it
	relist   bool           // a request found that the engine's list has changed
	relisted time.Time      // when a check was last made because of that
	alarmed  bool           // the alarm about the credential was given, and still holds
	gone     bool           // it is not watched any more: a check that is under way changes nothing
}

// Instance is one engine process to watch: one URL, with any number of DP ranks.
type Instance struct {
	ID     string
	Role   string // prefill or decode: the gauge's label
	Target *Target
	Slots  int // requests that a rank runs at once; 0: unknown
	// Ready is a path that answers at once whether the engine takes requests. It is set if GET /health computes
	// something; empty: GET /health costs nothing.
	Ready string

	Ranks   int    // number of ranks by the config; 0 counts as 1
	Version string // the path that returns the engine's version; empty: /version
	// Canaries are the ranks to which a request of one token is sent if it is in doubt whether the engine still
	// computes; empty: the monitor does not doubt it.
	Canaries []*Target
	// Canary makes the body of that request, with the rank in it; nil: a plain completion is sent, and the rank is in
	// the header.
	Canary func(model string, rank int) []byte
	// Held is why nothing is sent to it for now; nil: it gets requests. While it is held, its answers, or their lack,
	// are not counted against it, unless no connection can be made or the engine refuses our API key.
	Held *Held
}

// Held is why an operator has stopped requests to an engine that is alive. It is an error, because a Status gives its
// reasons as errors.
type Held struct{ Why string }

func (h *Held) Error() string { return h.Why }

// Model is an entry of an engine's /v1/models.
type Model struct {
	ID          string
	Parent      string // the base model of a LoRA adapter; empty: it is no adapter
	MaxModelLen int    // 0: unknown
}

// Status is what is known about an instance. The facts that were read (models, version, capacity) stay when it goes
// down.
type Status struct {
	Up             bool
	Late           bool      // down only because its answers do not come, for less than Standstill since its last good check: requests wait
	Hangs          bool      // its port takes connections, its last health check got no answer, and nothing else came from it meanwhile
	Err            error     // why it is down, or what is wrong although it is up
	Since          time.Time // when Up last changed
	Changed        time.Time // when State last changed
	Models         []Model
	Version        string
	CapacityTokens map[string]int64 // by rank, see Sample.Capacities; empty where unknown
	StartTime      float64          // of the engine's process in Unix seconds, 0: unknown; another value means a restart

	// Out is why no request should go there although the engine is up: earlier requests failed. Wedged: a request of
	// one token from the monitor failed too.
	Out    error
	Wedged bool

	// Accused is why no new request should go there for a moment: several requests failed and it is open whether by
	// their own fault, or its core gives no sign of life.
	Accused error

	// Moved is set once the engine's name has had another address.
	Moved Moved

	// Halt is why no new request goes there for now, and requests wait for it: its group re-forms or waits for its
	// recovery, or it is paused.
	Halt error
	// Lost has its ranks that are out of its group, each with the reason. They get no requests.
	Lost map[int]string
}

// MonitorConfig of a Monitor; Client is required.
type MonitorConfig struct {
	Client         *Client
	HealthInterval time.Duration // GET /health; default 1 s
	FactsInterval  time.Duration // GET /v1/models and /metrics; default 10 s
	Timeout        time.Duration // of one GET; default 5 s, because a busy API server is slow and not dead
	Canary         time.Duration // time limit of a canary; 0: none is sent, and an engine that is out comes back by itself
	Registerer     prometheus.Registerer
	Log            *zap.Logger
}

// suspicion is what speaks against an instance that answers its health check.
type suspicion struct {
	circuit circuit.Circuit
	doubted bool // a canary must show whether it computes
	wedged  bool // the canary failed, and no request was served since
	tried   time.Time
	why     error // reason of the outage
	accused int   // failures that may be the engine's or the request's fault
	// quiet is the time since which requests have waited there for KV without a sign of life of its core; zero: the
	// core gives signs. It counts until a sign comes or the canary passes, even if no request waits there any more.
	quiet time.Time
}

// facts change only if the process changes, or if a LoRA adapter is loaded.
type facts struct {
	models   []Model
	version  string
	capacity map[string]int64
	start    float64
	err      error // why models are unknown or old
	tolerant bool  // vLLM with --enable-fault-tolerance
	pauses   bool  // vLLM that says whether it is paused
	unsure   bool  // the engine could not be asked for tolerant and pauses
	elastic  bool  // SGLang with --elastic-ep-backend
}

// equal compares everything that a callback can see.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Hangs == o.Hangs && s.Version == o.Version && s.StartTime == o.StartTime &&
		text(s.Err) == text(o.Err) &&
		text(s.Out) == text(o.Out) && text(s.Halt) == text(o.Halt) && maps.Equal(s.Lost, o.Lost) && s.Wedged == o.Wedged && s.Moved == o.Moved &&
		text(s.Accused) == text(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.CapacityTokens, o.CapacityTokens)
}

// clone is a copy that shares nothing with the monitor, for callers without its lock.
func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.CapacityTokens = maps.Clone(s.CapacityTokens)
	s.Lost = maps.Clone(s.Lost)
	return s
}

// unreachable says that the connection was not accepted: the process or its machine is gone. A busy engine lets the
// time pass instead.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}

// same reports whether the instance is the one already watched.
func (in Instance) same(other Instance) bool {
	a, b := in.Target, other.Target
	return in.Role == other.Role && in.Ranks == other.Ranks && in.Ready == other.Ready && in.Version == other.Version &&
		slices.EqualFunc(in.Canaries, other.Canaries, func(a, b *Target) bool { return a.Rank == b.Rank && a.First == b.First }) &&
		(a == b ||
			a.URL.String() == b.URL.String() && a.APIKey == b.APIKey && a.Rank == b.Rank && a.TLS == b.TLS)
}

// text is the text of an error; empty for nil.
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

// notify calls the callback for each instance that has changed.
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

// misses is how many checks in a row must fail until an instance is down. One good check is enough to bring it up.
const misses = 2
