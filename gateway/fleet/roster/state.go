package roster

import (
	"math"
	"slices"
	"time"
)

// RankState says whether a rank takes requests, and if not, the most important reason. An engine's
// is that of all its ranks.
type RankState uint8

// States of a rank. If several reasons apply, the one furthest down in this list counts. But if an
// engine takes no requests at all, the reasons of single ranks and groups do not count.
//
// Legal moves in one Tick (TestOnlyLegalMoves); "any" is any state but Absent. Odd may appear one
// Tick late, because it depends on which engines served at the last Tick:
//
//	what happens           its own ranks                                  ranks of other engines
//	an engine comes in     Absent -> Down                                 as after a health check
//	it leaves              any -> Absent                                  as after a health check
//	a health check         any -> any, but Draining -> Odd, Down          Down, Out <-> Late, Up, or what hides these (Unowned, Lost,
//	                                                                      Draining); Up <-> Paused; any <-> Broken, Odd
//	a drain begins         any but Odd, Down -> Draining                  none
//	it ends                Draining -> any but Odd, Down                  none
//	another proxy admits   any but Draining, Odd, Down -> Unowned         the same, because a scope is more than one engine
//	a pause begins, ends   Out, Starting, Up, Paused <-> Halted           the same, and as after a health check
//	this proxy admits      Unowned -> any but Draining, Odd, Down         the same
const (
	Absent RankState = iota
	Late             // its health checks get no answer for the moment; requests wait for the rank
	Out              // requests failed there, and other engines serve its model
	Starting
	Up
	// by evenkeel: requests failed there, and another engine serves until it is known whose fault this
	// was
	Paused
	Halted // a call has paused it, or its group re-forms or recovers; requests wait
	Unowned
	Broken // an engine of its group is down, and the ranks step together
	Lost   // its engine reports that it is out of its group
	Draining
	Odd // its engine has another connector than the others of its model
	Down
)

var states = [...]struct{ name, why string }{
	Absent:   {"absent", "its engine is not there any more"},
	Late:     {"late", "its engine's answers do not come just now, and requests wait for it"},
	Out:      {"out", "requests failed there"},
	Starting: {"starting", "its engine has not named its models yet"},
	Up:       {"up", ""},
	Paused:   {"paused", "requests failed there, and whose fault that is will be known in a moment"},
	Halted:   {"halted", "it is paused, or its group re-forms or waits for its recovery, and requests wait for it"},
	Unowned:  {"unowned", "another proxy owns it"},
	Broken:   {"broken", "an engine of its group is down, and all ranks of the group step together"},
	Lost:     {"lost", "its engine goes on without it"},
	Draining: {"draining", "it drains"},
	Odd:      {"odd", "its engine has another connector than the others of its model"},
	Down:     {"down", "its engine does not answer"},
}

func (s RankState) String() string { return states[s].name }

// Why is empty if the rank takes requests.
func (s RankState) Why() string { return states[s].why }

func (s RankState) in(states ...RankState) bool { return slices.Contains(states, s) }

// serves: the engine is in service, although it may get no new requests at this moment.
func (s RankState) serves() bool { return s.in(Starting, Up, Paused, Halted) }

// awaited: requests wait for the rank.
func (s RankState) awaited() bool { return s.in(Late, Halted) }

// serviceState has no effect on requests that already run.
type serviceState struct {
	byHealth          RankState // by its own answers
	withheld          RankState // Draining or Unowned if that keeps new requests away; else Up
	state             RankState // follows from the two
	hasServed         bool
	servedStart       float64   // of the process that served last, in Unix seconds
	slowStartBegan    time.Time // zero: the engine is not in a slow start
	share             float64   // of the slots that may be used now; below 1 during a slow start
	connectorConflict string    // why it cannot serve beside the other engines of its model
}

// limitOf returns how many of n may be used now; 0: all.
func (s *serviceState) limitOf(n int) int {
	if s.share >= 1 {
		return 0
	}
	return max(1, int(math.Ceil(s.share*float64(n))))
}

// slowStartShare grows evenly from firstShare to 1.
func slowStartShare(age, duration time.Duration) float64 {
	return min(1, firstShare+(1-firstShare)*max(0, age.Seconds())/duration.Seconds())
}

const (
	firstShare = 0.1 // of the slots when a slow start begins
	slowSteps  = 30  // steps in which the share grows
	slowProbes = 8   // unanswered probes of a prefill engine at the end of a slow start
)
