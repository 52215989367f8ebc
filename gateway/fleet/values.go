package fleet

import (
	"strings"

	"evenkeel/gateway/fleet/roster"
)

type (
	// Published is a picture of the fleet at one moment.
	Published = roster.Published
	// Rank is a rank to which a decode call can be sent.
	Rank = roster.Rank
	// Route says where a model's requests go.
	Route = roster.Route
	// Whole is an engine that serves a whole request, without a split into prefill and decode.
	Whole = roster.Whole
	// Birth identifies the engine process that made a hand-off.
	Birth = roster.Birth
	// Place is where a call to an engine runs.
	Place = roster.Place
	// Pause stops new requests to the engines of a group.
	Pause = roster.Pause
	// EngineStatus says whether an engine answers, which state it is in and why, and which models it serves.
	EngineStatus = roster.EngineStatus
	// DrainStatus says how much work is left on an engine or rank that drains.
	DrainStatus = roster.DrainStatus
)

// Roles of an engine.
const (
	Prefill    = roster.Prefill
	Decode     = roster.Decode
	Aggregated = roster.Aggregated
)

// ErrNoSuchEngine is what Remove and Drain return for an unknown id.
var ErrNoSuchEngine = roster.ErrNoSuchEngine

// Called returns the name of a board, or of a group with its board, in a form for people. aggregated says that the ranks of the board both
// prefill and decode.
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
