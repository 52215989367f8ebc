package engine

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Monitor watches engines. It checks the health of each instance, one check at a time, and uses the
// failures that callers report by ReportFailure. Its methods may be called from any goroutine,
// before and after Run.
type Monitor struct {
	cfg     MonitorConfig
	metrics *metrics
	wg      sync.WaitGroup
	// signal holds a token while changed may have ids. The token wakes Run.
	signal chan struct{}
	// onSample gets each sample (see OnSample); nil: no function is set.
	onSample func(id string, s *Sample, asked time.Time)

	mu      sync.Mutex
	ctx     context.Context // the argument of Run; nil before Run and after its end
	watches map[string]*watch
	traffic map[string]*Traffic
	pulls   map[string]*Pulls // by the address of the engine
	// changed has the instances of which onChange does not know yet, oldest first.
	changed  []string
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

	// expiredMu is held while ExpiriesNow reads. m.mu may be locked meanwhile, not the reverse.
	expiredMu     sync.Mutex
	expiredReadAt time.Time // when ExpiriesNow last began to read metrics; under expiredMu

	// m.mu guards the following fields.
	loggedReason string // the last logged reason why the engine does not serve
	loggedAt     time.Time
	lastCheck    lastCheck
	// The instance is not watched any more, so a check in progress must change nothing.
	removed bool
}

// lastCheck has what the last check that has ended found, for CheckNow.
type lastCheck struct {
	next  chan struct{} // closed at the end of the check that is under way or comes next
	began time.Time
	found error // why the engine does not work; nil: it works, although it may be paused
}

// MonitorConfig has the settings of a Monitor; Client is required.
type MonitorConfig struct {
	Client         *Client
	HealthInterval time.Duration // time between two health checks of an engine; default 1 s
	// FactsInterval is between two readings of an engine's models and metrics; default 10 s.
	FactsInterval time.Duration
	// Timeout is of one GET; default 5 s, because a busy API server may be slow although it works.
	Timeout time.Duration
	// Canary is the limit of a canary; 0: none are sent, and an engine that is out of service returns
	// after a while.
	Canary     time.Duration
	Registerer prometheus.Registerer
	Log        *zap.Logger
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

// reportChanges calls onChange for each instance that has changed, without holding mu, so that
// onChange may call the monitor.
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
