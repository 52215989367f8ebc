package decode

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/step"
)

// Fleet is the decode ranks of a run.
type Fleet struct {
	Groups   []Group
	Stale    int // policies see a request's progress this many steps late
	Transfer int // steps between an admission and the first token; slot and KV are taken meanwhile

	// As vLLM runs requests: a rank runs so many more than it has slots, which is its max_num_seqs,
	// and begins to pull KV only while it runs fewer. Nil: it runs as many as it has slots, and pulls
	// at once.
	Spare *int
}

// Group is ranks that step together. A step takes C0Ms and what the slowest rank takes: C1Ms for
// each of its KV tokens and RequestMs for each of its requests, times the rank's Cost.
type Group struct {
	Name       string
	C0Ms, C1Ms float64
	RequestMs  float64
	Ranks      []Rank

	// Law is what a step takes where that depends on more than the slowest rank; nil: as above. Where
	// ranks are level both agree, but for what pads.
	Law *step.Law
	// Assumed is the law that policies are told; nil: none, or with Plan.TellLaw the one above.
	Assumed *step.Law
}

// Rank is one DP rank.
type Rank struct {
	Slots    int
	Capacity int64         // KV tokens, 0 = unlimited
	Cost     float64       // what a KV token costs here, 1 = the group's mean
	Join     Moment        // zero: there from the start
	Leave    Moment        // zero: never; a rank that leaves drains, and holds the barrier until it is empty
	Keeps    time.Duration // how long it keeps the KV of an answer that has ended; 0: it does not
	Fails    bool          // it does not drain: what it runs starts over somewhere else, after another prefill
}

// Moment is the first end of a step at which so many steps of the group or so
// much time are over; the zero Moment is none.
type Moment struct {
	Step int64
	Ms   float64
}

// The step model where nobody says another.
const (
	DefaultC0Ms = 55
	DefaultC1Ms = 2e-4
)

// Uniform is one group of equal ranks.
func Uniform(ranks, slots int, capacity int64) Fleet {
	g := Group{Name: "main", C0Ms: DefaultC0Ms, C1Ms: DefaultC1Ms, Ranks: make([]Rank, ranks)}
	for i := range g.Ranks {
		g.Ranks[i] = Rank{Slots: slots, Capacity: capacity, Cost: 1}
	}
	return Fleet{Groups: []Group{g}}
}

func (m Moment) set() bool { return m.Step > 0 || m.Ms > 0 }

// due says whether the moment is there.
func (m Moment) due(step int64, now float64) bool {
	return m.Step > 0 && step >= m.Step || m.Ms > 0 && now >= m.Ms
}

// The largest fleet that makes sense here; a typing error beyond it would only
// take all memory.
const (
	mostRanks = 100_000
	mostSlots = 100_000
	mostSteps = 1_000_000 // of Stale, Transfer
)

// Validate says what of a fleet cannot be simulated.
func (f *Fleet) Validate() error {
	if f.Stale < 0 || f.Transfer < 0 || f.Stale > mostSteps || f.Transfer > mostSteps {
		return fmt.Errorf("stale %d and transfer %d are steps, from 0 to %d", f.Stale, f.Transfer, mostSteps)
	}
	if f.Spare != nil && (*f.Spare < 0 || *f.Spare > mostSlots) {
		return fmt.Errorf("%d requests more than slots; want 0 to %d", *f.Spare, mostSlots)
	}
	n, first := 0, false
	for i := range f.Groups {
		g := &f.Groups[i]
		if !(g.C0Ms > 0 && g.C0Ms <= 1e6) || !(g.C1Ms >= 0 && g.C1Ms <= 1e3) {
			return fmt.Errorf("group %q: c0_ms %v must be above 0 and c1_ms %v not below", g.Name, g.C0Ms, g.C1Ms)
		}
		if !(g.RequestMs >= 0 && g.RequestMs <= 1e3) || g.RequestMs > 0 && g.C1Ms == 0 {
			return fmt.Errorf("group %q: request_ms %v must not be below 0, and wants a c1_ms above 0", g.Name, g.RequestMs)
		}
		if g.Law != nil && slices.ContainsFunc(g.Ranks, func(r Rank) bool { return r.Cost != 1 }) {
			return fmt.Errorf("group %q: a law with a form wants ranks of cost 1", g.Name)
		}
		n += len(g.Ranks)
		for k := range g.Ranks {
			r := &g.Ranks[k]
			if err := r.validate(); err != nil {
				return fmt.Errorf("group %q, rank %d: %w", g.Name, k, err)
			}
			first = first || !r.Join.set()
		}
	}
	switch {
	case n == 0:
		return errors.New("no ranks")
	case n > mostRanks:
		return fmt.Errorf("%d ranks; at most %d", n, mostRanks)
	case !first:
		return errors.New("no rank is there from the start")
	}
	return nil
}

func (r *Rank) validate() error {
	switch {
	case r.Slots < 1 || r.Slots > mostSlots:
		return fmt.Errorf("%d slots; want 1 to %d", r.Slots, mostSlots)
	case r.Capacity < 0 || r.Capacity > math.MaxInt64>>10:
		return fmt.Errorf("a capacity of %d KV tokens; 0 is unlimited", r.Capacity)
	case !(r.Cost > 0 && r.Cost <= 1000):
		return fmt.Errorf("cost %v; want a number above 0, 1 is the group's mean", r.Cost)
	case r.Keeps < 0:
		return fmt.Errorf("it keeps answers for %v; 0 is not at all", r.Keeps)
	case r.Join.Step < 0 || r.Leave.Step < 0 || !(r.Join.Ms >= 0) || !(r.Leave.Ms >= 0):
		return errors.New("it cannot join or leave before the start")
	case r.Fails && !r.Leave.set():
		return errors.New("it fails, but never leaves: say when")
	}
	return nil
}

// Ranks counts those of all groups.
func (f *Fleet) Ranks() (n int) {
	for i := range f.Groups {
		n += len(f.Groups[i].Ranks)
	}
	return n
}

// slots counts those of the ranks that are there from the start.
func (f *Fleet) slots() (n int) {
	for i := range f.Groups {
		n += f.Groups[i].slots()
	}
	return n
}

func (g *Group) slots() (n int) {
	for i := range g.Ranks {
		if !g.Ranks[i].Join.set() {
			n += g.Ranks[i].Slots
		}
	}
	return n
}

// tokensPerMs is what the group generates with every slot, or all room for KV, taken
// and the load level; a running request holds so many KV tokens in the mean.
func (g *Group) tokensPerMs(resident float64) float64 {
	slots, capacity := 0.0, 0.0
	for i := range g.Ranks {
		r := &g.Ranks[i]
		if r.Join.set() {
			continue
		}
		capacity += 1 / r.Cost
		if full := float64(r.Capacity) / resident; full > 0 {
			slots += min(float64(r.Slots), max(1, full)) // its KV is full before its slots are
		} else {
			slots += float64(r.Slots)
		}
	}
	if slots == 0 {
		return 0
	}
	return slots / (g.C0Ms + (g.C1Ms*resident+g.RequestMs)*slots/capacity)
}
