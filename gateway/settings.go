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
	listed   map[string]bool // the config's own engines, by role and host:port
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
	all, _ := enginesOf(s)
	s.listed = make(map[string]bool, len(all))
	for key := range all {
		s.listed[key] = true
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
	for _, name := range cfg.ProfilesInUse("") {
		if v := cfg.Profiles[name].VocabSize; v < size {
			size = v
		}
	}
	if size == math.MaxInt {
		return 0
	}
	return size
}

// poolTTL is the configured one, else the shortest hold budget of the prefill
// engines in use.
func (s *settings) poolTTL() time.Duration {
	if s.Pool.TTL > 0 {
		return s.Pool.TTL
	}
	shortest := time.Duration(math.MaxInt64)
	for _, name := range s.ProfilesInUse(rolePrefill) {
		p := s.profiles[name]
		if b, err := p.HoldBudget(); err == nil && b < shortest {
			shortest = b
		}
	}
	if shortest == math.MaxInt64 {
		return 0
	}
	return shortest
}
