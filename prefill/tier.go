package prefill

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/index"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/queue"
	"evenkeel/prefill/steer"
)

// Tier owns everything that is known about the prefillers: their accounts,
// gates and circuits, and the requests that wait for one. All of it is behind
// one lock, which is held for a decision but never for I/O.
type Tier struct {
	cfg     Config
	metrics *metrics
	changed chan struct{} // tells Run of another set of candidates

	mu         sync.Mutex
	now        time.Time             // of the present holder of the lock
	candidates map[string]*candidate // by ID, the removed with charges too
	models     map[string]*model
	unknown    bool // a live candidate has not named its models yet, or nobody has
	queue      *queue.Queue[*waiter]
	clock      func() time.Time
	timer      *time.Timer // wakes the queues when time alone lets one pass
	wakeAt     time.Time   // what the timer is set to
	ledger     *ledger.Ledger
	budget     budget
	fit        *fit.Times
	cache      *cache.Cache
	steer      steer.Steer
	lastLease  uint64

	// Scratch of one decision, and of one round of them.
	holding           []*candidate
	eligible, untried []*candidate
	near              []*candidate
	view              []policy.Candidate
	found             []int32
	prefillers        []Prefiller
	onTheWay          map[string]int
}

// model is what serves one model name, and who waits for it.
type model struct {
	name    string
	servers []*candidate // in configured order
	cursor  int          // order of the candidate that round-robin chose last, -1 before the first
	line    *queue.Line[*waiter]
	pace    fit.Pace
	slots   map[string]int // decode slots that were free last, by region; nil: all decode in one
}

