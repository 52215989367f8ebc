package board

import (
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
)

// ErrNotLocal means that a prefill engine must compute the prompt.
var ErrNotLocal = errors.New("dispatcher: no decode rank may prefill the prompt now; let a prefill engine do it")

const (
	leastThreshold = 64   // prompt tokens that are always allowed, whatever BreakEven says
	mostThreshold  = 1024 // most prompt tokens, even if BreakEven would allow more
)

// Allows says whether a rank with running requests may compute so many tokens of a prompt, beside
// inFlight tokens of others.
func (l *Local) Allows(tokens, running, inFlight int) bool {
	switch {
	case inFlight+tokens > l.InFlight:
		return false
	case l.Threshold > 0: // fixed by the operator
		return tokens <= l.Threshold
	case tokens <= leastThreshold:
		return true
	}
	// The computation must take less time than a hand-off (BreakEven). Each running request makes it
	// longer by an eighth.
	tokensIfIdle := float64(tokens) * (1 + float64(running)/8)
	return tokens <= mostThreshold && tokensIfIdle < l.BreakEven
}

// startLocalRounds begins the rounds that choose a decode rank to compute a prompt. The owner runs
// them by Decide and Decided, as after a Tick.
func (b *board) startLocalRounds(w waitingEntry, now time.Time) {
	b.waiting[w.Entry.ID] = w // for the rounds and refuse, although the entry never enters the pool
	if b.pool.Len() == 0 {    // otherwise the pool gets free slots first
		b.sortDecidingGroups()
		if b.leastLocalTokens = b.leastLocal(w, now); b.leastLocalTokens > 0 {
			b.ticks++ // for Round.Tick
			b.beginRounds(w.Entry)
			return
		}
	}
	b.refuse(w.Entry, ErrNotLocal)
}

// leastLocal is the smallest number of prompt tokens, 1 or more, that a rank would compute; 0: no
// rank may.
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

// runLocalRound runs a policy for localEntry, alone in the snapshot. Ranks that may not compute the
// prompt, or would compute more than leastLocalTokens, are shown as down. If a faulty policy
// chooses one of these, EffectNotOffered reports it.
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
		return
	}
	b.addToSnapshot(w.Entry, now)
	b.runPolicy(g, p, now)
	if b.policyFailure != nil {
		return // finishLocalRound replaces the policy
	}
	for _, a := range b.assignments {
		r := g.rankWithID(a.Worker)
		if a.Entry != w.Entry.ID || r == nil {
			continue // for another entry, or to a rank of another group
		}
		if mayChoose(r) {
			b.localBound = b.bind(g, p, a, now) == ""
			return
		}
		b.emit(Effect{Kind: EffectNotOffered, Policy: p.name, Worker: a.Worker})
	}
}

// finishLocalRound: unlike in a round for the pool, the fallback does not decide after a panic.
func (b *board) finishLocalRound(g *group) {
	if b.policyFailure != nil {
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic}) // it counts every panic of a policy
		g.chosenPolicy = b.policyFor(g.barrier)
	}
	b.nextGroup++
	switch {
	case b.localBound:
		b.endRounds()
	case b.nextGroup == len(b.decidingGroups):
		b.refuse(b.localEntry, ErrNotLocal)
	}
}

// localTokens is at least 1. ok: the rank may compute the prompt now.
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
	return 0, false
}

// promptsInFlight counts all tokens of a prompt until the first event, because the engine does not
// report its progress.
func (b *board) promptsInFlight(r *rank) (prompt int) {
	for _, slot := range r.slots {
		if s := &b.slots.records[slot]; s.newTokens > 0 && !b.hasBegun(slot) {
			prompt += int(s.newTokens)
		}
	}
	return prompt
}
