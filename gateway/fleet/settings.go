package fleet

import (
	"cmp"
	"math"
	"time"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Settings are a config with derived values. They never change: a reload replaces them.
type Settings struct {
	*config.Config
	Profiles map[string]*mooncake.Profile
	Listed   map[string]bool // by role and host:port; discovery leaves these engines alone
}

// NewSettings takes a config that was validated.
func NewSettings(cfg *config.Config) *Settings {
	s := &Settings{Config: cfg, Profiles: map[string]*mooncake.Profile{}}
	for name, p := range cfg.Profiles {
		s.Profiles[name] = &p
	}
	engines, _ := enginesOf(s)
	s.Listed = make(map[string]bool, len(engines))
	for key := range engines {
		s.Listed[key] = true
	}
	return s
}

// Tier completes the config of the prefill tier with values of other keys.
func (s *Settings) Tier() prefill.Config {
	c := s.Prefill
	if c.Policy == "least-tokens" && c.Work != "" { // prefill.work is a parameter of this policy
		c.Policy, c.Work = c.Policy+":work="+c.Work, ""
	}
	// With an early connector, requests wait for a decode rank before their prefill, so the limits of
	// the pool apply.
	c.Early = prefill.QueueConfig{Max: s.Pool.Size, Timeout: cmp.Or(s.Pool.TTL, c.Queue.Timeout)}
	// The tier may rely on it before it has learned a latency.
	c.Calibration.Known = c.Calibration.TPMs > 0
	c.Push.Lead = s.Bind.Lead
	return c
}

// HoldTimeout is the longest time for which engines may hold blocks for a hand-off that is neither
// used nor discarded. If no profile has one, a prefill may still hold blocks for probe_timeout. 0:
// there are no profiles.
func (s *Settings) HoldTimeout() (longest time.Duration) {
	for _, p := range s.Profiles {
		longest = max(longest, p.KVHoldTimeout)
	}
	if longest == 0 && len(s.Profiles) > 0 {
		return s.Limits.ProbeTimeout
	}
	return longest
}

// PoolTTL is how long a request may wait in the pool: as configured, or the shortest hold budget of
// the prefill profiles. With an early connector no engine holds KV meanwhile, so the limit of the
// arrival queue counts. 0: no valid profile.
func (s *Settings) PoolTTL() time.Duration {
	if s.Pool.TTL > 0 {
		return s.Pool.TTL
	}
	const none = time.Duration(math.MaxInt64)
	shortest := none
	for _, name := range s.ProfilesInUse(roster.Prefill) {
		p := s.Profiles[name]
		if p.Early() {
			shortest = min(shortest, s.Prefill.Queue.Timeout)
			continue
		}
		// err: the profile is not valid
		if budget, err := p.HoldBudget(); err == nil && budget < shortest {
			shortest = budget
		}
	}
	if shortest == none {
		return 0
	}
	return shortest
}

// enginesOf lists engines by role and host:port, and the keys in the order of the config.
func enginesOf(s *Settings) (all map[string]roster.Listed, order []string) {
	all = map[string]roster.Listed{}
	for role, e := range s.Engines.All() {
		id, _ := config.InstanceID(e.URL) // the URL was validated
		all[role+" "+id] = roster.Listed{Role: role, Conf: e}
		order = append(order, role+" "+id)
	}
	return all, order
}
