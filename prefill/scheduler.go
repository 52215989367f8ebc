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

// New returns a scheduler without candidates, and registers its metrics with cfg.Registerer. With cfg.Clock, the clock of a simulation, it
// has no timer: the simulation calls Wake itself. New fails if a setting cannot work, or if the metrics cannot be registered.
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
		modelsUnknown: true, // no candidate has named its models yet
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
		s.timer.Stop() // the timer does not run until setTimer starts it
	}
	if cfg.Registerer != nil {
		if err := s.metrics.register(cfg.Registerer, s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// lock takes the lock, sets the time, and ends the charges that have expired: the engine has freed their KV by its own timeout.
func (s *Scheduler) lock() {
	s.mu.Lock()
	s.now = s.clock()
	for load := s.ledger.Expire(s.now); load != nil; load = s.ledger.Expire(s.now) {
		s.dropIfUnused(s.candidates[load.Owner]) // this may have been the last charge of a candidate that was removed
	}
}

// unlock serves the waiters that can be served now, sets the timer for the others, and releases the lock. It then logs, without the lock,
// which classes of requests (steer.Hotspots) have become hot, or are not hot any more.
func (s *Scheduler) unlock() {
	s.manager.serveWaiters()
	if s.queue.Len() > 0 { // without waiters the timer is left alone: if it fires, it changes nothing
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
			zap.Int("k", change.K)) // for so many requests in a row, an engine that holds the prefix had the best score
	}
}

// Wake considers all waiting requests again. The caller calls it when a place in the pool becomes free, and when Config.Decode
// returns more slots than before.
func (s *Scheduler) Wake() {
	s.lock()
	s.unlock() // serves the requests that can be served now
}

// NextWake is the next time at which a waiter may be answered without any event. exists is false if no request waits, or if only an event
// can help the waiters.
func (s *Scheduler) NextWake() (at time.Time, exists bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wakeAt, s.queue.Len() > 0 && !s.wakeAt.IsZero()
}

// setTimer sets the timer to wakeAt.
func (s *Scheduler) setTimer() {
	switch {
	case s.timer == nil: // a simulation asks NextWake, and calls Wake itself
	case s.wakeAt.IsZero(): // only an event can help a waiter
		s.timer.Stop()
	default:
		s.timer.Reset(s.wakeAt.Sub(s.now))
	}
}

// SetCandidates replaces the candidates. A candidate that keeps its ID keeps its load, gate and circuit; a
// candidate that is gone keeps them until its last charge ends. Of candidates with the same ID the first counts.
func (s *Scheduler) SetCandidates(candidates []Candidate) {
	s.lock()
	s.replaceCandidates(candidates)
	s.unlock()
	s.wakeRun()
}

// wakeRun makes Run look at the candidates and the scrape settings again. It does not wait.
func (s *Scheduler) wakeRun() {
	select {
	case s.changed <- struct{}{}:
	default: // an earlier change is still pending
	}
}

// AvoidFor takes an engine whose hand-offs are lost out of service for the time d. Then one prompt is a trial. If d is 0, hand-offs arrive
// again. If no other engine takes prompts, the engine gets them all the same.
func (s *Scheduler) AvoidFor(instance string, d time.Duration) {
	s.lock()
	defer s.unlock()
	var at time.Time
	if d > 0 {
		at = s.now.Add(d)
	}
	s.setTrial(instance, at)
}

// setTrial sets when the candidates of an engine whose hand-offs are lost get the next prompt.
func (s *state) setTrial(instance string, at time.Time) {
	for _, c := range s.candidates {
		if c.Instance == instance {
			c.trialAt, c.trialLease = at, 0
		}
	}
}

// Forgive cancels a failure of a candidate that was the request's fault: another engine failed at the same request, too.
func (s *Scheduler) Forgive(id string) {
	s.lock()
	defer s.unlock()
	if c := s.candidates[id]; c != nil { // nil: the candidate was removed meanwhile
		c.circuit.Forgive()
		c.lastFault = ""
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
func (s *Scheduler) Retry(k int, status int, err error) (backoff time.Duration, again bool) {
	retry := s.retries()
	if k >= retry.Attempts || !retryable(status, err) {
		return 0, false
	}
	s.lock()
	mustGrant := k == 1 && status == 0 && Broke(err) // the first attempt had no answer, because the connection broke
	granted := s.budget.grantRetry(s.now, retry.Budget, mustGrant)
	s.unlock()
	if !granted {
		s.metrics.budgetExhausted.Inc()
		return 0, false
	}
	return Backoff(retry.Base, k), true
}