// New returns a tier without candidates.
func New(cfg Config) (*Tier, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	policies, err := steer.NewPolicies(cfg.Policies, cfg.Policy, cfg.Shadow)
	if err != nil {
		return nil, err
	}
	t := &Tier{
		clock:      cfg.Clock,
		cfg:        cfg,
		steer:      steer.Steer{Policies: policies},
		fit:        fit.New(cfg.Calibration),
		ledger:     ledger.New(cfg.ledger()),
		cache:      cache.New(index.Config{MaxBytes: cfg.Index.MaxBytes, Linger: cfg.Index.SpeculativeTTL}),
		onTheWay:   map[string]int{},
		changed:    make(chan struct{}, 1),
		candidates: map[string]*candidate{},
		models:     map[string]*model{},
		queue:      queue.New[*waiter](),
		unknown:    true,
	}
	t.steer.Overrule(cfg.Hotspot, cfg.Affinity)
	if cfg.Clock == nil {
		t.clock = time.Now
		t.timer = time.AfterFunc(time.Hour, t.Wake)
		t.timer.Stop()
	}
	t.metrics = newMetrics()
	t.metrics.begin(policies.Names())
	if cfg.Registerer != nil {
		if err := t.register(cfg.Registerer); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// lock takes the lock and brings the accounts up to the present.
func (t *Tier) lock() {
	t.mu.Lock()
	t.now = t.clock()
	for a := t.ledger.Expire(t.now); a != nil; a = t.ledger.Expire(t.now) {
		t.forget(t.candidates[a.Owner()])
	}
}

// unlock lets pass who can pass now, and gives the lock back.
func (t *Tier) unlock() {
	t.serveQueues()
	var changes []steer.Change
	if t.steer.Hotspots != nil {
		changes = t.steer.Hotspots.Changes()
	}
	t.mu.Unlock()
	for _, h := range changes {
		t.metrics.hotTransitions.WithLabelValues(string(h.To)).Inc()
		t.cfg.Log.Info("hotspot", zap.String("class", strconv.FormatUint(h.Class, 16)), zap.String("to", string(h.To)),
			zap.Float64("share", h.Share), zap.Int("holders", h.Holders), zap.Int("k", h.K))
	}
}

// Wake looks at the queues again. Call it when a place in the pool got free, or when
// Config.Decode has grown.
func (t *Tier) Wake() {
	t.lock()
	t.unlock()
}

// SetCandidates replaces the candidates. One that keeps its ID keeps its
// accounts, gate and circuit; one that is gone keeps them until its last
// charge ends. Of candidates with the same ID the first counts.
func (t *Tier) SetCandidates(candidates []Candidate) {
	t.lock()
	cursors := t.cursors()
	for _, c := range t.candidates {
		c.configured = false
	}
	for _, m := range t.models {
		m.servers = nil
	}
	named := false
	t.unknown = false
	for i, given := range candidates {
		c := t.candidates[given.ID]
		if c == nil {
			c = t.newCandidate(given.ID)
			t.candidates[given.ID] = c
		} else if c.configured {
			continue
		}
		t.configure(c, given, i)
		named = named || len(given.Models) > 0
		t.unknown = t.unknown || given.Live && len(given.Models) == 0
	}
	t.unknown = t.unknown || !named
	for name, m := range t.models {
		m.cursor = cursorAfter(cursors[name])
		t.forgetEmpty(m)
	}
	for _, c := range t.candidates {
		t.forget(c)
	}
	t.forgetModels()
	t.unlock()
	t.tellRun()
}

// tellRun has Run look at the candidates and at how they are scraped.
func (t *Tier) tellRun() {
	select {
	case t.changed <- struct{}{}:
	default: // Run has not looked since the last change
	}
}

// Forgive takes back a failure that turned out to be the request's own: another
// engine failed at it, too.
func (t *Tier) Forgive(id string) {
	t.lock()
	defer t.unlock()
	if c := t.candidates[id]; c != nil {
		c.circuit.Forgive()
	}
}

// configure takes over what the caller says about a candidate.
func (t *Tier) configure(c *candidate, given Candidate, order int) {
	if given.Live && !c.Live {
		c.account.Misses = 0 // what was missed while it was down says nothing
		c.cache.Restarted(t.now)
	}
	c.Candidate, c.order, c.configured = given, order, true
	for _, name := range given.Models {
		m := t.modelOf(name)
		if !slices.Contains(m.servers, c) {
			m.servers = append(m.servers, c)
		}
	}
	c.account.SetCapacity(given.CapacityTokens, t.now)
}

// cursors returns, for each model, its candidates up to the one round-robin
// chose last, that one first.
func (t *Tier) cursors() map[string][]*candidate {
	passed := map[string][]*candidate{}
	for name, m := range t.models {
		for _, c := range m.servers {
			if c.order <= m.cursor {
				passed[name] = append(passed[name], c)
			}
		}
		slices.Reverse(passed[name])
	}
	return passed
}

// cursorAfter is where round-robin goes on among the new candidates: behind
// the last one it passed that is still there.
func cursorAfter(passed []*candidate) int {
	for _, c := range passed {
		if c.configured {
			return c.order
		}
	}
	return -1
}

// forgetModels drops what was learned of models that no candidate serves any more.
func (t *Tier) forgetModels() {
	gone := func(name string) bool { return t.models[name] == nil }
	t.fit.Forget(gone)
	t.cache.Forget(gone)
}

// forget drops a removed candidate once nothing is charged to it.
func (t *Tier) forget(c *candidate) {
	if !c.configured && c.account.Held() == 0 {
		delete(t.candidates, c.ID)
		c.cache.Close()
		t.metrics.forget(c.ID)
	}
}

// servable says why no candidate could ever take a request for the model, as
// things stand; nil if one is live or may soon be so again.
func (t *Tier) servable(name string) error {
	m := t.models[name]
	switch {
	case m == nil || len(m.servers) == 0:
		if t.unknown {
			return fmt.Errorf("%w for model %q: its engines have not named their models yet; check engines.prefill and their /v1/models", ErrUnavailable, name)
		}
		return fmt.Errorf("%w %q; ask for one that /v1/models lists", ErrModelNotFound, name)
	case !slices.ContainsFunc(m.servers, func(c *candidate) bool { return c.Live || c.Late }):
		return fmt.Errorf("%w for model %q: all %d are down; check their /health", ErrUnavailable, name, len(m.servers))
	}
	return nil
}
