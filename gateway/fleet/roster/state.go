package roster

import (
	"math"
	"slices"
	"time"
)

// RankState says whether a rank takes requests, and if not, the most important reason. An engine has a RankState, too: the state of all its
// ranks as far as it does not depend on a single rank or its group.
type RankState uint8

// States of a rank. If several reasons apply, the one furthest down in this list counts. But if an engine takes no requests at all, the
// reasons of single ranks and groups do not count.
//
// Legal moves in one Tick (TestOnlyLegalMoves); "any" is any state but Absent. Odd may appear one Tick late, because it depends on which
// engines served at the last Tick:
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
	Absent   RankState = iota // the rank's engine is not there any more
	Late                      // the engine's health checks get no answer for the moment; requests wait for the rank
	Out                       // the engine answers, but requests failed there, and other engines serve its model
	Starting                  // the engine has not named its models yet
	Up                        // the rank takes requests
	Paused                    // evenkeel paused it: requests failed there, and another engine serves until it is known whose fault this was
	Halted                    // the engine stands still: a call has paused it, or its group re-forms or recovers; requests wait for the rank
	Unowned                   // another proxy owns the rank's region or group
	Broken                    // an engine of the rank's group is down, and the ranks of the group step together
	Lost                      // the engine reports that the rank is out of its group
	Draining                  // an operator or a source of discovery stopped new requests to the rank
	Odd                       // the engine has another connector than the others of its model
	Down                      // the engine does not answer
)

// states has the name of each state, and the reason why a rank in this state takes no requests.
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

// Why says why a rank in this state takes no requests; empty: it takes requests.
func (s RankState) Why() string { return states[s].why }

func (s RankState) in(states ...RankState) bool { return slices.Contains(states, s) }

// serves says whether an engine in that state is in service, although it may get no new requests at this moment.
func (s RankState) serves() bool { return s.in(Starting, Up, Paused, Halted) }

// awaited says whether requests wait for a rank in that state.
func (s RankState) awaited() bool { return s.in(Late, Halted) }

// serviceState says whether an engine gets new requests, and how many. It has no effect on requests that already run on the engine.
type serviceState struct {
	byHealth          RankState // the engine's state by its own answers
	withheld          RankState // Draining or Unowned if that keeps new requests away; else Up
	state             RankState // the state that follows from byHealth and withheld
	hasServed         bool      // the engine has been in service before
	servedStart       float64   // start time of the process that served last, in Unix seconds
	slowStartBegan    time.Time // when the engine's slow start began; zero: it is not in a slow start
	share             float64   // share of the engine's slots that may be used now; below 1 during a slow start
	connectorConflict string    // why the engine cannot serve beside the other engines of its model; empty: it can
}

// limitOf returns how many of n slots or probes the engine may use now; 0: all of them.
func (s *serviceState) limitOf(n int) int {
	if s.share >= 1 {
		return 0
	}
	return max(1, int(math.Ceil(s.share*float64(n))))
}

// slowStartShare is the share of its slots that an engine may use in a slow start. It grows evenly from firstShare to 1. age is how long
// ago the slow start began, and duration is how long a slow start takes.
func slowStartShare(age, duration time.Duration) float64 {
	return min(1, firstShare+(1-firstShare)*max(0, age.Seconds())/duration.Seconds())
}

const (
	firstShare = 0.1 // share of the slots that an engine may use when its slow start begins
	slowSteps  = 30  // the share grows in this many steps
	slowProbes = 8   // unanswered probes that a prefill engine may have at the end of a slow start
)
