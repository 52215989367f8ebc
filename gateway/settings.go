package gateway

import (
	"math"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
)

// settings are the config in force with what follows from it. They are never
// changed: a reload puts others in their place.
type settings struct {
	*fleet.Settings
	accept openai.Limits
}

// newSettings works out what follows from a config. Files that it names change by
// themselves (secrets.go).
func newSettings(cfg *config.Config) *settings {
	return &settings{fleet.NewSettings(cfg), openai.Limits{
		VocabSize: vocabSize(cfg), ChatTemplate: cfg.Limits.ChatTemplate, MediaHosts: cfg.Limits.MediaHosts,
	}}
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
