package prefill

import (
	"fmt"

	"evenkeel/prefill/steer"
)

// Configure changes the settings that a running scheduler can change: policies, KV threshold, push, calibration, hotspots,
// affinity, scraping, queue and retries. It ignores the rest of c. Accounts, gates, learned latencies and waiting requests
// keep their state. If c is not valid, Configure changes nothing.
func (s *Scheduler) Configure(c Config) error {
	c.Scraper = s.cfg.Scraper // Validate needs it; the scraper never changes
	if err := c.Validate(); err != nil {
		return err
	}
	c = c.withDefaults()
	policies, err := steer.NewPolicies(c.Policies, c.Policy, s.cfg.Clock == nil)
	if err != nil {
		return err
	}
	s.lock()
	s.overrides.Policies = policies
	s.overrides.Configure(c.Hotspot.Enabled, c.Affinity)
	s.cfg.Hotspot, s.cfg.Affinity = c.Hotspot, c.Affinity
	s.cfg.KVThreshold, s.cfg.Push, s.cfg.Calibration = c.KVThreshold, c.Push, c.Calibration
	s.fit.Configure(c.Calibration)
	s.cfg.Scrape, s.cfg.Queue, s.cfg.Early, s.cfg.Retry = c.Scrape, c.Queue, c.Early, c.Retry
	s.ledger.Configure(s.cfg.ledger())
	for _, c := range s.candidates { // the gates must follow the new KV threshold
		c.load.UpdateGate(s.now)
	}
	s.unlock()
	s.wakeRun()
	return nil
}

// CheckPolicy returns an error if a request names a policy that does not exist or has wrong parameters.
func (s *Scheduler) CheckPolicy(spec string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.overrides.Named(spec)
	return badPolicy(err)
}

// SetPolicy changes the policy for requests that name none.
func (s *Scheduler) SetPolicy(spec string) error {
	s.lock()
	defer s.unlock()
	return badPolicy(s.overrides.SetDefault(spec))
}

// Policy is the present policy for requests that name none.
func (s *Scheduler) Policy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.overrides.Default().String()
}

// badPolicy wraps an error in ErrBadPolicy, by which callers recognise it; nil stays nil.
func badPolicy(err error) error {
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrBadPolicy, err)
	}
	return err
}
