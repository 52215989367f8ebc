package prefill

// Configure replaces what a running tier may change: policies, KV threshold,
// push, calibration, hotspots, affinity, shadows, scraping, queue and retries;
// the rest of c is not looked at. Accounts, gates, learned lines and requests that wait keep what they have.
// A config that cannot work changes nothing.
func (t *Tier) Configure(c Config) error {
	c.Scraper = t.cfg.Scraper // of those that never change
	if err := c.Validate(); err != nil {
		return err
	}
	c = c.withDefaults()
	policies, err := newPolicies(c.Policies)
	if err != nil {
		return err
	}
	chosen, err := policies.library.Parse(c.Policy)
	if err != nil {
		return err
	}
	shadows, err := policies.all(c.Shadow)
	if err != nil {
		return err
	}
	t.lock()
	t.policies, t.policy, t.shadows = policies, chosen, shadows
	t.steerBy(c)
	t.cfg.KVThreshold, t.cfg.Push, t.cfg.Calibration = c.KVThreshold, c.Push, c.Calibration
	t.fit.Configure(c.Calibration)
	t.cfg.Scrape, t.cfg.Queue, t.cfg.Retry = c.Scrape, c.Queue, c.Retry
	for _, c := range t.candidates {
		t.updateGate(c)
	}
	t.unlock()
	t.tellRun()
	return nil
}
