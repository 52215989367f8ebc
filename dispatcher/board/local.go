package board

import (
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
)

// ErrNotLocal is the error for a prompt that no decode rank may compute now.
var ErrNotLocal = errors.New("dispatcher: no decode rank may prefill the prompt now; let a prefill engine do it")

const (
	leastThreshold = 64   // a decode rank may always compute so few tokens, whatever BreakEven says
	mostThreshold  = 1024 // a decode rank computes no more tokens of a prompt, even if BreakEven would allow more
)

// Allows says whether a rank may compute so many tokens of a prompt, while it has so many running requests and has yet to compute inFlight
// tokens of other prompts.
func (l *Local) Allows(tokens, running, inFlight int) bool {
	switch {
	case inFlight+tokens > l.InFlight:
		return false
	case l.Threshold > 0: // the operator has set the limit
		return tokens <= l.Threshold
	case tokens <= leastThreshold:
		return true
	}
	return tokens <= mostThreshold && float64(tokens)*(1+float64(running)/8) < l.BreakEven // BreakEven explains the 8
}

// startLocalRounds starts the rounds that choose a decode rank to prefill the prompt itself. There is one round for each group, and its
// policy may choose among the ranks that have to compute the fewest tokens of the prompt. The entry is refused at once if no rank may
// compute the prompt, or if entries wait in the pool, because those get free slots first. A refused prompt goes to a prefill engine.
func (b *board) startLocalRounds(w waitingEntry, now time.Time) {
	b.waiting[w.Entry.ID] = w
	if b.pool.Len() == 0 {
		b.sortDecidingGroups()
		if b.leastLocalTokens = b.leastLocal(w, now); b.leastLocalTokens > 0 {
			b.ticks++
			b.localEntry, b.nextGroup, b.fallbackNext = w.Entry, 0, false
			return
		}
	}
	b.refuse(w.Entry, ErrNotLocal)
}

// leastLocal returns the smallest number of tokens of the prompt, at least 1, that a rank would have to compute if it took the request now;
// 0: no rank may take it. It asks the ranks of all groups that decide in this round. Each group's policy says how much KV room must stay
// free (watermark).
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

// runLocalRound calls the group's policy once for localEntry. The snapshot has only this entry, because the pool is empty. It shows a rank
// as down if the rank may not compute the prompt, or would have to compute more of it than another rank.
func (b *board) runLocalRound(g *group, p *policyInUse, now time.Time) {
	w := b.waiting[b.localEntry.ID]
	watermark := policy.Watermark(p.Policy)
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
		return // the policy of this group has no rank to choose
	}
	b.addToSnapshot(w.Entry, p, now)
	b.runPolicy(g, p, now)
	if b.policyFailure != nil {
		return
	}
	for _, a := range b.assignments {
		r := g.rankWithID(a.Worker)
		if a.Entry != w.Entry.ID || r == nil {
			continue // the policy named another entry, or a rank of another group
		}
		if mayChoose(r) {
			b.localBound = b.bind(g, p, a, now) == ""
			return
		}
		b.emit(Effect{Kind: EffectNotOffered, Policy: p.name, Worker: a.Worker})
	}
	// The policy chose none of the ranks: it would let the entry wait.
}

// finishLocalRound goes on to the next group if the last round did not bind localEntry. If no group is left, it refuses the entry. If the
// group's policy panicked, finishLocalRound builds it anew, and the fallback does not decide in its place.
func (b *board) finishLocalRound(g *group) {
	if b.policyFailure != nil {
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosenPolicy = b.policyFor(g.barrier) // the panic may have left the memory of the policy half written
	}
	b.nextGroup++
	switch {
	case b.localBound:
		b.nextGroup = len(b.decidingGroups) // the other groups need not decide
	case b.nextGroup == len(b.decidingGroups):
		b.refuse(b.localEntry, ErrNotLocal)
	}
}

// localTokens returns how many tokens of the prompt the rank would have to compute, at least 1. ok says whether it may do so now: it is
// among the ranks that the entry names (Local.Ranks), takes requests, and has a slot and KV room.
func (b *board) localTokens(r *rank, w waitingEntry, watermark float64, now time.Time) (tokens int, ok bool) {
	for _, offer := range w.Local.Ranks {
		if offer.Worker != r.ID {
			continue
		}
		tokens = max(1, offer.Tokens)
		return tokens, r.takesRequests() && r.lists(w.Entry.Name) && r.hasSlotAndRoom(int64(w.prompt()), watermark, now) &&
			w.Local.Allows(tokens, len(r.slots), b.promptsInFlight(r))
	}
	return 0, false
}

// promptsInFlight returns how many prompt tokens the rank has yet to compute. Until the first event of a request, it counts all tokens that
// the rank has to compute for it, because the engine does not report how many of them are done.
func (b *board) promptsInFlight(r *rank) (prompt int) {
	for _, slot := range r.slots {
		if s := &b.slots.records[slot]; s.newTokens > 0 && !b.hasBegun(slot) {
			prompt += int(s.newTokens)
		}
	}
	return prompt
}
