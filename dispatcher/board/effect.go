package board

import (
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Effect is something that a board wants its owner to do: answer a caller, count in a metric, write a log line. The board cannot do this
// itself, because it has no log, metric or clock. The owner carries out the effects of an event in their order, before the next event. If
// the comment of a field names kinds of effects, the field is set only for these kinds.
type Effect struct {
	Kind   EffectKind
	Group  GroupKey // group that the effect is about; only Model is set if it is about a whole board
	Policy string   // name of the policy that decided, or that is now in force (EffectPolicy, EffectGroup)
	Label  string   // label value of the metric that counts the effect
	Err    error
	ID     uint64 // EffectInvalid: ID of the entry in the assignment that was not bound
	Worker int32
	// Names has names of workers. EffectDuplicate: the worker that stays, and the ignored one. EffectSpared and EffectUnspared: the first is
	// the rank.
	Names [2]string

	Entry *pool.Entry // EffectBind and EffectRefuse: the entry that is answered
	Bound Binding
	Slot  int32 // EffectLeftEngineQueue: slot of the request that left the queue

	Round *Round // EffectRound: what the policy saw and decided; valid until the next event

	Pair  delivery.Link // EffectQuarantine: who is avoided
	Count int
	// EffectEstimate: EstimatedTokens is the length of the answer as the board had estimated it before the engine reported the tokens.
	EstimatedTokens float64
	Duration        time.Duration
	Pace            Throughput // EffectPace: slots of the whole board
	// EffectPace: Named has one value for each name of the last EffectNames, in their order. It is valid until the next event.
	Named  []Throughput
	Listed []string // EffectNames: model names, sorted

	Predictor PredictorKey // EffectNewPredictor: the predictor that must begin to learn
	// EffectNewPredictor and EffectFit: Fit is the fit file that learning starts from; nil: learning starts from nothing.
	Fit    *predictor.Fit
	Sample OutputSample // EffectOutputSample: output length of a request that left its rank
}

// GroupKey identifies a group of ranks of one model: a barrier group, whose ranks step together, or all ranks of the model that have no
// barrier. Name is empty for the latter.
type GroupKey struct {
	Model, Name string
	Barrier     bool
}

// EffectKind says what has happened on a board, and so what the owner must do.
type EffectKind uint8

// Values of EffectKind. Each comment says what has happened.
const (
	EffectBind       EffectKind = iota // an entry got a slot
	EffectRefuse                       // an entry gets no slot; Err says why
	EffectRound                        // a policy has decided about the waiting entries of a group
	EffectInvalid                      // an assignment was not bound, because it breaks a hard limit
	EffectNotOffered                   // the policy chose a rank that may not compute the prompt of an entry without a hand-off
	EffectFallback                     // the fallback policy decides, because the policy failed or was too slow
	// EffectSent: requests that were held back went together to the group Label, which prefills and decodes. Count of its ranks now have
	// prompts.
	EffectSent
	// EffectQuarantine: hand-offs avoid a prefill engine, a decode engine or a pair of both for the time Duration. Pair has their names, of
	// which one may be empty, and Count is how many hand-offs were lost. With Duration 0, they avoid it no longer.
	EffectQuarantine
	// EffectSpared: a rank has refused several requests in a row, and gets no requests for the time Duration.
	EffectSpared
	EffectUnspared // a rank that got no requests after it had refused several (EffectSpared) takes requests again
	// EffectSteered: a policy chose a quarantined pair of engines. Label is a Steer constant: what became of the assignment.
	EffectSteered
	EffectDuplicate // two workers have the same ID, so the second is ignored
	EffectPace      // a tick is over, and Pace has the slots of the board that are free now
	EffectNames     // Listed has the model names that only some ranks of the board list now
	// EffectWatchFirstEvents: Count is the number of suspected pairs of engines plus that of refusing ranks. Above 0: the owner must send each
	// FirstEvent.
	EffectWatchFirstEvents
	EffectPolicy       // Policy is now the policy of the barrier groups
	EffectGroupIdle    // no request of the group decodes any more, so the next token begins a new step
	EffectLeastStep    // Duration is now the shortest time that counts as a step of the group
	EffectNewPredictor // a Learner must begin to learn output lengths for Predictor
	EffectFit          // all predictors must start anew from Fit
	// EffectOutputSample: a request has left its rank, and predictors learn from Sample.
	EffectOutputSample
	// EffectEstimate: an answer has ended whose tokens its engine reported only now. Count is their number.
	EffectEstimate
	EffectGroup     // a group has its first rank; Label is its name in metrics
	EffectGroupGone // a group has lost its last rank, so its metrics are dropped
	EffectGone      // a board has neither ranks nor entries any more, and was removed
	EffectRejected  // the settings in an event cannot work, so the event changed nothing; Err says why
)

// Label values of EffectFallback.
const (
	FallbackPanic   = "panic"
	FallbackInvalid = "invalid" // an assignment breaks a hard limit
	FallbackSlow    = "slow"    // the policy computed for longer than TickLimit
	FallbackBlocked = "blocked" // the policy took longer than blockedLimit, and computed for less than TickLimit
)

// Label values of EffectInvalid: what is wrong with the assignment.
const (
	FaultEntry  = "unknown_entry"
	FaultWorker = "unknown_worker"
	FaultDown   = "worker_down"
	FaultSlot   = "no_slot"
	FaultRoom   = "no_room"
)

// Label values of EffectSteered: what became of an assignment whose prefill and decode engine are a quarantined pair.
const (
	SteerMoved   = "moved"   // the entry went to another rank that has room
	SteerSwapped = "swapped" // the entry got the rank of a later assignment, and that one got its rank
	SteerLeft    = "left"    // the entry stays in the pool
	SteerKept    = "kept"    // the entry went to the quarantined pair: it is urgent, or no other rank can take it
)

// PredictorKey identifies a predictor: it learns the output lengths of one model, and is of one kind.
type PredictorKey struct {
	Model string
	Kind  predictor.Kind
}

// OutputSample is the output length of a request that left its rank, in tokens, and what predictors know the request by.
type OutputSample struct {
	Model string
	// Finished: the engine ended the answer. Otherwise the answer was cut off, so its full length is not known (right-censored).
	Finished       bool
	Prompt, Output int32
	Key            uint64
}
