package board

import (
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Event is an input of Boards.Apply. Frequent events are passed as pointers to values that the caller reuses, so that they allocate
// nothing.
type Event interface{ apply(l *Boards) }

// Enqueue is the event that an entry (a waiting request) arrives. The board owns the entry until it answers with exactly one EffectBind or
// EffectRefuse.
type Enqueue struct {
	Entry *pool.Entry
	// Local has the ranks that may compute the prompt, for an entry that has no hand-off and must be decided about at once; nil: any other
	// entry.
	Local *Local
	// Trace is memory of the caller in which the board writes why the rank was chosen; nil: the board writes nothing.
	Trace *Explanation
	// Hits says, where ranks prefill, how much of the prompt is in the prefix cache of each. The
	// caller does not change the slice afterwards.
	Hits []Hit
	// Output is how many tokens the answer will have. Only a simulation knows the number (PredictorConfig.KnownLengths); 0: not known.
	Output int32
}

// Withdraw takes an entry out of the pool, because its client has left. Nothing happens if the entry has left the pool, even if another
// entry with the same ID waits.
type Withdraw struct{ Entry *pool.Entry }

// Release is the event that a request has ended, so that its slot is free again.
type Release struct {
	Model     string
	Slot      int32
	Outcome   Outcome
	Generated int32 // tokens that the stream of the answer has brought
	Started   bool  // the first event of the stream of the answer has come
	// FirstStep and LastStep are the numbers of the steps that brought the first and the last tokens of the answer; 0: no token came.
	FirstStep, LastStep uint32
	MaxUnreported       int32 // upper bound of the tokens of an answer whose engine reports them only at its end; 0: reported as they come
}

// Outcome says how a request left its rank, and what this shows about the rank's engine.
type Outcome struct {
	Kind      Kind
	Generated int // tokens that this rank generated; a resumed answer may have more from other ranks
	// Empty: the answer is complete, but its engine ended it without any text.
	Empty bool
	// NoUsage: the answer is complete, but its engine reported no token usage.
	NoUsage bool
	// Refused: the engine answered with 429 or 503 and did not take the request.
	Refused bool
	// Lost: the engine took the request, but the first event of the answer did not come. If other hand-offs of both engines work, the
	// connection between the prefill engine and the decode engine has failed.
	Lost bool
	// Orphaned: the decode engine may keep the KV blocks of the request for ever, because it waits for a prefill engine that will never finish
	// writing them. The board counts these blocks as taken until the engine restarts, or until its gauges show that less KV is in use
	// (Gauged).
	Orphaned bool
	// Kept: the engine keeps the KV of this request for the next turn of its chat, if its ranks keep KV of answers at all (Worker.KeepsKVFor).
	Kept bool
}

// Kind is how a request left its rank: its answer is complete, its client left, or its engine failed.
type Kind uint8

// Values of Kind.
const (
	Finished  Kind = iota // the engine ended the stream
	Cancelled             // the client left before the end of the answer
	Failed                // the engine failed, refused the request, or stopped it so that it is computed again elsewhere
)

// Recount corrects the prompt length, in tokens, that a slot is charged with. The proxy had estimated the length, and an engine has now
// counted the tokens.
type Recount struct {
	Model  string
	Slot   int32
	Prompt int
}

// Rerouted is the event that the KV of a slot comes from another prefill engine than was planned when the slot was bound.
type Rerouted struct {
	Model     string
	Slot      int32
	Prefiller string
}

// Excused is the event that a lost hand-off says nothing of its engines, because the request was at fault.
type Excused struct {
	Model string
	Link  delivery.Link
}

// FirstEvent is the event that the first event of a slot's answer has come: the engine has taken the request and, if there is a hand-off,
// the KV has arrived.
type FirstEvent struct {
	Model string
	Slot  int32
}

// Steps brings the steps of a group since the last Steps event, in order.
type Steps struct {
	Group GroupKey
	List  []Step
}

// Step is one step of a group, in which all ranks of the group decode together. It is reported when its first token comes.
type Step struct {
	Number uint32
	// Length is the time from the first token of the previous step to the first token of this step. 0: not known, because this is the first
	// step after the group was idle.
	Length time.Duration
}

// SetStepModel gives a group a step model, which replaces the learned one. Only the simulator sends it: it decides
// how long steps take, so it knows the model.
type SetStepModel struct {
	Group GroupKey
	StepModel

	Weights step.RequestCost // how many KV tokens policies count for each request, beside the KV of the request
}

// SetWorkers replaces the ranks of all models by the given workers. Requests on ranks whose worker ID stays keep their slots.
type SetWorkers struct{ Workers []Worker }

// Preempted is the event that the engine of a worker ran out of KV room and preempted a request.
type Preempted struct{ Worker int32 }

// TablesBuilt brings new tables of output lengths, which a Learner has built for a predictor.
type TablesBuilt struct {
	Predictor PredictorKey
	*Tables
}

// SetPolicy changes the policy of the barrier groups. If the spec is not valid, the event only emits EffectRejected.
type SetPolicy struct{ Spec string }

// SetFit makes all predictors forget what they learned and start from a fit file.
type SetFit struct{ Fit *predictor.Fit }

// Counts has the progress of all requests of a board. Each list has one value per slot, by the index of the slot. The board uses Counts for
// the next event and the rounds that follow from that event. For an event without Counts, the board uses the progress that it read last. A
// slot beyond the end of a list was bound later, and has no progress yet.
type Counts struct {
	Model     string
	Tokens    []int32  // tokens that each answer has
	Started   []bool   // the first event of the answer has come
	FirstStep []uint32 // number of the group's step that brought the first tokens; 0: no token has come

	// MaxUnreported is the largest possible number of tokens of an answer whose engine reports tokens only at the end; 0: the engine reports
	// tokens as they come.
	MaxUnreported []int32
}

// Tick tells a board that time has passed: waits that are over end. If any event since the last Tick may let an entry get a slot, the Tick
// also makes the board decide, in one round for all these events.
type Tick struct{ Model string }

// Decide makes one policy decide about the waiting entries, which is one round. The caller sends it only while Boards.Deciding returns
// true.
type Decide struct{}

// Decided ends the round that Decide began. It brings how long the round took, because a board has no clock.
type Decided struct {
	Took     time.Duration // by the wall clock
	Computed time.Duration // the CPU time of the policy's thread; Took where the system does not tell it
}

// Shutdown makes the boards answer all waiting entries, and all that come later, with ErrDraining. Running requests keep their slots until
// Release.
type Shutdown struct{}

// generated returns how many tokens the answer of a slot's request has; 0 also for a slot that was bound after the Counts were read.
func (c *Counts) generated(slot int32) int32 {
	if int(slot) < len(c.Tokens) {
		return c.Tokens[slot]
	}
	return 0
}

// firstStep returns the number of the step that brought the first tokens of a slot's answer; 0: no token has come, or c is nil.
func (c *Counts) firstStep(slot int32) uint32 {
	if c != nil && int(slot) < len(c.FirstStep) {
		return c.FirstStep[slot]
	}
	return 0
}

// maxUnreported returns the largest possible number of tokens of a slot's answer if the engine reports tokens only at the end; 0: the
// engine reports tokens as they come.
func (c *Counts) maxUnreported(slot int32) int32 {
	if int(slot) < len(c.MaxUnreported) {
		return c.MaxUnreported[slot]
	}
	return 0
}

// started says whether the first event of a slot's answer has come; false also for a slot that was bound after the Counts were read.
func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Started) && c.Started[slot] }
