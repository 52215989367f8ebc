package board

import (
	"time"

	"evenkeel/pool"
	"evenkeel/predictor"
)

// Effect is something that a board wants its owner to do: answer a caller, count in a metric, write a log line. The board cannot do it
// itself, because it has no log, no metric and no clock. The owner of the boards carries out effects in their order, after the event
// that caused them. A field whose comment names kinds of effects is set for these kinds only.
type Effect struct {
	Kind   EffectKind
	Group  GroupKey // the group; effects of a whole board have only its Model
	Policy string   // name of the policy that decided, or that is in force now
	Label  string   // label of the metric that counts the effect
	Err    error
	ID     uint64 // EffectInvalid: the entry that the policy named
	Worker int32
	Names  [2]string // EffectDuplicate: the worker that stays, and the ignored one. EffectSpared, EffectUnspared: the first is the rank

	Entry *pool.Entry // EffectBind, EffectRefuse
	Bound Binding
	Slot  int32 // EffectLeftEngineQueue

	Round *Round // EffectRound: valid until the next event

	Pair            Link // EffectQuarantine
	Count           int
	EstimatedTokens float64 // EffectEstimate: tokens that the board had estimated for the answer before its engine reported them
	Duration        time.Duration
	Pace            Throughput   // EffectPace
	Named           []Throughput // EffectPace: for the names of the last EffectNames, in their order. Valid until the next event
	Listed          []string     // EffectNames

	Predictor PredictorKey   // EffectNewPredictor
	Fit       *predictor.Fit // EffectNewPredictor, EffectFit: what learning starts from; nil: from nothing
	Sample    OutputSample   // EffectOutputSample
}

// GroupKey identifies a group: ranks of one model that step together, or all ranks of the model
// that have no barrier. For these, Name is empty.
type GroupKey struct {
	Model, Name string
	Barrier     bool
}

// EffectKind says what an effect is about.
type EffectKind uint8

// The kinds of effects.
const (
	EffectBind             EffectKind = iota // an entry has a slot
	EffectRefuse                             // an entry gets no slot
	EffectLeftEngineQueue                    // a request leaves the engine's own queue, as far as the board can tell
	EffectRound                              // a policy has decided
	EffectInvalid                            // an assignment was not bound, because it breaks a hard limit
	EffectNotOffered                         // for a prompt without a hand-off, the policy chose a rank that may not compute it
	EffectFallback                           // the fallback decides for a policy that failed or was slow
	EffectSent                               // held requests went to mixed ranks of the group Label together; Count ranks now have prompts
	EffectInEngineQueue                      // an entry was bound to an engine's own queue
	EffectQuarantine                         // hand-offs avoid a pair of a prefill and a decode engine from now on
	EffectSpared                             // a rank has refused several requests in a row, and gets none for the time Duration
	EffectUnspared                           // a rank that was spared takes requests again
	EffectSteered                            // a policy chose a quarantined pair; Label is a Steer constant, what became of the assignment
	EffectDuplicate                          // two workers have one ID
	EffectPace                               // a tick is over, and the board has this Pace now
	EffectNames                              // Listed are now the names that only some ranks of the board list
	EffectWatchFirstEvents                   // Count is the suspected pairs and the refusing ranks; above 0: report each FirstEvent
	EffectPolicy                             // another policy is in force
	EffectGroupIdle                          // no request of a group decodes any more
	EffectLeastStep                          // Duration is now the shortest time that counts as a step of the group
	EffectNewPredictor                       // a Learner must begin to learn Predictor
	EffectFit                                // all predictors start anew from another fit
	EffectOutputSample                       // a request has left its rank, and Sample is what predictors learn from it
	EffectEstimate                           // an answer has ended whose tokens were not reported before: it has Count of them
	EffectGroup                              // a group has its first rank; Label is its name
	EffectGroupGone                          // a group has lost its last rank
	EffectGone                               // a board has neither ranks nor entries any more, and is removed
	EffectRejected                           // settings of an event cannot work, so the event changed nothing
)

// Reasons for which the fallback policy took over.
const (
	FallbackPanic   = "panic"
	FallbackInvalid = "invalid"
	FallbackSlow    = "slow"
)

// The reasons for which an assignment of a policy is not bound.
const (
	FaultEntry  = "unknown_entry"
	FaultWorker = "unknown_worker"
	FaultDown   = "worker_down"
	FaultSlot   = "no_slot"
	FaultRoom   = "no_room"
)

// What becomes of a policy's assignment if its prefill and decode engine are a quarantined pair.
const (
	SteerMoved   = "moved"   // to another rank that has room
	SteerSwapped = "swapped" // its rank was exchanged with that of a later assignment
	SteerLeft    = "left"    // the entry stays in the pool
	SteerKept    = "kept"    // the pair is used nevertheless
)

// PredictorKey identifies what a Learner learns: the output lengths of one model, for one kind of predictor.
type PredictorKey struct {
	Model string
	Kind  predictor.Kind
}

// OutputSample is a request that left its rank.
type OutputSample struct {
	Model          string
	Finished       bool // the engine ended the answer; false: it was cut off, so its full length is not known (right-censored)
	Prompt, Output int32
	Key            uint64
}
