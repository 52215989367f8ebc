package board

import (
	"time"

	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Event is an input of the boards. Frequent events are passed as pointers to values
// that the caller reuses, so that they allocate nothing.
type Event interface{ apply(l *Boards) }

// Enqueue adds an entry. The board answers it with one EffectBind or EffectRefuse, and owns
// the entry until then.
type Enqueue struct {
	Entry  *pool.Entry
	Local  *Local       // the entry has no hand-off, and does not wait: one of these ranks may compute its prompt; nil: any other entry
	Trace  *Explanation // memory of the caller in which the board writes why the rank was chosen; nil: it does not
	Hits   []Hit        // how much of its prompt is in the prefix caches of ranks; the caller does not change the slice afterwards
	Output int32        // tokens that its answer will have, if PredictorConfig.KnownLengths is set; 0: not known
}

// Withdraw takes an entry out of the pool. Nothing happens if it has left the pool, even if another entry with its ID waits.
type Withdraw struct{ Entry *pool.Entry }

// Release gives a slot back.
type Release struct {
	Model               string
	Slot                int32
	Outcome             Outcome
	Generated           int32  // tokens that the stream has brought
	Started             bool   // the first event of the stream has come
	FirstStep, LastStep uint32 // numbers of the group's steps that brought its first and its last tokens; 0: no token came
	MaxUnreported       int32  // see Counts.MaxUnreported
}

// Outcome says how a request left its rank, and what this shows about the rank's engine.
type Outcome struct {
	Kind      Kind
	Generated int // tokens that this rank generated; a resumed answer may have more from other ranks
	// Empty: the answer is whole, and its engine ended it without any text.
	Empty bool
	// NoUsage: the answer is whole, and its engine reported no token usage.
	NoUsage bool
	// Refused: the engine answered with 429 or 503 and did not take the request.
	Refused bool
	// Lost: the engine took the request, but its first event did not come. If other hand-offs of both engines work, the connection between
	// the two engines has failed.
	Lost bool
	// Orphaned: the decode engine may keep the KV blocks of the request for ever, because it waits for a prefill engine that will never
	// finish writing them. The board counts their room as taken until the engine restarts, or its gauges show that it uses less KV
	// (Gauged).
	Orphaned bool
	// Kept: the engine keeps the KV of this request for the next turn of its chat, if it keeps KV of answers at all (Worker.KeepsKVFor).
	Kept bool
}

// Kind is how a request left its rank.
type Kind uint8

// The ways to leave a rank.
const (
	Finished  Kind = iota // the engine ended the stream
	Cancelled             // the client left
	Failed                // the engine failed or refused the request, or stopped it to compute it again
)

// Recount corrects the prompt length, in tokens, that a slot is charged with: the length was an estimate, and an engine has counted it.
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

// FirstEvent reports that the first event of a slot has come: its engine took the request and, if it has a hand-off, the KV arrived.
type FirstEvent struct {
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
	// Length is the time from the first token of the step before to the first token of this step. 0: not known, because this is the first
	// step that is reported since the group was idle.
	Length time.Duration
}

// SetStepModel sets the model of a group's steps, so that none is learned. Only the simulator and the twin know the model, because they
// decide how long the steps take.
type SetStepModel struct {
	Group GroupKey
	StepModel

	Weights step.RequestCost // KV tokens that policies count a request as, beside its own
}

// SetWorkers replaces the ranks of all models.
type SetWorkers struct{ Workers []Worker }

// Preempted reports that the engine of a worker ran out of KV room and preempted a request.
type Preempted struct{ Worker int32 }

// TablesBuilt brings the tables that a Learner has built for a predictor.
type TablesBuilt struct {
	Predictor PredictorKey
	*Tables
}

// SetPolicy changes the policy of the barrier groups.
type SetPolicy struct{ Spec string }

// SetFit makes all predictors start anew from a fit.
type SetFit struct{ Fit *predictor.Fit }

// Counts has the progress of the requests of a board, by the index of their slots. The board uses it for the next event that is no Counts,
// and for the rounds that this event causes. For an event without Counts, the board uses the progress that it read last. A slot beyond the
// end of a list was bound later, and has no progress yet.
type Counts struct {
	Model     string
	Tokens    []int32  // generated
	Started   []bool   // the first event has come
	FirstStep []uint32 // number of the group's step that brought the first tokens; 0: no token has come

	MaxUnreported []int32 // upper bound of the tokens of an answer whose engine reports them only at its end; 0: it reports them as they come
}

// Tick ends the waits of a board that are over. If an event since the last Tick may let an entry in, it also makes the board decide. All
// events since the last Tick lead to one round.
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

// firstStep returns the number of the step that brought the first tokens of a slot; 0: no token has come. c may be nil.
func (c *Counts) firstStep(slot int32) uint32 {
	if c != nil && int(slot) < len(c.FirstStep) {
		return c.FirstStep[slot]
	}
	return 0
}

// maxUnreported returns the upper bound of the tokens of a slot's answer, if its engine reports them only at its end; 0: it reports them as
// they come.
func (c *Counts) maxUnreported(slot int32) int32 {
	if int(slot) < len(c.MaxUnreported) {
		return c.MaxUnreported[slot]
	}
	return 0
}

// started says whether the first event of a slot has come.
func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Started) && c.Started[slot] }
