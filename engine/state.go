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
	signal   chan struct{}                               // holds a token while changed may have ids; the token wakes Run
	onSample func(id string, s *Sample, asked time.Time) // gets each sample (see OnSample); nil: no function is set

	mu       sync.Mutex
	ctx      context.Context // the argument of Run; nil before Run and after its end
	watches  map[string]*watch
	traffic  map[string]*Traffic
	pulls    map[string]*Pulls // by the address of the engine
	changed  []string          // ids of instances with a change for which onChange was not called yet, oldest first
	onChange func(id string, s Status)
}

// watch has the checks and the state of one instance.
type watch struct {
	m          *Monitor
	in         Instance      // m.mu guards its fields Slots, Canary and Held
	checkDue   chan struct{} // holds a token if a check must be made at once
	canaryWake chan struct{} // holds a token if a canary may be due
	stop       context.CancelFunc
	traffic    *Traffic

	factsAt         time.Time    // when facts were last read; only the goroutine of run uses it
	facts           facts        // only the goroutine of run uses them
	scrapes         scrapes      // results of the last scrapes; only the goroutine of run uses them
	addrs           []netip.Addr // the addresses of the engine's name at the last look-up; only the goroutine of run uses them
	addressUnproven bool         // the engine has not answered over a new connection since addrs changed; only the goroutine of run uses it
	lastGoodCheck   time.Time    // when the last good health check ended; only the goroutine of run uses it
	loggedReason    string       // the last logged reason why the engine does not serve; under m.mu
	loggedAt        time.Time    // when loggedReason was logged; under m.mu

	expiredMu     sync.Mutex // held while ExpiredNow reads metrics; m.mu may be locked while expiredMu is held, but not the reverse
	expiredReadAt time.Time  // when ExpiredNow last began to read metrics; under expiredMu

	// m.mu guards the following fields.
	status          Status
	suspect         suspicion
	restrictions    restrictions
	rtt             time.Duration
	sample          *Sample        // the last sample that crossCheck has seen; nil: there was none
	sampleAt        time.Time      // when the scrape of sample began
	gauges          map[int]Gauges // gauges of each rank in sample, by rank
	failedChecks    int            // failed health checks in a row
	expiries        Expiries       // by the engine's last metrics
	reportCount     uint64         // how many failures to connect, or refusals of all requests, callers have reported
	connectionBroke bool           // a caller's connection has broken since the last check began
	redial          bool           // a caller's connect timed out since the last check began, so the next check uses a new connection
	moved           Moved          // the last change of the engine's addresses, for Status.Moved
	badPageLogged   bool           // the log already says that a page has wrong numbers; only the goroutine of run uses it
	rereadDue       bool           // an answer to a request showed that the engine's list of models has changed
	rereadAt        time.Time      // when rereadDue last caused a check at once
	refusalLogged   bool           // the log already says that the engine refuses the API key
	lastCheck       lastCheck
	removed         bool // the instance is not watched any more, so a check in progress must change nothing
}

// lastCheck has what the last check that has ended found, for CheckNow.
type lastCheck struct {
	next  chan struct{} // closed at the end of the check that is under way or comes next
	began time.Time
	found error // why the engine does not work; nil: it works, although it may be paused
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

	Ranks   int    // number of ranks in the config; 0 counts as 1
	Version string // the path that returns the engine's version; empty: /version
	// Canaries are the ranks that get a request for one token if it is doubtful whether the engine still
	// computes; empty: the monitor sends no such requests.
	Canaries []*Target
	// Canary makes the body of a canary, a request for one token; the body names the rank. If Canary is nil, a canary is a plain
	// completion, and a header names the rank.
	Canary func(model string, rank int) []byte
	// Held is set while an operator has stopped requests to the engine; nil: it gets requests. While it is set, the engine counts as
	// down only if no connection can be made, or if it refuses the API key. Other bad or missing answers do not count.
	Held *Held
}

// Held has the reason why an operator has stopped requests to an engine. It is an error, because all reasons in a Status
// are errors.
type Held struct{ Why string }

func (h *Held) Error() string { return h.Why }

