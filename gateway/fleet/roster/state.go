package roster

import (
	"math"
	"slices"
	"time"
)

// RankState says whether a rank takes requests, and if not, the one reason that counts. An engine has a state, too:
// the state that holds for all of its ranks, whichever proxy admits to their group.
type RankState uint8

// States. Where several reasons hold, the one further down in this list counts, but no reason of a single rank or of its group counts
// for an engine that takes nothing anyway.
//
// Legal moves in one Tick (TestOnlyLegalMoves); "any" is any state but Absent. What is Odd may show one Tick later, because it depends on
// what served at the last one:
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
	Absent   RankState = iota // its engine is not there any more
	Late                      // its engine's answers do not come just now; requests wait for it
	Out                       // its engine answers, but requests failed there, and other engines serve its model
	Starting                  // its engine has not named its models yet
	Up                        // it takes requests
	Paused                    // requests failed there, and whether that is its engine's fault is open; another engine serves meanwhile
	Halted                    // it is paused, or its group re-forms or waits for its recovery; requests wait for it
	Unowned                   // another proxy admits to it, as its owner
	Broken                    // an engine of its group is down, and its ranks step together
	Lost                      // it is out of its group, by its engine's own answer
	Draining                  // an operator or a source of discovery stopped new requests to it
	Odd                       // its engine has another connector than the others of its model
	Down                      // its engine does not answer
)

// states has the name of each state, and why a rank in it takes no requests.
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

// Why says why a rank in that state takes no requests; empty: it takes them.
func (s RankState) Why() string { return states[s].why }

// in says whether the state is one of these.
func (s RankState) in(all ...RankState) bool { return slices.Contains(all, s) }

// serves says whether an engine in that state is in service, although it may get no new requests at this moment.
func (s RankState) serves() bool { return s.in(Starting, Up, Paused, Halted) }

// awaited says whether requests wait for a rank in that state.
func (s RankState) awaited() bool { return s.in(Late, Halted) }

// standing is an engine's place in the service. Requests that run on it, and what is charged for them, do not depend
// on it.
type standing struct {
	healthy RankState // its state by its answers
	kept    RankState // Draining or Unowned if one of these keeps new requests from it; else Up
	state   RankState // the state that follows from both
	served  bool      // it was in service before
	start   float64   // start time of the process that serves
	fresh   time.Time // when it came into service, while its share grows; zero: its share does not grow
	share   float64   // share of its slots that may be used now; below 1 while it is fresh
	odd     string    // why it cannot serve beside the other engines of its model; empty: it can
}

// limit is how many of n the engine may use now; 0: all.
func (s *standing) limit(n int) int {
	if s.share >= 1 {
		return 0
	}
	return max(1, int(math.Ceil(s.share*float64(n))))
}

// shareAt is the share of an engine that has been in service for a time of age.
func shareAt(age, slow time.Duration) float64 {
	return min(1, firstShare+(1-firstShare)*max(0, age.Seconds())/slow.Seconds())
}

const (
	firstShare = 0.1 // the share of its slots that an engine gets at once
	slowSteps  = 30  // steps of a slow start
	slowProbes = 8   // unanswered probes that a prefill engine may have at the end of a slow start
)
