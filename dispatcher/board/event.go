package board

import (
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Event is an input of Boards.Apply. Frequent events are pointers to values that the caller reuses,
// so that they allocate nothing.
type Event interface{ apply(l *Boards) }

// Enqueue brings a new entry. The board owns it until it answers with exactly one EffectBind or
// EffectRefuse.
type Enqueue struct {
	Entry *pool.Entry
	// Local is for an entry without a hand-off, about which the board decides at once; nil: any other.
	Local *Local
	// Trace is memory of the caller for why the rank was chosen; nil: not wanted.
	Trace *Explanation
	// Hits says how much of the prompt is in the prefix caches of mixed ranks. The caller does not
	// change the slice afterwards.
	Hits []Hit
	// Output is the length of the answer, known only to a simulation (PredictorConfig.KnownLengths);
	// 0: not known.
	Output int32
}

// Withdraw takes an entry out, because its client has left. Nothing happens if the entry has left
// the pool, even if another with the same ID waits.
type Withdraw struct{ Entry *pool.Entry }

// Release ends a request and frees its slot.
type Release struct {
	Model     string
	Slot      int32
	Outcome   Outcome
	Generated int32 // tokens that the stream has brought
	Started   bool
	// FirstStep and LastStep brought the first and the last tokens; 0: no token came.
	FirstStep, LastStep uint32
	MaxUnreported       int32 // bound of the tokens that are reported only at the end; 0: none are
}

// Outcome says how a request left its rank, and what this shows about the engine.
type Outcome struct {
	Kind      Kind
	Generated int // by this rank; a resumed answer may have more from others
	// Empty: the answer is complete, but without any text.
	Empty bool
	// NoUsage: the answer is complete, but the engine reported no token usage.
	NoUsage bool
	// Refused: the engine answered with 429 or 503.
	Refused bool
	// Lost: the engine took the request, but no event came. If other hand-offs of both engines work,
	// the connection between the prefill and the decode engine has failed.
	Lost bool
	// Orphaned: the decode engine may keep the KV blocks for ever, because it waits for a prefill
	// engine that will never finish writing them. They count as taken until the engine restarts, or
	// its gauges show less KV in use (Gauged).
	Orphaned bool
	// Kept: the engine keeps the KV for the next turn of the chat, if its ranks do so at all
	// (Worker.KeepsKVFor).
	Kept bool
}

// Kind is how a request left its rank.
type Kind uint8

// Values of Kind.
const (
	Finished  Kind = iota // the engine ended the stream
	Cancelled             // the client left
	Failed                // failed, refused, or stopped to be computed again elsewhere
)

// Recount corrects an estimated prompt length, in tokens, by the engine's count.
type Recount struct {
	Model  string
	Slot   int32
	Prompt int
}

// Rerouted says that the KV of a slot comes from another prefill engine than was planned.
type Rerouted struct {
	Model     string
	Slot      int32
	Prefiller string
}

// Excused says that a lost hand-off shows nothing of its engines, because the request was at fault.
type Excused struct {
	Model string
	Link  delivery.Link
}

// FirstEvent says that the engine has taken the request, and the KV of a hand-off has arrived.
type FirstEvent struct {
	Model string
	Slot  int32
}

// Steps brings the new steps of a group, in order.
type Steps struct {
	Group GroupKey
	List  []Step
}

// Step is one step, in which all ranks of a group decode together. It is reported at its first
// token.
type Step struct {
	Number uint32
	// Length is the time between the first tokens of the previous step and of this one; 0: the group
	// was idle before.
	Length time.Duration
}

// SetStepModel replaces the learned step model. Only the simulator sends it, because it knows the
// model.
type SetStepModel struct {
	Group GroupKey
	StepModel

	Weights step.RequestCost // KV tokens that policies count for each request, beside its own KV
}

// SetWorkers replaces the ranks of all models. Requests on ranks whose worker ID stays keep their
// slots.
type SetWorkers struct{ Workers []Worker }

// Preempted says that the engine ran out of KV room and preempted a request.
type Preempted struct{ Worker int32 }

// TablesBuilt brings new tables from a Learner.
type TablesBuilt struct {
	Predictor PredictorKey
	*Tables
}

// SetPolicy changes the policy of the barrier groups. A wrong spec only emits EffectRejected.
type SetPolicy struct{ Spec string }

// SetFit makes all predictors forget what they learned and start from a fit file.
type SetFit struct{ Fit *predictor.Fit }

// Counts has the progress of all requests, by slot index. It is valid for the next event and its
// rounds. Without Counts, the board uses what it read last. A slot beyond the end of a list was
// bound later.
type Counts struct {
	Model     string
	Tokens    []int32  // of each answer
	Started   []bool   // the first event of the answer has come
	FirstStep []uint32 // step that brought the first tokens; 0: none came

	// MaxUnreported bounds the tokens of an answer that the engine reports only at its end; 0:
	// reported as they come.
	MaxUnreported []int32
}

// Tick ends the waits that are over, and makes the board decide if any event since the last Tick
// may let an entry get a slot.
type Tick struct{ Model string }

// Decide runs one round. The caller sends it only while Boards.Deciding is true.
type Decide struct{}

// Decided ends the round of Decide. It brings how long it took, because a board has no clock.
type Decided struct {
	Took     time.Duration // by the wall clock
	Computed time.Duration // CPU time of the policy's thread; Took where the system does not tell it
}

// Shutdown refuses all entries with ErrDraining, also those that come later. Running requests keep
// their slots.
type Shutdown struct{}

func (c *Counts) generated(slot int32) int32 {
	if int(slot) < len(c.Tokens) {
		return c.Tokens[slot]
	}
	return 0
}

func (c *Counts) firstStep(slot int32) uint32 {
	if c != nil && int(slot) < len(c.FirstStep) {
		return c.FirstStep[slot]
	}
	return 0
}

func (c *Counts) maxUnreported(slot int32) int32 {
	if int(slot) < len(c.MaxUnreported) {
		return c.MaxUnreported[slot]
	}
	return 0
}

func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Started) && c.Started[slot] }