// Status is what the monitor knows about an instance. Models, version and memory stay known while it is down.
type Status struct {
	Up        bool
	Late      bool      // the engine hangs, but its last good check was less than Standstill ago, so requests wait for it
	Hangs     bool      // the engine takes connections, but did not answer its last health check, and no stream sent anything meanwhile
	Err       error     // why the engine is down, or a problem that it has although it is up
	Since     time.Time // when Up last changed
	Changed   time.Time // when the result of State last changed
	Models    []Model
	Version   string
	Memories  Memories // KV memory of the ranks; empty: unknown
	StartTime float64  // when the engine's process started, in Unix seconds; 0: unknown; a new value: it has restarted

	// Out is why no request should go to the engine although it is up: earlier requests failed. Wedged says that a
	// canary failed, too.
	Out    error
	Wedged bool

	// Accused is why no new request should go to the engine for now: its core gives no sign of life, or several requests failed and it
	// is not known yet whether the engine is at fault.
	Accused error

	// Moved is set once the engine's name resolves to another address than before.
	Moved Moved

	// Halt is why the engine gets no new requests for now, and requests wait for it: its group of ranks re-forms or waits for
	// recovery, or the engine is paused.
	Halt error
	// RankCount is how many ranks the engine has, by its last refusal of a request to a rank that it
	// lacks. The ranks from this number on get no requests. 0: it has refused none since its facts
	// were last read.
	RankCount int
}

// MonitorConfig has the settings of a Monitor; Client is required.
type MonitorConfig struct {
	Client         *Client
	HealthInterval time.Duration // time between two health checks of an engine; default 1 s
	FactsInterval  time.Duration // time between two readings of an engine's models and metrics; default 10 s
	Timeout        time.Duration // limit of one GET; default 5 s, because a busy API server may be slow although it works
	Canary         time.Duration // time limit of a canary; 0: none are sent, and an engine that is out of service returns after a while
	Registerer     prometheus.Registerer
	Log            *zap.Logger
}

// suspicion has the evidence that an instance does not work although it answers its health check.
type suspicion struct {
	circuit         circuit.Circuit
	canaryPending   bool      // a canary must show whether the instance computes
	wedged          bool      // the canary failed, and no request was served since
	lastCanaryAt    time.Time // when the last canary was sent
	outReason       error     // why the instance was last taken out of service
	openAccusations int       // failed requests of which it is not known yet whether the engine or the request is at fault
	// silentSince is the time since which requests have waited for their KV without a sign of life of the core; zero: the
	// core gives signs. It stays set until a sign comes or a canary passes, even if no request waits any more.
	silentSince time.Time
}

// facts are values that change only if the engine restarts or loads a LoRA adapter.
type facts struct {
	models          []Model
	version         string
	memory          *Sample // the last sample that told the KV memory; nil: none did
	start           float64
	modelsErr       error // why the list of models could not be read; nil: it was read
	reportsFaults   bool  // the engine is a vLLM with --enable-fault-tolerance
	reportsPause    bool  // the engine is a vLLM that reports whether it is paused
	featuresUnknown bool  // the engine did not answer when it was asked for reportsFaults and reportsPause, so it is asked again
}

// equal compares the fields that matter to callbacks: all but Since and Changed.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Hangs == o.Hangs && s.Version == o.Version && s.StartTime == o.StartTime &&
		errorText(s.Err) == errorText(o.Err) &&
		errorText(s.Out) == errorText(o.Out) && errorText(s.Halt) == errorText(o.Halt) &&
		s.RankCount == o.RankCount && s.Wedged == o.Wedged && s.Moved == o.Moved &&
		errorText(s.Accused) == errorText(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.Memories, o.Memories)
}

// clone returns a copy that shares no memory with the monitor, for callers that do not hold its lock.
func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.Memories = maps.Clone(s.Memories)
	return s
}

// unreachable says that an attempt to connect failed without a timeout: the process or its machine does not run. With a busy engine,
// connecting would time out instead.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}

// sameSettings says whether both are the same engine with the same settings, so that its watch can continue. Slots, Canary
// and Held are not compared, because Monitor.Set changes them in a watch that continues.
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
	default: // a wake-up is pending, and reportChanges will report this change, too
	}
}

// reportChanges calls onChange for each instance that has changed, without holding mu, so that onChange may call the monitor.
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
		if f != nil && w != nil { // w is nil if the instance is not watched any more
			f(id, s)
		}
	}
}

// failuresUntilDown is how many checks in a row must fail before an instance counts as down. After one good check it is up again.
const failuresUntilDown = 2
