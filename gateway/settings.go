package gateway

import (
	"math"
	"time"

	"evenkeel/gateway/config"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
)

// settings are the config in force with what follows from it. They are never
// changed: a reload puts others in their place.
type settings struct {
	*config.Config
	profiles map[string]*mooncake.Profile
	accept   openai.Limits
}

// newSettings works out what follows from a config. Files that it names change by
// themselves (secrets.go).
func newSettings(cfg *config.Config) *settings {
	s := &settings{Config: cfg, profiles: map[string]*mooncake.Profile{}}
	for name, p := range cfg.Profiles {
		s.profiles[name] = &p
	}
	s.accept = openai.Limits{
		VocabSize: vocabSize(cfg), ChatTemplate: cfg.Limits.ChatTemplate, MediaHosts: cfg.Limits.MediaHosts,
	}
	return s
}

// conf are the settings in force. Who needs two of them that belong together
// asks once.
func (g *Gateway) conf() *settings { return g.current.Load() }

// vocabSize is the smallest of the profiles in use, 0 when any is unknown: a
// token id must be good for whichever engine gets it.
func vocabSize(cfg *config.Config) int {
	size := math.MaxInt
	for _, e := range append(append([]config.Engine{}, cfg.Engines.Prefill...), cfg.Engines.Decode...) {
		if v := cfg.Profiles[e.Profile].VocabSize; v < size {
			size = v
		}
	}
	if size == math.MaxInt {
		return 0
	}
	return size
}

// poolTTL is the configured one, else the shortest hold budget of the prefill
// engines in use (contract 2.4).
func (s *settings) poolTTL() time.Duration {
	if s.Pool.TTL > 0 {
		return s.Pool.TTL
	}
	shortest := time.Duration(math.MaxInt64)
	for _, e := range s.Engines.Prefill {
		p := s.profiles[e.Profile]
		if b, err := p.HoldBudget(); err == nil && b < shortest {
			shortest = b
		}
	}
	if shortest == math.MaxInt64 {
		return 0
	}
	return shortest
}
