package prefill

import (
	"fmt"

	"evenkeel/prefill/steer"
)

// Configure changes the settings that a running tier can change: policies, KV threshold, push, calibration, hotspots,
// affinity, scraping, queue and retries. It ignores the rest of c. Accounts, gates, learned lines and waiting requests
// keep their state. If c is not valid, Configure changes nothing.
func (t *Scheduler) Configure(c Config) error {
	c.Scraper = t.cfg.Scraper // Validate needs it; the scraper never changes
	if err := c.Validate(); err != nil {
		return err
	}
	c = c.withDefaults()
	policies, err := steer.NewPolicies(c.Policies, c.Policy, t.cfg.Clock == nil)
	if err != nil {
		return err
	}
	t.lock()
	t.steer.Policies = policies
	t.steer.Overrule(c.Hotspot.Enabled, c.Affinity)
	t.cfg.Hotspot, t.cfg.Affinity = c.Hotspot, c.Affinity
	t.cfg.KVThreshold, t.cfg.Push, t.cfg.Calibration = c.KVThreshold, c.Push, c.Calibration
	t.fit.Configure(c.Calibration)
	t.cfg.Scrape, t.cfg.Queue, t.cfg.Early, t.cfg.Retry = c.Scrape, c.Queue, c.Early, c.Retry
	t.ledger.Configure(t.cfg.ledger())
	for _, c := range t.candidates {
		c.load.UpdateGate(t.now)
	}
	t.unlock()
	t.tellRun()
	return nil
}

// CheckPolicy returns an error if a request names a policy that does not exist or has wrong parameters.
func (t *Scheduler) CheckPolicy(spec string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.steer.Named(spec)
	return badPolicy(err)
}

// SetPolicy changes the policy for requests that name none.
func (t *Scheduler) SetPolicy(spec string) error {
	t.lock()
	defer t.unlock()
	return badPolicy(t.steer.Use(spec))
}

// Policy is the present policy for requests that name none.
func (t *Scheduler) Policy() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.steer.Usual().String()
}

func badPolicy(err error) error {
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrBadPolicy, err)
	}
	return err
}
