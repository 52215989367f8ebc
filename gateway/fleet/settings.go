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

// Settings are a config, with values for engines that are derived from it. They never change: a reload replaces them.
type Settings struct {
	*config.Config
	Profiles map[string]*mooncake.Profile
	Listed   map[string]bool // engines that the config lists, by role and host:port
}

// NewSettings derives the settings from a config that was validated: the profiles by name, and the keys of the engines that the config
// lists. Discovery leaves the listed engines alone.
func NewSettings(cfg *config.Config) *Settings {
	s := &Settings{Config: cfg, Profiles: map[string]*mooncake.Profile{}}
	for name, p := range cfg.Profiles {
		s.Profiles[name] = &p
	}
	engines, _ := enginesOf(s) // by role and host:port; their order does not matter here
	s.Listed = make(map[string]bool, len(engines))
	for key := range engines {
		s.Listed[key] = true
	}
	return s
}

// Tier returns the config of the prefill tier, completed with values of other config keys.
func (s *Settings) Tier() prefill.Config {
	c := s.Prefill
	if c.Policy == "least-tokens" && c.Work != "" { // prefill.work is a parameter of this policy
		c.Policy, c.Work = c.Policy+":work="+c.Work, ""
	}
	// With an early connector, requests wait for a decode rank before their prefill, so the limits of the pool apply.
	c.Early = prefill.QueueConfig{Max: s.Pool.Size, Timeout: cmp.Or(s.Pool.TTL, c.Queue.Timeout)}
	// A config that gives the time per token gives a latency on which the tier may rely before it has learned one.
	c.Calibration.Known = c.Calibration.TPMs > 0
	c.Push.Lead = s.Bind.Lead // how early a prefill engine may get a prompt that already has its decode rank
	return c
}

// HoldTimeout is the longest time for which engines may hold blocks for a hand-off that is neither used nor discarded: the longest
// kv_hold_timeout of all profiles. If no profile has one, there are no such hand-offs, but a prefill may run, and hold blocks, for
// probe_timeout, so this counts instead. 0: there are no profiles.
func (s *Settings) HoldTimeout() (longest time.Duration) {
	for _, p := range s.Profiles {
		longest = max(longest, p.KVHoldTimeout)
	}
	if longest == 0 && len(s.Profiles) > 0 {
		return s.Limits.ProbeTimeout
	}
	return longest
}

// PoolTTL is how long a request may wait in the pool: the configured TTL or, without one, the shortest hold budget of the profiles that
// prefill engines use. With an early connector, requests wait before their prefill, when no engine holds KV for them. For the profile of
// such a connector, the time that a request may wait for a prefill engine counts instead. 0: no prefill engine uses a valid profile.
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
		if budget, err := p.HoldBudget(); err == nil && budget < shortest { // err: the profile is not valid
			shortest = budget
		}
	}
	if shortest == none {
		return 0
	}
	return shortest
}

// enginesOf lists the engines of a config by key (role and host:port). order has the keys in the order of the config.
func enginesOf(s *Settings) (all map[string]roster.Listed, order []string) {
	all = map[string]roster.Listed{}
	for role, e := range s.Engines.All() {
		id, _ := config.InstanceID(e.URL) // the URL was validated
		all[role+" "+id] = roster.Listed{Role: role, Conf: e}
		order = append(order, role+" "+id)
	}
	return all, order
}
