package fleet

import (
	"math"
	"time"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// NewSettings works out what follows from a config.
func NewSettings(cfg *config.Config) *Settings {
	s := &Settings{Config: cfg, Profiles: map[string]*mooncake.Profile{}}
	for name, p := range cfg.Profiles {
		s.Profiles[name] = &p
	}
	all, _ := enginesOf(s)
	s.Listed = make(map[string]bool, len(all))
	for key := range all {
		s.Listed[key] = true
	}
	return s
}

// HoldTimeout is the longest that a prefiller keeps KV blocks for somebody.
func (s *Settings) HoldTimeout() (longest time.Duration) {
	for _, p := range s.Profiles {
		longest = max(longest, p.KVHoldTimeout)
	}
	return longest
}

// PoolTTL is the configured one, else the shortest hold budget of the prefill
// engines in use. What waits before its prefill is held nowhere: it may wait as long as
// requests may for a prefill engine.
func (s *Settings) PoolTTL() time.Duration {
	if s.Pool.TTL > 0 {
		return s.Pool.TTL
	}
	shortest := time.Duration(math.MaxInt64)
	for _, name := range s.ProfilesInUse(Prefill) {
		p := s.Profiles[name]
		if p.Early() {
			shortest = min(shortest, s.Prefill.Queue.Timeout)
			continue
		}
		if b, err := p.HoldBudget(); err == nil && b < shortest {
			shortest = b
		}
	}
	if shortest == math.MaxInt64 {
		return 0
	}
	return shortest
}
