package life

// A Thing is what a request may hold.
type Thing uint8

// The things.
const (
	Place   Thing = iota // in the pool, reserved, and no entry has it yet
	Lease                // of a prompt on a prefill engine that has not handed its KV over
	KV                   // a hand-off that may be sent to a decode engine
	Doubted              // a hand-off that an engine may have read, and from which no answer may be made
	Slot                 // on a decode rank
	things
)

// More ways to settle a thing, beside those of verdict.go.
const (
	Back      How = Spent + 1 + iota // a place is free again
	Pass                             // somebody else has it now, and settles it: the pool's entry a place, the legs of an early attempt a lease
	Failing                          // the slot of an answer that its engine did not begin, or broke
	Cancelled                        // the slot of an answer that is not wanted any more, or that was never sent
	Finish                           // the slot of an answer that is whole
)

// settles are the ways in which each thing may be settled.
var settles = [things][]How{
	Place:   {Back, Pass},
	Lease:   {Free, Refuse, Lose, Orphan, Discard, Pass},
	KV:      {Free, Orphan, Discard, Doubt, DoubtOn},
	Doubted: {Discard, Orphan},
	Slot:    {Failing, Cancelled, Finish},
}

// doubt is a hand-off that an engine may have read.
type doubt struct {
	live  bool // the engine has not said that it is done with the request
	named bool // a second request for it would have the id of the first
}

// owed is what a request holds. Each thing is settled once: by an effect, in a way that is its own.
type owed struct {
	has    [things]bool // Doubted is in doubts
	named  bool         // of the KV: a decode request must have the probe's id
	doubts []doubt
}

func (o *owed) take(t Thing) { o.has[t] = true }

// settle ends the hold of a thing; one that is not held is settled.
func (o *owed) settle(dst []Effect, t Thing, how How) []Effect {
	if !o.has[t] {
		return dst
	}
	o.has[t] = false
	if how == Doubt || how == DoubtOn {
		o.doubts = append(o.doubts, doubt{live: how == DoubtOn, named: o.named})
	}
	return append(dst, Effect{Do: Settle, Thing: t, How: how})
}

// conclude settles what is left when the attempts are over. A hand-off that was doubted is discarded, so that its engine has
// the memory back. It is not, if the request may be what breaks engines, or if two requests of one id would meet there.
func (o *owed) conclude(dst []Effect, poison bool) []Effect {
	for _, d := range o.doubts {
		how := Discard
		if poison || d.live && d.named {
			how = Orphan
		}
		dst = append(dst, Effect{Do: Settle, Thing: Doubted, How: how})
	}
	o.doubts = nil
	return o.settle(dst, Place, Back)
}
