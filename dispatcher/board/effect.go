package board

import (
	"time"

	"evenkeel/pool"
	"evenkeel/predictor"
)

// Effect is something that a board wants done outside of it: an answer, a count, a line of
// the log. The board only says so, because it has no log, no metric and no clock. Effects are
// carried out in their order, after the event that caused them.
type Effect struct {
	Kind   EffectKind
	Group  GroupKey // the group, or only the Model of the board
	Policy string   // name of the policy that decided, or that is in force now
	Label  string   // of the metric that counts the effect
	Err    error
	ID     uint64 // EffectInvalid: the entry that the policy named
	Worker int32
	Names  [2]string // EffectDuplicate: the worker that is kept, the one that is ignored

	Entry *pool.Entry // EffectBind, EffectRefuse
	Bound Bound
	Slot  int32 // EffectBegins

	Round *Round // EffectRound: valid until the next event

	Pair    Pair // EffectQuarantine
	Count   int
	Thought float64 // EffectThought: tokens
	Lasts   time.Duration
	Pace    Pace     // EffectPace
	Named   []Pace   // EffectPace: of the names that EffectNames told last. Valid until the next event
	Listed  []string // EffectNames

	Subject Subject        // EffectSubject
	Fit     *predictor.Fit // EffectSubject, EffectFit: what learning starts from; nil: from nothing
	Ending  Ending         // EffectEnding
}

// GroupKey names a group: ranks of one model that step together, or all ranks of the model
// that have no barrier. Those have no name.
type GroupKey struct {
	Model, Name string
	Barrier     bool
}

// EffectKind says what an effect is about.
type EffectKind uint8

// What boards want done.
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
	EffectSpared                       // a rank has refused so many requests in a row that it gets none for so long (Lasts)
	EffectUnspared                     // it takes requests again
	EffectSteered                      // an assignment to a quarantined pair was looked at
	EffectDuplicate                    // two workers have one ID
	EffectPace                         // a tick is over; the pace of the board is this now
	EffectNames                        // these names are listed by some ranks of the board and not by others
	EffectWatch                        // so many pairs are suspected now, and ranks that refuse requests
	EffectPolicy                       // another policy is in force
	EffectRest                         // nothing of a group runs any more
	EffectLeastStep                    // what is shorter is no step of the group
	EffectSubject                      // a subject is to be learned
	EffectFit                          // all subjects start anew from another fit
	EffectEnding                       // a request that subjects learn from has left
	// an answer that was told of at its end only was thought to have so many tokens (Thought), and has Count
	EffectThought
	EffectGroup     // a group has its first rank; Label is its name
	EffectGroupGone // a group has lost its last rank; Label is its name
	EffectGone      // a board holds nothing any more and is forgotten
	EffectRejected  // settings cannot work, and all stays as it was
)

// Why the fallback took over.
const (
	FallbackPanic   = "panic"
	FallbackInvalid = "invalid"
	FallbackSlow    = "slow"
)

// Why an assignment was not bound.
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

// Subject is what is learned: the outputs of one model, by one kind of predictor.
type Subject struct {
	Model string
	Kind  predictor.Kind
}

// Ending is a request that left its rank.
type Ending struct {
	Model          string
	Finished       bool // by itself; else its length is not known (right-censored)
	Prompt, Output int32
	Key            uint64
}
