package board

import (
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
)

// ErrNotLocal is the error for an entry without a hand-off whose prompt no decode rank may compute now. A prefill engine must then compute
// it.
var ErrNotLocal = errors.New("dispatcher: no decode rank may prefill the prompt now; let a prefill engine do it")

const (
	leastThreshold = 64   // prompt tokens that a decode rank may always compute, whatever BreakEven says
	mostThreshold  = 1024 // most tokens of a prompt that a decode rank computes, even if BreakEven would allow more
)

// Allows says whether a rank may compute this many tokens of a prompt. running is the number of requests on the rank, and inFlight the
// number of tokens of other prompts that it has yet to compute.
func (l *Local) Allows(tokens, running, inFlight int) bool {
	switch {
	case inFlight+tokens > l.InFlight:
		return false
	case l.Threshold > 0: // the operator has set a fixed limit
		return tokens <= l.Threshold
	case tokens <= leastThreshold:
		return true
	}
	// The rank must compute the prompt in less time than a hand-off takes. BreakEven is the length of the prompt, in tokens, that an
	// idle rank computes in just this time. Each running request makes the computation longer by an eighth, as if the prompt had an
	// eighth more tokens.
	tokensIfIdle := float64(tokens) * (1 + float64(running)/8)
	return tokens <= mostThreshold && tokensIfIdle < l.BreakEven
}

// startLocalRounds prepares the rounds that choose a decode rank to compute the prompt of an entry itself. Each group's policy gets one
// round, and may choose among the ranks that have to compute the fewest tokens of the prompt. The owner of the board then runs these rounds
// by the events Decide and Decided, as it does after a Tick. If no decode rank may compute the prompt now, startLocalRounds refuses the
// entry, and a prefill engine computes the prompt.
func (b *board) startLocalRounds(w waitingEntry, now time.Time) {
	b.waiting[w.Entry.ID] = w // the rounds and refuse find the entry there, although it never enters the pool
	if b.pool.Len() == 0 {    // otherwise the entries of the pool get free slots first, because they have waited for longer
		b.sortDecidingGroups() // leastLocal and the rounds look only at decidingGroups
		if b.leastLocalTokens = b.leastLocal(w, now); b.leastLocalTokens > 0 {
			b.ticks++ // these rounds have this number in the decision log (Round.Tick)
			b.beginRounds(w.Entry)
			return
		}
	}
	b.refuse(w.Entry, ErrNotLocal)
}

// leastLocal returns the smallest number of prompt tokens, at least 1, that a rank would have to compute if it took the entry now; 0: no
// rank may take it. It looks at the ranks of all groups that decide now. The policy of a group says which share of a rank's KV room must
// stay free (watermark).
func (b *board) leastLocal(w waitingEntry, now time.Time) (least int) {
	for _, g := range b.decidingGroups {
		watermark := policy.Watermark(g.policyInForce().Policy)
		for _, r := range g.steppingRanks {
			if n, ok := b.localTokens(r, w, watermark, now); ok && (least == 0 || n < least) {
				least = n
			}
		}
	}
	return least
}

// runLocalRound runs the policy of a group once for localEntry. The snapshot has only this entry, because the pool is empty. It shows a
// rank as down if the rank may not compute the prompt, or would have to compute more of the prompt than another rank: startLocalRounds has
// found the smallest number that any rank would have to compute (leastLocalTokens). A policy must not choose a rank that is shown as down.
// If a faulty policy does, its choice is not bound, and EffectNotOffered reports it.
func (b *board) runLocalRound(g *group, p *policyInUse, now time.Time) {
	w := b.waiting[b.localEntry.ID]
	watermark := policy.Watermark(p.Policy) // share of a rank's KV room that the policy keeps empty
	mayChoose := func(r *rank) bool {
		n, ok := b.localTokens(r, w, watermark, now)
		return ok && n == b.leastLocalTokens
	}
	b.fillSnapshot(g, p, now)
	offered := 0
	for i, r := range g.steppingRanks {
		if mayChoose(r) {
			offered++
			continue
		}
		b.snapshot.Workers[i].Up, b.snapshot.Workers[i].Free = false, 0
	}
	if offered == 0 {
		return // no rank is left to the policy of this group
	}
	b.addToSnapshot(w.Entry, now)
	b.runPolicy(g, p, now)
	if b.policyFailure != nil {
		return // the policy panicked, so it assigned nothing; finishLocalRound replaces it
	}
	for _, a := range b.assignments {
		r := g.rankWithID(a.Worker)
		if a.Entry != w.Entry.ID || r == nil {
			continue // the assignment is for another entry, or to a rank of another group
		}
		if mayChoose(r) {
			b.localBound = b.bind(g, p, a, now) == ""
			return
		}
		b.emit(Effect{Kind: EffectNotOffered, Policy: p.name, Worker: a.Worker})
	}
	// The policy assigned the entry to no rank, which means that the entry should wait.
}

// finishLocalRound ends a round about localEntry, a request whose prompt a decode rank is to compute itself. If the round gave the request
// no slot, the next group decides. If no group is left, the request is refused, and a prefill engine computes the prompt. If the policy
// panicked, finishLocalRound counts the panic and builds a new policy. Unlike in a round for the pool, the fallback policy does not decide
// in its place.
func (b *board) finishLocalRound(g *group) {
	if b.policyFailure != nil {
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic}) // this effect counts every panic of a policy
		g.chosenPolicy = b.policyFor(g.barrier)                    // the panic may have left the state of the old policy half written
	}
	b.nextGroup++
	switch {
	case b.localBound:
		b.endRounds() // the other groups need not decide
	case b.nextGroup == len(b.decidingGroups):
		b.refuse(b.localEntry, ErrNotLocal)
	}
}

// localTokens returns how many tokens of the prompt the rank would have to compute, at least 1. ok says whether it may do so now: the entry
// names it (Local.Ranks), it takes requests, it has a slot and KV room, and Local.Allows permits the number.
func (b *board) localTokens(r *rank, w waitingEntry, watermark float64, now time.Time) (tokens int, ok bool) {
	for _, offer := range w.Local.Ranks {
		if offer.Worker != r.ID {
			continue
		}
		tokens = max(1, offer.Tokens) // an engine always computes the last token of a prompt
		ok = r.takesRequests() && r.lists(w.Entry.Name) && r.hasSlotAndRoom(int64(w.prompt()), watermark, now) &&
			w.Local.Allows(tokens, len(r.slots), b.promptsInFlight(r))
		return tokens, ok
	}
	return 0, false // the entry does not name this rank
}

// promptsInFlight returns how many prompt tokens the rank has yet to compute. All tokens of a prompt count until the first event of the
// answer, because the engine does not report how many of them are computed.
func (b *board) promptsInFlight(r *rank) (prompt int) {
	for _, slot := range r.slots {
		if s := &b.slots.records[slot]; s.newTokens > 0 && !b.hasBegun(slot) { // newTokens 0: the KV comes from a prefill engine
			prompt += int(s.newTokens)
		}
	}
	return prompt
}
