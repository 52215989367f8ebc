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

// Monitor watches engines. It checks the health of each instance, one check at a time, and uses the failures that callers
// report by ReportFailure. Its methods may be called from any goroutine, before and after Run.
type Monitor struct {
	cfg      MonitorConfig
	metrics  *metrics
	wg       sync.WaitGroup
	signal   chan struct{}                               // holds a token while changed may have ids
	onSample func(id string, s *Sample, asked time.Time) // see OnSample; nil: none

	mu       sync.Mutex
	ctx      context.Context // the argument of Run; nil before Run and after its end
	watches  map[string]*watch
	traffic  map[string]*Traffic
	changed  []string // ids of instances with a change for which onChange was not called yet, oldest first
	onChange func(id string, s Status)
}

// watch has the checks and the state of one instance.
type watch struct {
	m         *Monitor
	in        Instance      // its fields Slots, Canary and Held under m.mu
	checkDue  chan struct{} // holds a token if a check must be made at once
	canaryDue chan struct{} // holds a token if a canary may be due
	stop      context.CancelFunc
	traffic   *Traffic

	factsAt         time.Time    // when facts were read last; only run's goroutine
	facts           facts        // only run's goroutine
	scrapes         scrapes      // only run's goroutine
	addrs           []netip.Addr // the addresses of the engine's name when it was last looked up; only run's goroutine
	addressUnproven bool         // the engine has not answered over a new connection since addrs changed; only run's goroutine
	lastGoodCheck   time.Time    // the last good health check; only run's goroutine
	loggedReason    string       // the last logged reason why the engine does not serve; under m.mu
	loggedAt        time.Time    // when it was logged

	expiredMu     sync.Mutex // held while ExpiredNow reads metrics; m.mu may be taken while it is held, but not the reverse
	expiredReadAt time.Time  // when ExpiredNow last began to read metrics; under expiredMu

	// The following fields are under m.mu.
	status          Status
	suspect         suspicion
	restrictions    restrictions // except its loadReports, which only run's goroutine uses
	rtt             time.Duration
	sample          *Sample        // the last sample that crossCheck has seen; nil: there was none
	sampleAt        time.Time      // when this sample was read
	gauges          map[int]Gauges // the gauges of this sample, by rank
	failedChecks    int            // failed checks in a row
	expired         float64        // see Expired; below 0: not known
	reportCount     uint64         // how many failures to connect, or refusals of all requests, callers have reported
	connectionBroke bool           // a caller's connection has broken since the last check began
	redial          bool           // a caller's connect timed out since the last check began, so the next check uses a new connection
	moved           Moved          // the value for Status.Moved
	badPageLogged   bool           // see logBadPage; only run's goroutine
	rereadDue       bool           // an answer to a request showed that the engine's list of models has changed
	rereadAt        time.Time      // when a check was last made for this reason
	refusalLogged   bool           // the engine refuses the API key, and this was logged
	removed         bool           // the instance is not watched any more, so a check in progress must not change anything
}

// Instance is one engine process to watch: one URL, with any number of DP ranks.
type Instance struct {
	ID     string
	Role   string // prefill or decode: a label of metrics
	Target *Target
	Slots  int // requests that a rank runs at once; 0: unknown
	// Ready is a path that reports at once whether the engine takes requests. It is set if GET /health makes the engine
	// compute; empty: GET /health is cheap.
	Ready string

	Ranks   int    // number of ranks in the config; 0: 1
	Version string // the path that returns the engine's version; empty: /version
	// Canaries are the ranks that get a request for one token if it is doubtful whether the engine still
	// computes; empty: the monitor sends no such requests.
	Canaries []*Target
	// Canary makes the body of this request, which names the rank; nil: the request is a plain completion, and a header names
	// the rank.
	Canary func(model string, rank int) []byte
	// Held is set while an operator has stopped requests to the engine; nil: it gets requests. Meanwhile missing or bad answers
	// do not make the engine count as down, unless no connection can be made or the engine refuses the API key.
	Held *Held
}

// Held has the reason why an operator has stopped requests to an engine. It is an error, because all reasons in a Status
// are errors.
type Held struct{ Why string }

func (h *Held) Error() string { return h.Why }

// Model is an entry of an engine's /v1/models.
type Model struct {
	ID          string
	Parent      string // the base model of a LoRA adapter; empty: the model is not an adapter
	MaxModelLen int    // 0: unknown
}

