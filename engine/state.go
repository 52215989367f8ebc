package engine

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
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

// watch asks one engine, and says what has changed. It has the sockets, the clock, the log and the
// metrics; what is known of the engine is its health, which m.mu guards.
type watch struct {
	m   *Monitor
	log *zap.Logger // names the engine
	health
	checkDue   chan struct{} // holds a token if a check must be made at once
	canaryWake chan struct{} // holds a token if a canary may be due
	stop       context.CancelFunc
	traffic    *Traffic

	// ExpiredNow holds expiredMu while it reads metrics. m.mu may be locked meanwhile, but not the reverse.
	expiredMu     sync.Mutex
	expiredReadAt time.Time // when ExpiredNow last began to read metrics; under expiredMu

	// m.mu guards the following fields.
	loggedReason string // the last logged reason why the engine does not serve
	loggedAt     time.Time
	lastCheck    lastCheck
	removed      bool // the instance is not watched any more, so a check in progress must change nothing
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
			s = w.Status.clone()
		}
		m.mu.Unlock()
		if f != nil && w != nil { // w is nil if the instance is not watched any more
			f(id, s)
		}
	}
}
