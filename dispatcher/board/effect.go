package board

import (
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Effect is something that a board wants its owner to do, because it has no log, metric or clock.
// The owner carries out the effects of an event in their order, before the next event. If the
// comment of a field names kinds, the field is set only for these.
type Effect struct {
	Kind   EffectKind
	Group  GroupKey // only Model is set for an effect about a whole board
	Policy string   // decided, or is now in force (EffectPolicy, EffectGroup)
	Label  string   // of the metric that counts the effect
	Err    error
	ID     uint64 // EffectInvalid: the entry that was not bound
	Worker int32
	// Names has names of workers. EffectDuplicate: the one that stays, and the ignored one.
	// EffectSpared, EffectUnspared: the first is the rank.
	Names [2]string

	Entry *pool.Entry // EffectBind, EffectRefuse
	Bound Binding

	Round *Round // EffectRound; valid until the next event

	Pair  delivery.Link // EffectQuarantine
	Count int
	// EstimatedTokens: EffectEstimate; the estimate before the engine reported the tokens.
	EstimatedTokens float64
	Duration        time.Duration
	Pace            Throughput // EffectPace: of the whole board
	// Named: EffectPace; one value for each name of the last EffectNames, valid until the next event.
	Named  []Throughput
	Listed []string // EffectNames: sorted

	Predictor PredictorKey // EffectNewPredictor
	// Fit: EffectNewPredictor, EffectFit; nil: learning starts from nothing.
	Fit    *predictor.Fit
	Sample OutputSample // EffectOutputSample
}

// GroupKey identifies a barrier group or, with an empty Name, all ranks of the model without a
// barrier.
type GroupKey struct {
	Model, Name string
	Barrier     bool
}

// EffectKind says what has happened.
type EffectKind uint8

// Each comment says what has happened.
const (
	EffectBind       EffectKind = iota // an entry got a slot
	EffectRefuse                       // an entry gets no slot; Err says why
	EffectRound                        // a policy has decided for a group
	EffectInvalid                      // an assignment was not bound, because it breaks a hard limit
	EffectNotOffered                   // the policy chose a rank that Local does not allow
	EffectFallback                     // the policy failed or was too slow, so the fallback decides
	// EffectSent: held requests went together to the mixed group Label. Count of its ranks now have
	// prompts.
	EffectSent
	// EffectQuarantine: hand-offs avoid the engines of Pair, of which one may be empty, for Duration;
	// 0: no longer. Count were lost.
	EffectQuarantine
	// EffectSpared: a rank that refused several requests in a row gets none for Duration.
	EffectSpared
	EffectUnspared // it takes requests again
	// EffectSteered: a policy chose a quarantined pair. Label is a Steer constant.
	EffectSteered
	EffectDuplicate // of two workers with the same ID, the second is ignored
	EffectPace      // a tick is over; Pace has the free slots
	EffectNames     // Listed has the model names that only some ranks list now
	// EffectWatchFirstEvents: Count is the number of suspected pairs and refusing ranks. Above 0, the
	// owner must send each FirstEvent.
	EffectWatchFirstEvents
	EffectPolicy       // Policy is now the policy of the barrier groups
	EffectGroupIdle    // nothing decodes, so the next token begins a new step
	EffectLeastStep    // Duration is now the shortest time that counts as a step
	EffectNewPredictor // a Learner must begin to learn for Predictor
	EffectFit          // all predictors must start anew from Fit
	// EffectOutputSample: predictors learn from Sample.
	EffectOutputSample
	// EffectEstimate: an unreported answer has ended. Count is the number of its tokens.
	EffectEstimate
	EffectGroup     // a group has its first rank; Label is its name in metrics
	EffectGroupGone // a group has lost its last rank; its metrics are dropped
	EffectGone      // a board was removed
	EffectRejected  // an event changed nothing, because its settings cannot work
)

// Labels of EffectFallback.
const (
	FallbackPanic   = "panic"
	FallbackInvalid = "invalid" // an assignment breaks a hard limit
	FallbackSlow    = "slow"    // the policy computed for longer than TickLimit
	FallbackBlocked = "blocked" // the policy took longer than blockedLimit, and computed for less than TickLimit
)

// Labels of EffectInvalid.
const (
	FaultEntry  = "unknown_entry"
	FaultWorker = "unknown_worker"
	FaultDown   = "worker_down"
	FaultSlot   = "no_slot"
	FaultRoom   = "no_room"
)

// Labels of EffectSteered: what became of an assignment to a quarantined pair.
const (
	SteerMoved   = "moved"   // to another rank
	SteerSwapped = "swapped" // exchanged with a later assignment
	SteerLeft    = "left"    // the entry stays in the pool
	SteerKept    = "kept"    // bound all the same: urgent, or no other rank can take it
)

// PredictorKey identifies a predictor.
type PredictorKey struct {
	Model string
	Kind  predictor.Kind
}

// OutputSample is an output length in tokens, and what predictors know the request by.
type OutputSample struct {
	Model string
	// Finished: otherwise the answer was cut off, so its full length is not known (right-censored).
	Finished       bool
	Prompt, Output int32
	Key            uint64
}
