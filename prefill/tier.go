package prefill

import (
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/index"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/queue"
	"evenkeel/prefill/steer"
)

// New returns a tier without candidates.
func New(cfg Config) (*Scheduler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	policies, err := steer.NewPolicies(cfg.Policies, cfg.Policy, cfg.Clock == nil)
	if err != nil {
		return nil, err
	}
	t := &Scheduler{clock: cfg.Clock, changed: make(chan struct{}, 1), state: state{
		cfg:        cfg,
		metrics:    newMetrics(policies.Names()),
		candidates: map[string]*candidate{},
		models:     map[string]*model{},
		unknown:    true,
		queue:      queue.New[*waiter](),
		ledger:     ledger.New(cfg.ledger()),
		cache:      cache.New(index.Config{MaxBytes: cfg.Index.MaxBytes}),
		fit:        fit.New(cfg.Calibration),
		steer:      steer.Overrides{Policies: policies},
	}}
	t.choose = chooser{state: &t.state, tier: t, onTheWay: map[string]int{}}
	t.arrivals = queueManager{&t.state, &t.choose}
	t.steer.Overrule(cfg.Hotspot.Enabled, cfg.Affinity)
	if cfg.Clock == nil {
		t.clock = time.Now
		t.timer = time.AfterFunc(time.Hour, t.Wake)
		t.timer.Stop()
	}
	if cfg.Registerer != nil {
		if err := t.metrics.register(cfg.Registerer, t); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// lock takes the lock, sets the time, and ends the charges that have expired.
func (t *Scheduler) lock() {
	t.mu.Lock()
	t.now = t.clock()
	for a := t.ledger.Expire(t.now); a != nil; a = t.ledger.Expire(t.now) {
		t.forget(t.candidates[a.Owner])
	}
}

// unlock serves the waiters that can be served now, and releases the lock.
func (t *Scheduler) unlock() {
	t.arrivals.serve()
	if t.queue.Len() > 0 {
		t.wakeAt = t.arrivals.wakeAt()
		t.setTimer()
	}
	var changes []steer.Change
	if t.steer.Hotspots != nil {
		changes = t.steer.Hotspots.Changes()
	}
	t.mu.Unlock()
	for _, h := range changes {
		t.cfg.Log.Info("a class of requests became hot, or is not hot any more", zap.String("class", strconv.FormatUint(h.Class, 16)),
			zap.String("to", string(h.To)),
			zap.Float64("share", h.Share), zap.Int("holders", h.Holders), zap.Int("k", h.K))
	}
}

// Wake considers all waiting requests again. The caller calls it when a place in the pool becomes free, and when Config.Decode
// returns more slots than before.
func (t *Scheduler) Wake() {
	t.lock()
	t.unlock()
}

// NextWake is the next time at which a waiter may be answered without any event; false: never.
func (t *Scheduler) NextWake() (time.Time, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wakeAt, t.queue.Len() > 0 && !t.wakeAt.IsZero()
}

// setTimer sets the timer to wakeAt. In a simulation there is no timer.
func (t *Scheduler) setTimer() {
	switch {
	case t.timer == nil:
	case t.wakeAt.IsZero(): // only an event can help a waiter
		t.timer.Stop()
	default:
		t.timer.Reset(t.wakeAt.Sub(t.now))
	}
}

// SetCandidates replaces the candidates. A candidate that keeps its ID keeps its accounts, gate and circuit; a
// candidate that is gone keeps them until its last charge ends. Of candidates with the same ID the first counts.
func (t *Scheduler) SetCandidates(candidates []Candidate) {
	t.lock()
	t.replace(candidates)
	t.unlock()
	t.tellRun()
}

// tellRun makes Run look at the candidates and the scrape settings again.
func (t *Scheduler) tellRun() {
	select {
	case t.changed <- struct{}{}:
	default: // an earlier change is still pending
	}
}

// Forgive cancels a failure of a candidate that was the request's fault: another engine failed at the same request, too.
func (t *Scheduler) Forgive(id string) {
	t.lock()
	defer t.unlock()
	if c := t.candidates[id]; c != nil {
		c.circuit.Forgive()
		c.fault = ""
	}
}

// Retry reports whether a request whose k-th attempt failed may be tried again, and after which wait. status is the status of
// the engine's answer, 0 without an answer. err is the failure of a call without an answer, or the mistake in the hand-off
// of a 200. The caller waits longer if the engine's Retry-After says so. Attempts of which no byte was sent do not count in
// k: see RetryUnsent.
//
// A granted retry uses the budget that all requests share. The retry after a request's first attempt is never refused if the
// connection broke. When an engine dies, all its requests fail at once, and together they cause no more load on the other
// engines than they caused on the dead engine.
func (t *Scheduler) Retry(k int, status int, err error) (backoff time.Duration, again bool) {
	retry := t.retries()
	if k >= retry.Attempts || !retryable(status, err) {
		return 0, false
	}
	t.lock()
	granted := t.budget.retry(t.now, retry.Budget, k == 1 && status == 0 && Broke(err))
	t.unlock()
	if !granted {
		t.metrics.budgetExhausted.Inc()
		return 0, false
	}
	return Backoff(retry.Base, k), true
}
