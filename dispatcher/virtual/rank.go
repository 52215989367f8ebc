package virtual

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/step"
)

// Leg is a request on a rank, with its true state, which the boards do not see.
type Leg struct {
	Job          int32 // whatever whoever drives the engines calls it by
	Slot         int32 // the board's
	Prompt       int32
	Gen          int32 // tokens of this leg
	Left         int32 // tokens until its end
	StepsToBegin int64 // steps between the first that it could take part in and the one of its first token

	BoundStep int64  // the first step that it could take part in
	Reserved  bool   // its KV is on the rank, or in flight to it
	Begin     int64  // step of its first token, if it has a slot by then; NotBegun: it is not prefilled yet
	Joined    uint32 // step that the group was told of when it got that token; 0: it has none

	Ready, Prefill float64 // when it is prefilled, and what of the time before it was prefilled in, ms
}

// NotBegun is the first step of a request that is not prefilled yet.
const NotBegun = math.MaxInt64

// Rank is one rank's engine. The first Active of its requests decode, the others wait in the engine for a
// slot, first come first served, or are being prefilled somewhere. Where Runs is set, requests whose KV is there or on its way are
// active, too.
type Rank struct {
	ID       int32
	Slots    int
	Runs     int     // at most, and it begins to pull KV only while it runs fewer, as vLLM does; 0: Slots, and it pulls at once
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float64 // what a KV token costs here, 1 = the group's mean
	Others   int64   // KV tokens of requests that are not ours and stay on the rank

	Keeps time.Duration // how long it keeps the KV of an answer that has ended; 0: it keeps none
	Kept  kept.KV       // KV that it keeps of ended answers

	Group  *Group
	Active int
	KV     int64 // KV tokens of everything pulled
	Legs   []Leg // in order of admission
}

// Group is ranks behind one barrier.
type Group struct {
	StepCounter
	Law   step.Law // what a step takes; the slowest rank is the one with the largest Cost times its load
	Ranks []*Rank  // that are part of it, ascending id
	Step  int64    // number of the step in progress, else of the next one
	Ends  float64  // when the step in progress ends, in ms of virtual time; Never: no step is in progress

	begun bool // a step has ended, and the next one has begun before anybody could learn of that
}

// NewGroup returns a group in which no step has begun.
func NewGroup(key board.GroupKey, law board.StepModel) *Group {
	return &Group{StepCounter: newStepCounter(key), Law: step.Law{Model: law}, Ends: Never}
}

// Load returns what the rank does in a step: the KV tokens that it reads, with those of Others, and how many requests decode.
func (r *Rank) Load(k int64) (tokens int64, running int) {
	tokens = r.Others
	for i := range r.Active {
		if l := &r.Legs[i]; l.Begin <= k {
			tokens += int64(l.Prompt) + int64(l.Gen)
			running++
		}
	}
	return tokens, running
}

// limitRunning returns how many requests of a rank with Runs take part in a step, which are at most Runs. It puts off the others until
// the next step, although their KV is on the rank. For a rank without Runs it does nothing and returns 0.
func (r *Rank) limitRunning(step int64) (running int) {
	if r.Runs == 0 {
		return 0
	}
	for i := range r.Active {
		switch l := &r.Legs[i]; {
		case l.Begin > step:
		case running == r.Runs:
			l.Begin = step + 1
		default:
			running++
		}
	}
	return running
}

// Feels returns a load as the steps of the group feel it, in KV tokens: the tokens, and the weight of a request for each one that runs,
// times what a KV token costs on the rank.
func (r *Rank) Feels(tokens int64, running int) float64 {
	return (float64(tokens) + r.Group.Law.Weight()*float64(running)) * r.Cost
}

// fits says whether there is room for the KV of so many tokens. A rank that has no KV of requests and keeps none takes anything.
func (r *Rank) fits(tokens int64) bool {
	holds := r.KV + r.Kept.Tokens()
	return r.Capacity == 0 || holds == 0 || r.Others+holds+tokens <= r.Capacity
}

// victim returns the request to preempt if the rank has more KV than its capacity: the last admitted one that holds KV, but never the
// first in the list. ok is false if there is nothing to preempt.
func (r *Rank) victim() (i int, ok bool) {
	if r.Capacity == 0 || r.Others+r.KV+r.Kept.Tokens() <= r.Capacity {
		return 0, false
	}
	for i = len(r.Legs) - 1; i > 0; i-- {
		if r.Legs[i].Reserved {
			return i, true
		}
	}
	return 0, false
}

// Remove takes the i-th request off the rank.
func (r *Rank) Remove(i int) {
	if l := &r.Legs[i]; l.Reserved {
		r.KV -= int64(l.Prompt) + int64(l.Gen)
	}
	if i < r.Active {
		r.Active--
	}
	r.Legs = slices.Delete(r.Legs, i, i+1)
}

// FirstReady returns when the first of the group's running prefills ends, in ms; Never: there is none.
func (g *Group) FirstReady() float64 {
	next := Never
	for _, r := range g.Ranks {
		for i := r.Active; i < len(r.Legs); i++ {
			if l := &r.Legs[i]; l.Reserved && l.Begin == NotBegun {
				next = min(next, l.Ready)
			}
		}
	}
	return next
}

// Steps says whether a step is in progress. If answers go on, engines begin the next one before they tell anybody that a step
// has ended.
func (g *Group) Steps() bool { return g.begun || g.Ends < Never }

// nextStep returns the number of the first step that a request admitted now can take part in.
func (g *Group) nextStep() int64 {
	if g.Steps() {
		return g.Step + 1
	}
	return g.Step
}

// goesOn says whether the group has work left after the step that ends now: a request that gets more tokens, or one that has not begun.
func (g *Group) goesOn() bool {
	for _, r := range g.Ranks {
		for i := range r.Legs {
			if l := &r.Legs[i]; l.Left > 1 || i >= r.Active || l.Begin > g.Step {
				return true
			}
		}
	}
	return false
}
