package virtual

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/step"
)

// Leg is a request on a rank, with its true state, which the boards do not see. A request that loses its rank and is resumed on another
// rank has several legs.
type Request struct {
	Job          int32 // identifies the request for the caller
	Slot         int32 // its slot on the board
	Prompt       int32 // tokens
	Gen          int32 // tokens that it got on this rank
	Left         int32 // tokens that it will still get
	StepsToFirstToken int64 // steps between the first step that it could take part in and the step of its first token

	EarliestStep int64  // number of the first step that it could take part in
	Reserved  bool   // its KV is on the rank, or on its way there
	DecodesFrom     int64  // step of its first token, if it has a slot by then; NotBegun: its KV is not ready yet
	FirstStep    uint32 // number of the step that the group had reported when its first token came; 0: it has no token

	Ready, Prefill float64 // when its prefill ends, and how long the prefill takes without the wait before it, in ms
}

// NotBegun is the value of Leg.Begin for a request whose KV is not ready yet.
const KVNotReady = math.MaxInt64

// Rank is the simulated engine of one rank. The first Active of its requests decode. The others wait in the engine for a slot, first come,
// first served, or are being prefilled by another engine. With Runs, all requests whose KV is there or on its way are active.
type Rank struct {
	ID       int32
	Slots    int
	MaxRunning     int     // most requests in a step; the rank pulls KV only while fewer run, as vLLM does; 0: Slots, and it pulls at once
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float64 // step time per KV token on this rank, as a multiple of the group's mean
	OtherTokens   int64   // KV tokens of requests that are not simulated and stay on the rank

	KeepsKVFor time.Duration // how long it keeps the KV of an answer that has ended; 0: it keeps none
	EndedKV  kept.KV       // KV that it keeps of ended answers

	Group  *Group
	Active int
	KV     int64 // KV tokens of all requests whose KV is Reserved
	Requests   []Request // in the order of admission
}

// Group is a group of ranks each of whose steps waits for the slowest rank.
type Group struct {
	StepCounter
	Law   step.Law // how long a step takes; the slowest rank is the one with the largest product of Cost and load
	Ranks []*Rank  // ascending ID
	Step  int64    // number of the step in progress or, if there is none, of the next step
	Ends  float64  // when the step in progress ends, in ms of virtual time; Never: no step is in progress

	nextStepBegun bool // a step has just ended, and the engines have already begun the next one, see Steps
}

// NewGroup returns a group in which no step has begun.
func NewGroup(key board.GroupKey, law board.StepModel) *Group {
	return &Group{StepCounter: newStepCounter(key), Law: step.Law{Model: law}, Ends: Never}
}

// Load returns what the rank does in a step: the KV tokens that it reads, with those of Others, and how many requests decode.
func (r *Rank) Load(step int64) (tokens int64, running int) {
	tokens = r.OtherTokens
	for i := range r.Active {
		if l := &r.Requests[i]; l.DecodesFrom <= step {
			tokens += int64(l.Prompt) + int64(l.Gen)
			running++
		}
	}
	return tokens, running
}

// limitRunning returns how many requests of a rank with Runs take part in a step: at most Runs. It postpones the others to the next step,
// although their KV is on the rank. For a rank without Runs, it does nothing and returns 0.
func (r *Rank) limitRunning(step int64) (running int) {
	if r.MaxRunning == 0 {
		return 0
	}
	for i := range r.Active {
		l := &r.Requests[i]
		if l.DecodesFrom > step {
			continue
		}
		if running == r.MaxRunning {
			l.DecodesFrom = step + 1
			continue
		}
		running++
	}
	return running
}

// Feels returns the load that determines how long a step takes on the rank, in KV tokens: the tokens plus the weight of each running
// request, times the rank's Cost.
func (r *Rank) StepLoad(tokens int64, running int) float64 {
	return (float64(tokens) + r.Group.Law.Weight()*float64(running)) * r.Cost
}

// fits says whether the rank has KV room for so many tokens. A rank that has no KV of requests and keeps none of ended answers takes any
// request.
func (r *Rank) hasRoomFor(tokens int64) bool {
	holds := r.KV + r.EndedKV.Tokens()
	return r.Capacity == 0 || holds == 0 || r.OtherTokens+holds+tokens <= r.Capacity
}

// victim returns the request to preempt if the rank has more KV than its capacity: the last admitted request that holds KV, but never the
// first in the list, so that one request can always go on. ok is false if no request needs to be preempted, or none can be.
func (r *Rank) toPreempt() (i int, ok bool) {
	if r.Capacity == 0 || r.OtherTokens+r.KV+r.EndedKV.Tokens() <= r.Capacity {
		return 0, false
	}
	for i = len(r.Requests) - 1; i > 0; i-- {
		if r.Requests[i].Reserved {
			return i, true
		}
	}
	return 0, false
}

// Remove takes the i-th request off the rank.
func (r *Rank) Remove(i int) {
	if l := &r.Requests[i]; l.Reserved {
		r.KV -= int64(l.Prompt) + int64(l.Gen)
	}
	if i < r.Active {
		r.Active--
	}
	r.Requests = slices.Delete(r.Requests, i, i+1)
}

// FirstReady returns the time at which the first of the group's running prefills ends, in ms; Never: there is none.
func (g *Group) FirstReady() float64 {
	next := Never
	for _, r := range g.Ranks {
		for i := r.Active; i < len(r.Requests); i++ {
			if l := &r.Requests[i]; l.Reserved && l.DecodesFrom == KVNotReady {
				next = min(next, l.Ready)
			}
		}
	}
	return next
}

// Steps says whether a step is in progress. If answers go on, engines begin the next step before they send the tokens of the last one.
func (g *Group) StepInProgress() bool { return g.nextStepBegun || g.Ends < Never }

// nextStep returns the number of the first step that a request can take part in if it is admitted now.
func (g *Group) earliestStep() int64 {
	if g.StepInProgress() {
		return g.Step + 1
	}
	return g.Step
}

// goesOn says whether the group has work left after the step that ends now: a request will get more tokens, or has not begun yet.
func (g *Group) hasWorkAfterStep() bool {
	for _, r := range g.Ranks {
		for i := range r.Requests {
			if l := &r.Requests[i]; l.Left > 1 || i >= r.Active || l.DecodesFrom > g.Step {
				return true
			}
		}
	}
	return false
}
