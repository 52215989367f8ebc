package board

import (
	"time"

	"evenkeel/dispatcher/decision"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Event is what the boards are told. One that is told often is told by a pointer to a value
// that is used again and again, so that it allocates nothing.
type Event interface{ apply(b *Boards) }

// Enqueue takes an entry in, which is answered by one EffectBind or EffectRefuse. It belongs
// to the board until then.
type Enqueue struct {
	Entry  *pool.Entry
	Local  *Local          // it has no hand-off, and does not wait; nil: it has one
	Trace  *decision.Trace // room for what its rank is chosen on; nil: nobody asks
	Hits   []Hit           // what ranks hold of its prompt; they are not changed afterwards
	Output int32           // tokens it will have generated in the end, with PredictorConfig.KnownLengths; 0: nobody knows
}

// Withdraw takes an entry out of the pool, if it is the one that waits there.
type Withdraw struct{ Entry *pool.Entry }

// Release gives a slot back.
type Release struct {
	Model       string
	Slot        int32
	Outcome     Outcome
	Generated   int32  // tokens that were seen
	Started     bool   // the first event was
	First, Last uint32 // steps of the group that its first and its last tokens came with; 0: none came
	Unheard     int32  // as in Counts
}

// Outcome is what became of a request that leaves its rank.
type Outcome struct {
	Kind      Kind
	Generated int // tokens of this leg
	// Empty: the answer is whole, and its engine ended it without any text.
	Empty bool
	// Unsaid: the answer is whole, and its engine said nothing of its tokens.
	Unsaid bool
	// Refused: the engine answered with 429 or 503, and took nothing of the request.
	Refused bool
	// Lost: the engine took the request, and its first event did not come. Where
	// both ends serve others it is the way between them that fails.
	Lost bool
	// Orphaned: the engine may keep the KV of a request that was bound before its prefill for ever, since
	// a prefill that will not end was to write it. Its room is taken until the engine's process is another
	// one, or its gauges show that the KV is not there (Gauged).
	Orphaned bool
	// Kept: the engine keeps the KV of the request for a later one, if it keeps that of answers (Worker.Keeps).
	Kept bool
}

// Kind is how a request left its rank.
type Kind uint8

// The ways to leave a rank.
const (
	Finished  Kind = iota // the engine ended the stream
	Cancelled             // the client left
	Failed                // the engine failed, refused or recomputed it
)

// Recount corrects the prompt that a slot is charged with.
type Recount struct {
	Model  string
	Slot   int32
	Prompt int
}

// Rerouted tells that the KV of a slot comes from another prefiller than was known when it was bound.
type Rerouted struct {
	Model     string
	Slot      int32
	Prefiller string
}

// Reached tells that the first event of a slot has come: its engine took the request, and the way of its KV works, if it has one.
type Reached struct {
	Model string
	Slot  int32
}

// Steps tells the steps of a group, in their order, since the last time.
type Steps struct {
	Group GroupKey
	List  []Step
}

// Step is one step of a group: the one whose tokens begin to come when it is told.
type Step struct {
	Number uint32
	Length time.Duration // since the tokens of the one before began to come; 0: it was the first
}

// Law tells what a step of a group takes, so that no model of it is learned. Only a simulation knows.
type Law struct {
	Group GroupKey
	StepModel

	Weights step.Weights // by which policies decide
}

// SetWorkers replaces the fleet, of all models.
type SetWorkers struct{ Workers []Worker }

// Preempted tells that the engine of a worker ran out of KV room and gave a request back.
type Preempted struct{ Worker int32 }

// Learned are the tables that were built for a subject.
type Learned struct {
	Subject Subject
	*Tables
}

// SetPolicy changes the policy of the barrier groups.
type SetPolicy struct{ Spec string }

// SetFit has all subjects start anew from a fit.
type SetFit struct{ Fit *predictor.Fit }

// Counts is how far the slots of a board are, by index. They hold for the next event that is
// no Counts, with the rounds that follow from it. Without them, what was told last stands. Of
// slots that were bound after the counts were taken nothing is told.
type Counts struct {
	Model  string
	Tokens []int32  // generated
	Began  []bool   // the first event has come
	Joined []uint32 // the group's step that the first tokens came with; 0: none has come

	Unheard []int32 // of an answer whose tokens are told at its end only, how many it may have; 0: they are told as they come
}

// Tick ends the waits of a board that are over, and has it decide if anything happened that
// may let an entry in. A burst of other events before it is one round.
type Tick struct{ Model string }

// Decide is one round of one policy, where Deciding says that one is due.
type Decide struct{}

// Decided tells how long the round took: a board has no clock.
type Decided struct{ Took time.Duration }

// Shutdown answers everything that waits and all that comes; what runs stays charged.
type Shutdown struct{}

func (c *Counts) generated(slot int32) int32 {
	if int(slot) < len(c.Tokens) {
		return c.Tokens[slot]
	}
	return 0
}

// step is the one that the first tokens of a slot came with; 0: none has come.
func (c *Counts) step(slot int32) uint32 {
	if c != nil && int(slot) < len(c.Joined) {
		return c.Joined[slot]
	}
	return 0
}

func (c *Counts) unheard(slot int32) int32 {
	if int(slot) < len(c.Unheard) {
		return c.Unheard[slot]
	}
	return 0
}

func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Began) && c.Began[slot] }
