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

// New returns a scheduler without candidates. With cfg.Clock it has no timer: the simulation calls
// Wake itself.
func New(cfg Config) (*Scheduler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	simulated := cfg.Clock != nil
	policies, err := steer.NewPolicies(cfg.Policies, cfg.Policy, !simulated)
	if err != nil {
		return nil, err
	}
	s := &Scheduler{clock: cfg.Clock, changed: make(chan struct{}, 1), state: state{
		cfg:           cfg,
		metrics:       newMetrics(policies.Names()),
		candidates:    map[string]*candidate{},
		models:        map[string]*model{},
		modelsUnknown: true,
		queue:         queue.New[*waiter](),
		ledger:        ledger.New(cfg.ledger()),
		cache:         cache.New(index.Config{MaxBytes: cfg.Index.MaxBytes}),
		fit:           fit.New(cfg.Calibration),
		steering:      steer.Overrides{Policies: policies},
	}}
	s.choose = chooser{state: &s.state, scheduler: s, slotsNeeded: map[string]int{}}
	s.manager = queueManager{&s.state, &s.choose}
	s.steering.Configure(cfg.Hotspot.Enabled, cfg.Affinity)
	if !simulated {
		s.clock = time.Now
		s.timer = time.AfterFunc(time.Hour, s.Wake)
		s.timer.Stop() // until setTimer starts it
	}
	if cfg.Registerer != nil {
		if err := s.metrics.register(cfg.Registerer, s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// lock takes the lock, sets the time, and ends the charges whose KV the engine has freed by its own
// timeout.
func (s *Scheduler) lock() {
	s.mu.Lock()
	s.now = s.clock()
	for load := s.ledger.Expire(s.now); load != nil; load = s.ledger.Expire(s.now) {
		s.dropIfUnused(s.candidates[load.Owner]) // perhaps the last charge of a removed candidate
	}
}

// unlock serves the waiters that can be served now, and sets the timer for the others. It logs
// without the lock.
func (s *Scheduler) unlock() {
	s.manager.serveWaiters()
	if s.queue.Len() > 0 { // without waiters, the timer changes nothing
		s.wakeAt = s.manager.nextWake()
		s.setTimer()
	}
	var changes []steer.Change
	if s.steering.Hotspots != nil { // nil: hot classes are not detected
		changes = s.steering.Hotspots.Changes()
	}
	s.mu.Unlock()
	for _, change := range changes {
		s.cfg.Log.Info("a class of requests became hot, or is not hot any more", zap.String("class", strconv.FormatUint(change.Class, 16)),
			zap.String("to", string(change.To)),
			zap.Float64("share", change.Share), zap.Int("holders", change.Holders),
			zap.Int("k", change.K)) // requests in a row for which a holder had the best score
	}
}

// Wake considers all waiting requests again. The caller calls it when a place in the pool becomes
// free, and when Config.Decode returns more slots than before.
func (s *Scheduler) Wake() {
	s.lock()
	s.unlock()
}

// NextWake is the next time at which a waiter may be answered without any event.
func (s *Scheduler) NextWake() (at time.Time, exists bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wakeAt, s.queue.Len() > 0 && !s.wakeAt.IsZero()
}

func (s *Scheduler) setTimer() {
	switch {
	case s.timer == nil: // a simulation asks NextWake
	case s.wakeAt.IsZero(): // only an event can help a waiter
		s.timer.Stop()
	default:
		s.timer.Reset(s.wakeAt.Sub(s.now))
	}
}

// SetCandidates replaces the candidates. A candidate that keeps its ID keeps its load, gate and
// circuit; one that is gone keeps them until its last charge ends. Of candidates with the same ID
// the first counts.
func (s *Scheduler) SetCandidates(candidates []Candidate) {
	s.lock()
	s.replaceCandidates(candidates)
	s.unlock()
	s.wakeRun()
}

// wakeRun makes Run look at the candidates and the scrape settings again.
func (s *Scheduler) wakeRun() {
	select {
	case s.changed <- struct{}{}:
	default: // an earlier change is still pending
	}
}

// AvoidFor takes an engine whose hand-offs are lost out of service for the time d. Then one prompt
// is a trial. If d is 0, hand-offs arrive again. If no other engine takes prompts, it gets them all
// the same.
func (s *Scheduler) AvoidFor(instance string, d time.Duration) {
	s.lock()
	defer s.unlock()
	var at time.Time
	if d > 0 {
		at = s.now.Add(d)
	}
	s.setTrial(instance, at)
}

func (s *state) setTrial(instance string, at time.Time) {
	for _, c := range s.candidates {
		if c.Instance == instance {
			c.trialAt, c.trialLease = at, 0
		}
	}
}

// Forgive cancels a failure of a candidate that was the request's fault: another engine failed at
// it, too.
func (s *Scheduler) Forgive(id string) {
	s.lock()
	defer s.unlock()
	if c := s.candidates[id]; c != nil { // nil: removed meanwhile
		c.circuit.Forgive()
		c.lastFault = ""
	}
}

// Retry reports whether a request whose k-th attempt failed may be tried again, and after which
// wait. status is that of the engine's answer, 0 without one; err is the failure of a call without
// an answer, or the mistake in the hand-off of a 200. The caller waits longer if the engine's
// Retry-After says so. Attempts of which no byte was sent do not count in k: see RetryUnsent.
//
// A retry uses the budget that all requests share. The retry after a first attempt is never refused
// if the connection broke: when an engine dies, all its requests fail at once, and together they
// cause no more load on the other engines than they caused on the dead one.
func (s *Scheduler) Retry(k int, status int, err error) (backoff time.Duration, again bool) {
	retry := s.retries()
	if k >= retry.Attempts || !retryable(status, err) {
		return 0, false
	}
	s.lock()
	mustGrant := k == 1 && status == 0 && Broke(err) // the connection broke
	granted := s.budget.grantRetry(s.now, retry.Budget, mustGrant)
	s.unlock()
	if !granted {
		s.metrics.budgetExhausted.Inc()
		return 0, false
	}
	return Backoff(retry.Base, k), true
}
