package reload

import (
	"math"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
)

// Settings are the config in force with what follows from it. They never change: a
// reload puts others in their place.
type Settings struct {
	*fleet.Settings
	Accept openai.Limits // of what a client may send
}

// newSettings works out what follows from a config. Files that it names change by
// themselves (secrets.go).
func newSettings(cfg *config.Config) *Settings {
	return &Settings{fleet.NewSettings(cfg), openai.Limits{
		VocabSize: vocabSize(cfg), ChatTemplate: cfg.Limits.ChatTemplate, MediaHosts: cfg.Limits.MediaHosts,
	}}
}

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
