package fleet

import (
	"strings"

	"evenkeel/gateway/fleet/roster"
)

type (
	// Published is the picture that is in force.
	Published = roster.Published
	// Rank is a place that a decode leg can be sent to.
	Rank = roster.Rank
	// Route is where a model's requests go.
	Route = roster.Route
	// Whole is an engine that serves a request alone.
	Whole = roster.Whole
	// Birth is what made a hand-off.
	Birth = roster.Birth
	// Place is where a call to an engine runs.
	Place = roster.Place
	// Pause has the engines of a group get nothing new.
	Pause = roster.Pause
	// EngineStatus is what is known of one engine.
	EngineStatus = roster.EngineStatus
	// DrainStatus is what is left on an engine or rank that drains.
	DrainStatus = roster.DrainStatus
)

// Roles of an engine.
const (
	Prefill    = roster.Prefill
	Decode     = roster.Decode
	Aggregated = roster.Aggregated
)

// ErrNoSuchEngine is what Remove and Drain answer for an unknown id.
var ErrNoSuchEngine = roster.ErrNoSuchEngine

// Called is a board as people read its name, or the name of a group with it; aggregated says that its ranks prefill and decode.
func Called(board string) (name string, aggregated bool) {
	model, region, ok := cutLast(board, roster.AggregatedMark)
	if !ok || region != "" && !strings.HasPrefix(region, roster.RegionMark) {
		return board, false
	}
	return model + region + " (aggregated)", true
}

func cutLast(s, mark string) (before, after string, found bool) {
	if i := strings.LastIndex(s, mark); i >= 0 {
		return s[:i], s[i+len(mark):], true
	}
	return s, "", false
}
