package dispatcher

import (
	"time"

	"evenkeel/pool"
)

// effect is something that a board wants done outside of it: an answer, a count, a line of
// the log. The board only says so, because it has no log, no metric and no clock. The
// runner carries effects out in their order, after the event that caused them.
type effect struct {
	kind   effectKind
	board  *board
	group  *group
	policy string // the name of the policy that decided
	label  string // of the metric that counts the effect
	err    error
	entry  uint64
	worker int32
	names  [2]string // effectDuplicate: the worker that is kept, the one that is ignored

	waits *pool.Entry // effectBind, effectRefuse
	bound bound
	slot  int32 // effectBegins

	round *round // effectRound: valid until the next event

	pair  pair // effectQuarantine
	count int
	lasts time.Duration

	subject subjectKey // effectSubject
	ending  ending     // effectEnding
}

// effectKind says what an effect is about.
type effectKind uint8

const (
	effectBind       effectKind = iota // an entry has a slot
	effectRefuse                       // an entry gets no slot
	effectBegins                       // a request leaves the engine's own queue, as far as the board can tell
	effectRound                        // a policy has decided
	effectInvalid                      // an assignment was not bound, because it breaks a hard limit
	effectNotOffered                   // the policy took a rank that was not offered to a prompt without a hand-off
	effectFallback                     // the fallback decides for a policy that failed or was slow
	effectBudget                       // the evaluations that a tick may spend have changed
	effectBeyond                       // an entry was bound to an engine's own queue
	effectQuarantine                   // a pair is avoided from now on
	effectSteered                      // an assignment to a quarantined pair was looked at
	effectDuplicate                    // two workers have one ID
	effectPace                         // a turn is over; the pace of the board is that of now
	effectWatch                        // so many pairs are suspected now
	effectPolicy                       // another policy is in force
	effectRest                         // nothing of a group runs any more
	effectLeastStep                    // what is shorter is no step of the group
	effectSubject                      // a subject is to be learned
	effectFit                          // all subjects start anew from another fit
	effectEnding                       // a request that subjects learn from has left
	effectGroup                        // a group has its first rank
	effectGroupGone                    // a group has lost its last rank
)

func (r *rules) emit(e effect) { r.effects = append(r.effects, e) }
