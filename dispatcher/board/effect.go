package board

import (
	"time"

	"evenkeel/pool"
	"evenkeel/predictor"
)

// Effect is something that a board wants done outside of it: an answer, a count, a line of
// the log. The board cannot do it itself, because it has no log, no metric and no clock. The owner of the
// boards carries effects out in their order, after the event that caused them.
type Effect struct {
	Kind   EffectKind
	Group  GroupKey // the group; effects of a whole board have only its Model
	Policy string   // name of the policy that decided, or that is in force now
	Label  string   // label of the metric that counts the effect
	Err    error
	ID     uint64 // EffectInvalid: the entry that the policy named
	Worker int32
	Names  [2]string // EffectDuplicate: the worker that is kept, and the ignored one. EffectSpared, EffectUnspared: the first is the rank

	Entry *pool.Entry // EffectBind, EffectRefuse
	Bound Bound
	Slot  int32 // EffectBegins

	Round *Round // EffectRound: valid until the next event

	Pair    Pair // EffectQuarantine
	Count   int
	Thought float64 // EffectThought: tokens that the board had estimated
	Lasts   time.Duration
	Pace    Pace     // EffectPace
	Named   []Pace   // EffectPace: for the names of the last EffectNames, in their order. Valid until the next event
	Listed  []string // EffectNames

	Subject Subject        // EffectSubject
	Fit     *predictor.Fit // EffectSubject, EffectFit: what learning starts from; nil: from nothing
	Ending  Ending         // EffectEnding
}

// GroupKey identifies a group: ranks of one model that step together, or all ranks of the model
// that have no barrier. The Name of the latter is empty.
type GroupKey struct {
	Model, Name string
	Barrier     bool
}

// EffectKind says what an effect is about.
type EffectKind uint8

// The kinds of effects.
const (
	EffectBind       EffectKind = iota // an entry has a slot
	EffectRefuse                       // an entry gets no slot
	EffectBegins                       // a request leaves the engine's own queue, as far as the board can tell
	EffectRound                        // a policy has decided
	EffectInvalid                      // an assignment was not bound, because it breaks a hard limit
	EffectNotOffered                   // the policy took a rank that was not offered to a prompt without a hand-off
	EffectFallback                     // the fallback decides for a policy that failed or was slow
	EffectSent                         // a round was sent, and so many ranks (Count) had a prompt to compute then; Label is the group
	EffectBeyond                       // an entry was bound to an engine's own queue
	EffectQuarantine                   // a pair is avoided from now on
	EffectSpared                       // a rank has refused several requests in a row, and gets none for the time Lasts
	EffectUnspared                     // a rank that was spared takes requests again
	EffectSteered                      // an assignment to a quarantined pair was looked at
	EffectDuplicate                    // two workers have one ID
	EffectPace                         // a tick is over, and the board has this Pace now
	EffectNames                        // Listed are now the names that only some ranks of the board list
	EffectWatch                        // Count is how many pairs are suspected now, plus how many ranks refuse requests
	EffectPolicy                       // another policy is in force
	EffectRest                         // nothing of a group runs any more
	EffectLeastStep                    // a time shorter than Lasts is no step of the group
	EffectSubject                      // begin to learn a subject
	EffectFit                          // all subjects start anew from another fit
	EffectEnding                       // a request has left its rank, and Ending is what predictors learn from it
	// an answer whose tokens the engine reported only at its end has Count tokens; the board had estimated Thought
	EffectThought
	EffectGroup     // a group has its first rank; Label is its name
	EffectGroupGone // a group has lost its last rank; Label is its name
	EffectGone      // a board holds nothing any more and is forgotten
	EffectRejected  // settings of an event cannot work, so that the event changed nothing
)

// Why the fallback policy took over.
const (
	FallbackPanic   = "panic"
	FallbackInvalid = "invalid"
	FallbackSlow    = "slow"
)

// The hard limits that an assignment can break, so that it is not bound.
const (
	FaultEntry  = "unknown_entry"
	FaultWorker = "unknown_worker"
	FaultDown   = "worker_down"
	FaultSlot   = "no_slot"
	FaultRoom   = "no_room"
)

// What becomes of an assignment to a quarantined pair.
const (
	SteerMoved   = "moved"
	SteerSwapped = "swapped"
	SteerLeft    = "left" // in the pool
	SteerKept    = "kept"
)

// Subject identifies what a Learner learns: the output lengths of one model, for one kind of predictor.
type Subject struct {
	Model string
	Kind  predictor.Kind
}

// Ending is a request that left its rank.
type Ending struct {
	Model          string
	Finished       bool // the engine ended the answer; false: it was cut off, so its full length is not known (right-censored)
	Prompt, Output int32
	Key            uint64
}
