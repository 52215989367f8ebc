package roster

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/gateway/owner"
)

var anyState = []RankState{Down, Late, Out, Starting, Up, Paused, Halted, Unowned, Broken, Lost, Draining, Odd}

func but(out ...RankState) []RankState {
	return slices.DeleteFunc(slices.Clone(anyState), func(s RankState) bool { return s.in(out...) })
}

// legal says whether a rank may go from one state to another when something happens to its own
// engine, or to another one: the table of RankState.
func legal(what Event, own bool, from, to RankState) bool {
	move := func(froms, tos []RankState) bool { return from.in(froms...) && to.in(tos...) }
	both := func(a, b []RankState) bool { return move(a, b) || move(b, a) }
	switch what.(type) {
	case Health:
		if own {
			return move(but(Draining), anyState) || move([]RankState{Draining}, []RankState{Odd, Down})
		}
		return both([]RankState{Down, Out}, []RankState{Late, Up, Unowned, Lost, Draining}) || both([]RankState{Up}, []RankState{Paused}) ||
			both(anyState, []RankState{Broken, Odd})
	case Entered:
		return own && from == Absent && to == Down || own && from != Absent || legal(Health{}, false, from, to)
	case Removed:
		return own && to == Absent || legal(Health{}, false, from, to)
	case Stopped:
		return own && move(but(Odd, Down), []RankState{Draining})
	case Resumed:
		return own && move([]RankState{Draining}, but(Odd, Down))
	case Turned:
		return own && both([]RankState{Draining}, but(Odd, Down))
	case Owners:
		return both([]RankState{Unowned}, but(Draining, Odd, Down))
	case PauseBegun, PauseEnded:
		return both([]RankState{Out, Starting, Up, Paused}, []RankState{Halted}) || legal(Health{}, false, from, to)
	}
	return false
}

func TestOnlyLegalMoves(t *testing.T) {
	met := map[[2]RankState]bool{}
	rapid.Check(t, func(rt *rapid.T) {
		s := somewhere(rt, t)
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			s.tell() // which connector a model has depends on what served at the last Tick
			s.tell()
			before := s.states()
			name := rapid.SampledFrom(allNames).Draw(rt, "engine")
			event := rapid.OneOf(
				rapid.Just[Event](Removed{key(name)}), rapid.Just[Event](Entered{Engine: described(name)}),
				rapid.Map(rapid.Bool(), func(ours bool) Event {
					return Owners{Kind: owner.Groups, Scopes: map[string]Owned{"main": {Admits: ours}}}
				}),
				rapid.Map(rapid.Bool(), func(ours bool) Event {
					return Owners{Kind: owner.Regions, Scopes: map[string]Owned{"": {Admits: ours}}}
				}),
				rapid.SampledFrom([]Event{PauseBegun{"", "/pause"}, PauseBegun{"main", "/pause"}, PauseEnded{"", nil},
					PauseEnded{"main", []string{key(name)}}}),
			).Draw(rt, "event")
			if rapid.IntRange(0, 3).Draw(rt, "health") > 0 {
				event = drawn(rt, s, name)
			}
			s.tell(event)
			after := s.states()
			for rank := range before {
				if _, there := after[rank]; !there {
					after[rank] = Absent
				}
			}
			for rank, to := range after {
				from := before[rank]
				own := strings.HasPrefix(rank, key(name)+"/")
				require.True(rt, from == to || legal(event, own, from, to), "%s goes from %s to %s: %#v", rank, from, to, event)
				met[[2]RankState{from, to}] = true
			}
		}
	})
	require.Greater(t, len(met), 60, "moves that came about")
}
