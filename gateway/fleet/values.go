package fleet

import (
	"strings"

	"evenkeel/gateway/fleet/roster"
)

// Published and the others are types of the roster.
type (
	Published    = roster.Published
	Rank         = roster.Rank
	Route        = roster.Route
	Whole        = roster.Whole
	Birth        = roster.Birth
	Place        = roster.Place
	EngineStatus = roster.EngineStatus
	DrainStatus  = roster.DrainStatus
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
