package engine

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Status is what the monitor knows about an instance. Models, version and memory stay known while
// it is down.
type Status struct {
	Up bool
	// Late: it hangs, but its last good check was less than Standstill ago, so requests wait.
	Late bool
	// Hangs: it took a connection but did not answer its last check, and no stream sent anything.
	Hangs     bool
	Err       error     // why it is down, or a problem that it has although it is up
	Since     time.Time // when Up last changed
	Changed   time.Time // when the result of State last changed
	Models    []Model
	Version   string
	Memories  Memories // by rank; empty: unknown
	StartTime float64  // of the process, in Unix seconds; 0: unknown

	// Out is why no request should go to the engine although it is up: earlier ones failed. Wedged: a
	// canary failed, too.
	Out    error
	Wedged bool

	// Accused is why no new request should go there for now: its core gives no sign of life, or it is
	// not known yet whether it is at fault for several failed requests.
	Accused error

	// Moved is set once the engine's name resolves to another address.
	Moved Moved

	// Halt is why requests wait for the engine: its group re-forms or waits for recovery, or it is
	// paused.
	Halt error
	// RankCount is how many ranks the engine has, by its last refusal of a rank that it lacks; ranks
	// from this number on get no requests. 0: none was refused since the facts were read.
	RankCount int
}

// State is the state of an instance. If several facts apply, the state that stands first in this
// list counts, because it explains the others.
//
// Legal moves (TestStatesMoveAsTheirTableSays); "any" is any state:
//
//	what happens                       from -> to
//	a health check                     any -> any, but only what a canary has found Wedged is Wedged
//	no connection, or it says retired  any -> Down
//	it refuses all requests            Up, Accused, Out, Wedged -> Halted
//	requests fail                      Up, Accused -> Out
//	a request is served                Out, Wedged -> Up, Accused
//	a canary fails                     Up, Accused, Out -> Wedged
//	a canary passes                    Out, Wedged, Accused -> Up, Accused
//	an accusation begins or ends       Up <-> Accused
//	an operator's hold begins          all but Down, Late -> Halted
//	it ends                            Halted -> Up, Halted
//
// While an operator holds the instance, it is Halted, Late or Down.
type State uint8

// States of an instance. Requests wait for a Late and a Halted one.
const (
	Down    State = iota // it does not answer its health check, or says that it cannot serve
	Late                 // it takes connections and does not answer, for less than Standstill
	Halted               // it takes no requests for now, and Status.Halt says why
	Wedged               // requests failed there, and a canary, too (Status.Out)
	Out                  // requests failed there (Status.Out)
	Accused              // it is not known yet whether it is at fault
	Up
)

// State derives the state from the facts.
func (s Status) State() State {
	switch {
	case !s.Up && s.Late:
		return Late
	case !s.Up:
		return Down
	case s.Halt != nil:
		return Halted
	case s.Wedged:
		return Wedged
	case s.Out != nil:
		return Out
	case s.Accused != nil:
		return Accused
	}
	return Up
}

// String is also the value of a metric's label. Late is shown as down, and Accused, which lasts for
// a moment, as up.
func (s State) String() string {
	return [...]string{"down", "down", "halted", "wedged", "out", "up", "up"}[s]
}

// Halted says that requests wait for the engine, which is up.
func (s Status) Halted() bool { return s.State() == Halted }

// ComputesNothing says that the ranks take no part in the steps of their group. Those of a halted
// engine need not compute anything.
func (s Status) ComputesNothing() bool {
	state := s.State()
	return state == Down || state == Late || state == Wedged
}

// Lacks says whether the engine lacks this rank. An only rank is rank 0, or NoRank.
func (s Status) Lacks(rank int) bool { return s.RankCount > 0 && rank >= s.RankCount }

// LostRanks returns which ranks are lost; nil: none is.
func (s Status) LostRanks() error {
	if s.RankCount == 0 {
		return nil
	}
	return fmt.Errorf("rank %d and those above it are lost: the engine has only %[1]d ranks now (elastic EP)", s.RankCount)
}

// baseModel is the model for canaries, the first that is no adapter; empty: none is known.
func (s Status) baseModel() string {
	for _, m := range s.Models {
		if m.Parent == "" {
			return m.ID
		}
	}
	return ""
}

// equal compares all but Since and Changed, for callbacks.
func (s Status) equal(o Status) bool {
	return s.Up == o.Up && s.Late == o.Late && s.Hangs == o.Hangs && s.Version == o.Version && s.StartTime == o.StartTime &&
		errorText(s.Err) == errorText(o.Err) &&
		errorText(s.Out) == errorText(o.Out) && errorText(s.Halt) == errorText(o.Halt) &&
		s.RankCount == o.RankCount && s.Wedged == o.Wedged && s.Moved == o.Moved &&
		errorText(s.Accused) == errorText(o.Accused) &&
		slices.Equal(s.Models, o.Models) && maps.Equal(s.Memories, o.Memories)
}

// clone returns a copy that shares no memory with the monitor.
func (s Status) clone() Status {
	s.Models = slices.Clone(s.Models)
	s.Memories = maps.Clone(s.Memories)
	return s
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