// Status is what the monitor knows about an instance. Models, version and capacity stay known while it is down.
type Status struct {
	Up             bool
	Late           bool      // it hangs, and its last good check was less than Standstill ago: requests wait for it
	Hangs          bool      // it takes connections, but did not answer its last health check and sent nothing else meanwhile
	Err            error     // why it is down, or a problem that it has although it is up
	Since          time.Time // when Up last changed
	Changed        time.Time // when State last changed
	Models         []Model
	Version        string
	CapacityTokens map[string]int64 // by rank, see Sample.Capacities; empty: unknown
	StartTime      float64          // when its process started, in Unix seconds; 0: unknown; another value means that it has restarted

	// Out is why no request should go to the engine although it is up: earlier requests failed. Wedged says that a
	// canary failed, too.
	Out    error
	Wedged bool

	// Accused is why no new request should go to the engine for a moment: its core gives no sign of life, or several requests failed and
	// it is not known yet whether the engine is at fault.
	Accused error

	// Moved is set once the engine's name resolves to another address than before.
	Moved Moved

	// Halt is why the engine gets no new requests for now, and requests wait for it: its group of ranks re-forms or waits for
	// recovery, or the engine is paused.
	Halt error
	// Lost has the reason for each rank that has dropped out of the engine's group. Such ranks get no requests.
	Lost map[int]string
}

// MonitorConfig has the settings of a Monitor; Client is required.
type MonitorConfig struct {
	Client         *Client
	HealthInterval time.Duration // GET /health; default 1 s
	FactsInterval  time.Duration // GET /v1/models and /metrics; default 10 s
	Timeout        time.Duration // limit of one GET; default 5 s, because a busy API server may be slow although it works
	Canary         time.Duration // time limit of a canary; 0: no canaries are sent, and an engine that is out returns after a while
	Registerer     prometheus.Registerer
	Log            *zap.Logger
}

// suspicion has the evidence that an instance does not work although it answers its health check.
type suspicion struct {
	circuit         circuit.Circuit
	canaryPending   bool      // a canary must show whether it computes
	wedged          bool      // the canary failed, and no request was served since
	lastCanaryAt    time.Time // when the last canary was sent
	outReason       error     // why the instance was taken out of service
	openAccusations int       // failures of which it is not known whether the engine or the request is at fault
	// silentSince is the time since which requests have waited for their KV without a sign of life of the core; zero: the
	// core gives signs. It stays set until a sign comes or a canary passes, even if no request waits any more.
	silentSince time.Time
}

// facts are values that change only if the engine restarts or loads a LoRA adapter.
type facts struct {
	models                []Model
	version               string
	capacity              map[string]int64
	start                 float64
	err                   error // why models could not be read
	reportsFaults         bool  // it is a vLLM with --enable-fault-tolerance
	reportsPause          bool  // it is a vLLM that reports whether it is paused
	featuresUnknown       bool  // reportsFaults and reportsPause could not be read
	continuesWithoutRanks bool  // it is an SGLang with --elastic-ep-backend
}

// equal compares the fields that matter to callbacks: all but Since and Changed.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Hangs == o.Hangs && s.Version == o.Version && s.StartTime == o.StartTime &&
		errorText(s.Err) == errorText(o.Err) &&
		errorText(s.Out) == errorText(o.Out) && errorText(s.Halt) == errorText(o.Halt) &&
		maps.Equal(s.Lost, o.Lost) && s.Wedged == o.Wedged && s.Moved == o.Moved &&
		errorText(s.Accused) == errorText(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.CapacityTokens, o.CapacityTokens)
}

// clone returns a copy that shares no memory with the monitor, for callers that do not hold its lock.
func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.CapacityTokens = maps.Clone(s.CapacityTokens)
	s.Lost = maps.Clone(s.Lost)
	return s
}

// unreachable says that an attempt to connect failed without a timeout: the process or its machine does not run. With a busy engine,
// connecting would time out instead.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}

// sameSettings says whether both are the same engine with the same settings, so that its watch can continue.
func (in Instance) sameSettings(other Instance) bool {
	a, b := in.Target, other.Target
	sameTarget := a == b || a.URL.String() == b.URL.String() && a.APIKey == b.APIKey && a.Rank == b.Rank && a.TLS == b.TLS
	sameCanaries := slices.EqualFunc(in.Canaries, other.Canaries, func(a, b *Target) bool { return a.Rank == b.Rank && a.First == b.First })
	return sameTarget && sameCanaries && in.Role == other.Role && in.Ranks == other.Ranks && in.Ready == other.Ready &&
		in.Version == other.Version
}

// errorText returns the text of an error; empty for nil.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// queueChange makes reportChanges report a change of this instance. The caller holds mu.
func (m *Monitor) queueChange(id string) {
	if !slices.Contains(m.changed, id) {
		m.changed = append(m.changed, id)
	}
	select {
	case m.signal <- struct{}{}:
	default: // notify will be called anyway
	}
}

// reportChanges calls onChange for each instance that has changed.
func (m *Monitor) reportChanges() {
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
		if f != nil && w != nil { // nil: the instance is not watched any more
			f(id, s)
		}
	}
}

// failuresUntilDown is how many checks in a row must fail before an instance counts as down. After one good check it is up again.
const failuresUntilDown = 2
