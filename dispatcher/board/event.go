package board

import (
	"time"

	"evenkeel/dispatcher/decision"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Event is an input of the boards. Frequent events are passed as pointers to values
// that the caller reuses, so that they allocate nothing.
type Event interface{ apply(b *Boards) }

// Enqueue adds an entry. The board answers it with one EffectBind or EffectRefuse, and owns
// the entry until then.
type Enqueue struct {
	Entry  *pool.Entry
	Local  *Local          // ranks that may compute a prompt without a hand-off, which does not wait; nil: any other entry
	Trace  *decision.Trace // the board writes here why the rank was chosen; nil: it does not
	Hits   []Hit           // what ranks hold of its prompt; the caller does not change the slice afterwards
	Output int32           // tokens that it will have generated in the end, with PredictorConfig.KnownLengths; 0: not known
}

// Withdraw takes an entry out of the pool, if this very entry waits there.
type Withdraw struct{ Entry *pool.Entry }

// Release gives a slot back.
type Release struct {
	Model       string
	Slot        int32
	Outcome     Outcome
	Generated   int32  // tokens that the stream has brought
	Started     bool   // the first event has come
	First, Last uint32 // numbers of the group's steps that brought its first and its last tokens; 0: no token came
	Unheard     int32  // as in Counts
}

// Outcome is what became of a request that leaves its rank.
type Outcome struct {
	Kind      Kind
	Generated int // tokens of this leg
	// Empty: the answer is whole, and its engine ended it without any text.
	Empty bool
	// Unsaid: the answer is whole, and its engine reported no token usage.
	Unsaid bool
	// Refused: the engine answered with 429 or 503 and did not take the request.
	Refused bool
	// Lost: the engine took the request, and its first event did not come. If
	// both engines of the hand-off serve other hand-offs, the connection between them has failed.
	Lost bool
	// Orphaned: the decode engine may keep the KV blocks of a request for ever, because it waits for a prefill engine that
	// will never finish writing them. The board counts their room as taken until the engine's
	// process is another one, or its gauges show that less KV is in use (Gauged).
	Orphaned bool
	// Kept: the engine keeps the KV of this request for the next turn of its chat, if it keeps KV of answers at all (Worker.Keeps).
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

// Rerouted reports that the KV of a slot comes from another prefill engine than was known when the slot was bound.
type Rerouted struct {
	Model     string
	Slot      int32
	Prefiller string
}

// Reached reports that the first event of a slot has come: its engine took the request and, if it has a hand-off, the KV arrived.
type Reached struct {
	Model string
	Slot  int32
}

// Steps reports the steps of a group since the last Steps event, in order.
type Steps struct {
	Group GroupKey
	List  []Step
}

// Step is one step of a group. It is reported when the first of its tokens come.
type Step struct {
	Number uint32
	Length time.Duration // since the tokens of the step before began to come; 0: nothing ran before it
}

// Law sets how long steps of a group take, so that no model of them is learned. Only the simulator and the twin know this.
type Law struct {
	Group GroupKey
	StepModel

	Weights step.Weights // what policies count a request as
}

// SetWorkers replaces the fleet, of all models.
type SetWorkers struct{ Workers []Worker }

// Preempted reports that the engine of a worker ran out of KV room and preempted a request.
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

// Counts is the progress of the slots of a board, by the slot's index. They hold for the next event that is
// no Counts, and for the rounds that follow from it. For events without Counts, the progress that was counted
// last stands. The lists may be too short for slots that were bound later: these count as having no progress.
type Counts struct {
	Model  string
	Tokens []int32  // generated
	Began  []bool   // the first event has come
	Joined []uint32 // number of the group's step that brought the first tokens; 0: no token has come

	Unheard []int32 // most tokens of an answer whose engine reports them only at its end; 0: its tokens are reported as they come
}

// Tick ends the waits of a board that are over, and makes it decide if something happened that
// may let an entry in. All events since the last Tick lead to one round.
type Tick struct{ Model string }

// Decide runs one round of one policy. It comes only while Deciding returns true.
type Decide struct{}

// Decided reports how long the round took, because a board has no clock.
type Decided struct{ Took time.Duration }

// Shutdown makes the boards answer all waiting entries, and all that still come, with ErrDraining. Requests that run stay charged.
type Shutdown struct{}

// generated returns how many tokens the request of a slot has got.
func (c *Counts) generated(slot int32) int32 {
	if int(slot) < len(c.Tokens) {
		return c.Tokens[slot]
	}
	return 0
}

// step returns the number of the step that brought the first tokens of a slot; 0: no token has come.
func (c *Counts) step(slot int32) uint32 {
	if c != nil && int(slot) < len(c.Joined) {
		return c.Joined[slot]
	}
	return 0
}

// unheard returns how many tokens the answer of a slot may have, if its engine reports them only at its end; 0: they are reported as
// they come.
func (c *Counts) unheard(slot int32) int32 {
	if int(slot) < len(c.Unheard) {
		return c.Unheard[slot]
	}
	return 0
}

// started says whether the first event of a slot has come.
func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Began) && c.Began[slot] }
