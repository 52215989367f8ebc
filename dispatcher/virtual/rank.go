package virtual

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/step"
)

// Request is a request on a rank, with its true state, which the boards do not see. A request that
// is resumed elsewhere is a new Request there, with the same Job.
type Request struct {
	Job               int32 // identifies the request for the caller
	Slot              int32 // index of its slot, as in board.Counts
	Prompt            int32 // tokens
	Gen               int32 // tokens generated on this rank so far
	Left              int32 // tokens that the request will still generate
	StepsToFirstToken int64 // steps from when its KV is ready to the step of its first token

	EarliestStep int64  // first step that the request can take part in, set by Engines.Place
	Reserved     bool   // the request's KV is on the rank or on its way
	DecodesFrom  int64  // step of the first token, if the request has a slot by then, or KVNotReady
	FirstStep    uint32 // step of its first token (StepCounter.Number); 0: no token yet

	Ready, Prefill float64 // end of the prefill, and its duration without the wait before it, in ms
}

// KVNotReady stands for a request whose KV is not ready yet.
const KVNotReady = math.MaxInt64

// Rank is the simulated engine of one rank. The first Active of its requests decode. The others
// wait in the engine for a slot, first come, first served, or are being prefilled by another
// engine. With MaxRunning, all requests whose KV is there or on its way are active.
type Rank struct {
	ID          int32
	Slots       int
	MaxRunning  int     // most requests per step; KV is pulled only while fewer run, as in vLLM; 0: Slots, and KV is pulled at any time
	Capacity    int64   // KV tokens that fit on the rank; 0: unlimited
	Cost        float64 // step time per KV token on this rank, as a multiple of the group's mean
	OtherTokens int64   // KV tokens of other requests, which are not simulated and stay on the rank

	KeepsKVFor time.Duration // how long the rank keeps the KV of an answer that has ended; 0: it keeps none
	EndedKV    kept.KV       // KV of ended answers that the rank still keeps

	Group    *Group
	Active   int       // number of requests with a slot, the first in Requests
	KV       int64     // KV tokens of all requests with Reserved set
	Requests []Request // requests on the rank; those with a slot first, else in the order of admission
}

// Group is a group of ranks whose steps wait for the slowest rank.
type Group struct {
	StepCounter
	Law   step.Law // the slowest rank has the largest product of Cost and load
	Ranks []*Rank  // by ascending ID
	Step  int64    // number of the step in progress or, if there is none, of the next step
	Ends  float64  // when the step in progress ends, in ms of virtual time; Never: there is none

	nextStepBegun bool // a step has just ended, but the engines have begun the next one, see stepInProgress
}

// NewGroup returns a group without ranks. law gives the length of its steps.
func NewGroup(key board.GroupKey, law board.StepModel) *Group {
	return &Group{StepCounter: newStepCounter(key), Law: step.Law{Model: law}, Ends: Never}
}

// Load returns the KV tokens that the rank reads in a step, with OtherTokens, and how many requests
// decode in it.
func (r *Rank) Load(step int64) (tokens int64, running int) {
	tokens = r.OtherTokens
	for i := range r.Active {
		if q := &r.Requests[i]; q.DecodesFrom <= step {
			tokens += int64(q.Prompt) + int64(q.Gen)
			running++
		}
	}
	return tokens, running
}

// limitRunning returns how many requests take part in a step. It postpones those beyond MaxRunning
// to the next step, although their KV is on the rank. Without MaxRunning, it returns 0.
func (r *Rank) limitRunning(step int64) (running int) {
	if r.MaxRunning == 0 {
		return 0
	}
	for i := range r.Active {
		q := &r.Requests[i]
		if q.DecodesFrom > step {
			continue
		}
		if running == r.MaxRunning {
			q.DecodesFrom = step + 1
			continue
		}
		running++
	}
	return running
}

// StepLoad returns the load that determines how long a step takes on the rank, in KV tokens.
func (r *Rank) StepLoad(tokens int64, running int) float64 {
	return (float64(tokens) + r.Group.Law.Weight()*float64(running)) * r.Cost
}

// A rank without KV takes any request: otherwise one that is too large would wait forever.
// OtherTokens do not count for this, because they never leave the rank.
func (r *Rank) hasRoomFor(tokens int64) bool {
	held := r.KV + r.EndedKV.Tokens()
	unlimited, empty := r.Capacity == 0, held == 0
	return unlimited || empty || r.OtherTokens+held+tokens <= r.Capacity
}

// toPreempt returns the last admitted request that holds KV, but never the first, so that one
// request can always go on.
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

// remove does not tell the boards.
func (r *Rank) remove(i int) {
	if q := &r.Requests[i]; q.Reserved {
		r.KV -= int64(q.Prompt) + int64(q.Gen)
	}
	if i < r.Active {
		r.Active--
	}
	r.Requests = slices.Delete(r.Requests, i, i+1)
}

// FirstReady returns when the first prefill that runs for this group ends, in ms; Never: none runs.
func (g *Group) FirstReady() float64 {
	next := Never
	for _, r := range g.Ranks {
		for i := r.Active; i < len(r.Requests); i++ { // requests with a slot are prefilled already
			q := &r.Requests[i]
			prefillRuns := q.Reserved && q.DecodesFrom == KVNotReady
			if prefillRuns {
				next = min(next, q.Ready)
			}
		}
	}
	return next
}

// While answers go on, an engine begins its next step before it sends the tokens of the last one,
// so stepInProgress is true between such steps, too.
func (g *Group) stepInProgress() bool { return g.nextStepBegun || g.Ends < Never }

// A request cannot join a step in progress.
func (g *Group) earliestStep() int64 {
	if g.stepInProgress() {
		return g.Step + 1
	}
	return g.Step
}

func (g *Group) hasWorkAfterStep() bool {
	for _, r := range g.Ranks {
		for i := range r.Requests {
			q := &r.Requests[i]
			waits := i >= r.Active || q.DecodesFrom > g.Step // it gets no token in this step
			if waits || q.Left > 1 {
				return true
			}
		}
	}
	return false
}
