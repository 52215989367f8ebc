package engine

// State is the state of an instance. It follows from what is known of the instance: of several
// facts, the one whose state stands first in this list counts, because it explains the others.
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
	Accused              // it is about to be known whether it is at fault (Status.Accused)
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

// String is the state for people, and the value of a metric's label. Late is shown as down, and
// Accused, which lasts for a moment, as up.
func (s State) String() string {
	return [...]string{"down", "down", "halted", "wedged", "out", "up", "up"}[s]
}

// Halted says that the engine is up, but that it gets no new requests for now, and that requests
// wait for it.
func (s Status) Halted() bool { return s.State() == Halted }

// ComputesNothing says that the ranks take no part in the steps of their group. Those of a halted
// engine need not compute anything.
func (s Status) ComputesNothing() bool {
	state := s.State()
	return state == Down || state == Late || state == Wedged
}
