package board

import (
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
)

// ErrNotLocal says that no decode rank may compute a prompt by itself now.
var ErrNotLocal = errors.New("dispatcher: no decode rank may prefill the prompt now; let a prefill engine do it")

const (
	leastThreshold = 64   // tokens that are always worth it, without a look at BreakEven
	mostThreshold  = 1024 // tokens, even if BreakEven would allow more
)

// Allows says whether a rank may compute so many tokens of a prompt, while it has so many running requests and
// has yet to compute inFlight other tokens.
func (l *Local) Allows(tokens, running, inFlight int) bool {
	switch {
	case inFlight+tokens > l.InFlight:
		return false
	case l.Threshold > 0:
		return tokens <= l.Threshold
	case tokens <= leastThreshold:
		return true
	}
	return tokens <= mostThreshold && float64(tokens)*(1+float64(running)/8) < l.BreakEven
}

// placeLocal starts the rounds that choose a rank for a prompt without a hand-off: one of the ranks that have to compute the least of
// it. If several have, the policy chooses among them. If no rank may compute it, or if entries wait in the pool, the prompt is refused.
func (b *board) placeLocal(w entrant, now time.Time) {
	b.waiting[w.entry.ID] = w
	if b.pool.Len() == 0 {
		b.arrange()
		if b.leastTokens = b.leastLocal(w, now); b.leastTokens > 0 {
			b.ticks++
			b.asked, b.nextGroup, b.fallbackNext = w.entry, 0, false
			return
		}
	}
	b.refuse(w.entry, ErrNotLocal)
}

// leastLocal returns the smallest number of tokens of the prompt that any rank would have to compute;
// 0: no rank may compute it now.
func (b *board) leastLocal(w entrant, now time.Time) (least int) {
	for _, g := range b.order {
		watermark := policy.Watermark(g.inForce().Policy)
		for _, r := range g.ranks {
			if n, ok := b.localOn(r, w, watermark, now); ok && (least == 0 || n < least) {
				least = n
			}
		}
	}
	return least
}

// roundLocal is one call of the group's policy about the asked entry. The snapshot has only this entry, because
// the pool is empty. Ranks that would have to compute more than the least of it are shown as down.
func (b *board) roundLocal(g *group, p *decider, now time.Time) {
	w := b.waiting[b.asked.ID]
	watermark := policy.Watermark(p.Policy)
	b.fill(g, p, now)
	offered := 0
	for i, r := range g.ranks {
		if n, ok := b.localOn(r, w, watermark, now); ok && n == b.leastTokens {
			offered++
			continue
		}
		b.snapshot.Workers[i].Up, b.snapshot.Workers[i].Free = false, 0
	}
	if offered == 0 {
		return
	}
	b.offer(w.entry, p, now)
	b.consult(g, p, now)
	if b.went.failure != nil {
		return
	}
	for _, a := range b.assignments {
		r := g.rank(a.Worker)
		if a.Entry != w.entry.ID || r == nil {
			continue
		}
		if n, ok := b.localOn(r, w, watermark, now); ok && n == b.leastTokens {
			b.went.bound = b.bind(g, p, a, now) == ""
			return
		}
		b.emit(Effect{Kind: EffectNotOffered, Policy: p.name, Worker: a.Worker})
	}
	// The policy chose no rank: it would let the request wait.
}

// decidedLocal goes on to the next group, or refuses the asked entry if no group is left.
func (b *board) decidedLocal(g *group) {
	if b.went.failure != nil {
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosen = b.choose(g.barrier) // a policy that panicked may have left its memory half written
	}
	if b.nextGroup++; b.went.bound {
		b.nextGroup = len(b.order)
	} else if b.nextGroup == len(b.order) {
		b.refuse(b.asked, ErrNotLocal)
	}
}

// localOn says whether the rank may compute the prompt now, and how many tokens of it the rank would have to
// compute, at least 1.
func (b *board) localOn(r *rank, w entrant, watermark float64, now time.Time) (tokens int, ok bool) {
	for _, offer := range w.local.Ranks {
		if offer.Worker != r.ID {
			continue
		}
		tokens = max(1, offer.Tokens)
		return tokens, r.takes() && r.lists(w.entry.Name) && r.fits(int64(w.prompt()), watermark, now) &&
			w.local.Allows(tokens, len(r.slots), b.promptsInFlight(r))
	}
	return 0, false
}

// promptsInFlight returns how many prompt tokens the rank has yet to compute. All tokens of a request's prompt that the rank has to
// compute count until its first event.
func (b *board) promptsInFlight(r *rank) (prompt int) {
	for _, slot := range r.slots {
		if c := &b.ledger.table[slot]; c.newTokens > 0 && !b.started(slot) {
			prompt += int(c.newTokens)
		}
	}
	return prompt
}
