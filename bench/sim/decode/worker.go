package decode

import (
	"evenkeel/dispatcher/virtual"
)

// job is one request of a run. Its number is its place in order of arrival; the
// board knows it by number+1.
type job struct {
	prompt  int32 // tokens of the next or present leg, with those that earlier ones emitted
	output  int32 // tokens in all
	age     int32 // generated in earlier legs
	state   jobState
	key     uint64
	arrival float64 // ms
	entered float64 // the pool, or the line in front of it, last time
	first   float64 // end of the step of its first token; NaN before
}

type jobState uint8

const (
	jobAhead   jobState = iota // not there yet, in prefill, or in line for it
	jobWaiting                 // in the pool
	jobPlaced                  // on a rank
	jobDone
	jobFailed // no rank can ever hold it
)

// worker is one rank's engine, and when it comes and goes. More than its slots wait in it only
// where policies are immediate or requests are sent ahead.
type worker struct {
	*virtual.Rank
	plan Rank

	up, gone bool // takes work; is no longer part of its group
}

// group is ranks behind one barrier.
type group struct {
	*virtual.Group
	later []*worker // that will join
	told  bool      // its law, where that is not learned
	plan  *Group
}
