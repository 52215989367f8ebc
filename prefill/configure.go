package prefill

import (
	"fmt"

	"evenkeel/prefill/steer"
)

// Configure changes the settings that a running scheduler can change: policies, KV threshold, push,
// calibration, hotspots, affinity, scraping, queue and retries. Accounts, gates, learned latencies
// and waiting requests keep their state. If the new config is not valid, nothing changes.
func (s *Scheduler) Configure(next Config) error {
	next.Scraper = s.cfg.Scraper // Validate needs it; it never changes
	if err := next.Validate(); err != nil {
		return err
	}
	next = next.withDefaults()
	forServing := s.cfg.Clock == nil // a simulation has further policies
	policies, err := steer.NewPolicies(next.Policies, next.Policy, forServing)
	if err != nil {
		return err
	}
	s.lock()
	s.steering.Policies = policies
	s.steering.Configure(next.Hotspot.Enabled, next.Affinity)
	s.cfg.Hotspot, s.cfg.Affinity = next.Hotspot, next.Affinity
	s.cfg.KVThreshold, s.cfg.Push, s.cfg.Calibration = next.KVThreshold, next.Push, next.Calibration
	s.fit.Configure(next.Calibration)
	s.cfg.Scrape, s.cfg.Queue, s.cfg.Early, s.cfg.Retry = next.Scrape, next.Queue, next.Early, next.Retry
	s.ledger.Configure(s.cfg.ledger())
	for _, c := range s.candidates { // for the new KV threshold
		c.load.UpdateGate(s.now)
	}
	s.unlock()
	s.wakeRun() // the scrape settings may have changed
	return nil
}

func (s *Scheduler) CheckPolicy(spec string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.steering.Named(spec)
	return wrapPolicyError(err)
}

// SetPolicy changes the policy for requests that name none.
func (s *Scheduler) SetPolicy(spec string) error {
	s.lock()
	defer s.unlock()
	return wrapPolicyError(s.steering.SetDefault(spec))
}

func (s *Scheduler) Policy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.steering.Default().String()
}

func wrapPolicyError(err error) error {
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrBadPolicy, err)
	}
	return err
}
