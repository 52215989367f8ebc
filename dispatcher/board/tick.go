package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// SlowRounds is how many rounds of a group the fallback decides after a round that took longer than TickLimit.
const SlowRounds = 64

// guardWaits is how many mean waits an entry must have waited to be overdue. With fewer, the starvation guard
// would turn a saturated pool into first come, first served.
const guardWaits = 6

// advance ends the waits that are over. If something happened that may let an entry in, it prepares the rounds, which
// then follow one by one, see deciding.
func (b *board) advance(now time.Time) {
	b.outage(now)
	b.lonely(now)
	b.expire(now)
	b.expireKept(now)
	due := b.due(now)
	b.arrived = false
	if !due {
		b.keepPace()
		return
	}
	b.changed, b.stepped = false, false
	b.windowEnds, b.heldUntil, b.pairs.checkAt = time.Time{}, time.Time{}, time.Time{}
	b.wakeShy, b.wakeSpared, b.wakeTight = time.Time{}, time.Time{}, time.Time{}
	b.spare(now)
	if b.pool.Len() > 0 {
		b.tick(now)
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// looks says whether the next advance may read what the ranks hold, so that it needs Counts.
func (b *board) looks(now time.Time) bool {
	return b.pool.Len() > 0 && (b.due(now) || !b.pool.NextDeadline().IsZero() && !now.Before(b.pool.NextDeadline()))
}

// due says whether something happened that may let an entry in.
func (b *board) due(now time.Time) bool {
	passed := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	// What arrives while a window is open waits for its end, unless a policy
	// sends everything on at once. Held entries are looked at with each step, and when the policy wants to.
	return b.changed || passed(b.windowEnds) || b.arrived && (b.windowEnds.IsZero() || b.immediate()) ||
		passed(b.heldUntil) || b.windowEnds.IsZero() && b.stepped || passed(b.wakeShy) || passed(b.wakeSpared) || passed(b.wakeTight) ||
		passed(b.keptUntil) || b.pairs.due(now)
}

// settle ends a turn, after all its rounds.
func (b *board) settle(now time.Time) {
	b.nextGroup = len(b.order) // no group decides any more until the next tick
	b.placeNamed(now, false)
	b.watchHeld()
	b.keepPace()
}

// immediate says whether the policy in force of any group sends entries on at once.
func (b *board) immediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.inForce().Immediate() })
}

// tick prepares the rounds: every group that can take an entry decides, the group with the fewest
// KV tokens per rank first. Each sees the entries that the groups before it have left.
func (b *board) tick(now time.Time) {
	b.arrange()
	if len(b.order) == 0 {
		return
	}
	b.ticks++
	b.findTight(now)
	if b.avoiding > 0 {
		b.placeShy(now)
		b.placeNamed(now, true)
	}
	b.asked, b.nextGroup, b.fallbackNext = nil, 0, false
}

// deciding says whether a group has yet to decide. While it does, only two calls may follow:
// decide, which is one round of one policy, and then decided, which gets how long
// the round took, because a board has no clock.
func (b *board) deciding() bool {
	return b.nextGroup < len(b.order) && (b.asked != nil || b.pool.Len() > 0)
}

// decide runs the round of the next group's policy. If that has just failed, the fallback decides
// instead, so that a bug in a policy costs balance but no request.
func (b *board) decide(now time.Time) {
	g := b.order[b.nextGroup]
	p := g.inForce()
	if b.fallbackNext {
		p = &g.fallback
	}
	b.went = went{policy: p}
	if b.asked != nil {
		b.roundLocal(g, p, now)
	} else {
		b.decideRound(g, p, now)
	}
}

// decided gets how long the last round took, and goes on to the next round or ends the turn.
func (b *board) decided(took time.Duration, now time.Time) {
	switch g := b.order[b.nextGroup]; {
	case b.asked != nil:
		b.decidedLocal(g)
		return
	case b.fallbackNext: // the fallback has decided: nothing else could decide in its place, so its round is not judged
		g.held, b.fallbackNext = 0, false
	default:
		b.judge(g, took)
	}
	if !b.fallbackNext {
		b.nextGroup++
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// judge looks at how a round of the policy in force went, and decides whether the fallback takes over.
func (b *board) judge(g *group, took time.Duration) {
	p, went := b.went.policy, b.went
	g.held = policy.Held(p.Policy)
	if p == &g.fallback {
		g.slow--
		return
	}
	g.budget.Spent(took)
	switch {
	case went.failure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosen = b.choose(g.barrier) // a policy that panicked may have left its memory half written
		b.fallbackNext = true
	case went.invalid > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		b.fallbackNext = true
	case took > b.cfg.TickLimit:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackSlow, Policy: p.name, Lasts: took})
		g.slow = SlowRounds
	}
}

// decideRound is one round about the pool: snapshot, decision, binding.
func (b *board) decideRound(g *group, p *decider, now time.Time) {
	b.fill(g, p, now)
	b.consult(g, p, now)
	var t policy.Gathered
	if b.mixed && b.went.failure == nil {
		t = policy.GatheredBy(p.Policy)
		b.takeReport(g, t, now)
	}
	for i := range b.assignments {
		if b.pairs.quarantined > 0 && !b.steer(g, p, i, now) {
			continue
		}
		a := b.assignments[i]
		if fault := b.bind(g, p, a, now); fault != "" {
			b.went.invalid++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
	if t.Released {
		b.countRound(g)
	}
}
