package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// SlowRounds is how long the fallback decides after a round over the limit.
const SlowRounds = 64

// guardWaits: an entry is overdue only at this many mean waits, or the guard
// would turn a saturated pool into first come, first served.
const guardWaits = 6

// advance ends the waits that are over, and begins to decide if anything happened that may
// let an entry in. The rounds themselves follow, one by one, see deciding.
func (b *board) advance(now time.Time) {
	b.outage(now)
	b.lonely(now)
	b.expire(now)
	b.outlive(now)
	due := b.due(now)
	b.arrived = false
	if !due {
		b.keepPace()
		return
	}
	b.changed, b.stepped, b.windowEnds, b.heldUntil, b.wakeShy, b.wakeSpared, b.pairs.checkAt = false, false, time.Time{}, time.Time{},
		time.Time{}, time.Time{}, time.Time{}
	b.spare(now)
	if b.pool.Len() > 0 {
		b.tick(now)
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// looks says whether a turn may look at what the ranks hold.
func (b *board) looks(now time.Time) bool {
	return b.pool.Len() > 0 && (b.due(now) || !b.pool.NextDeadline().IsZero() && !now.Before(b.pool.NextDeadline()))
}

// due says whether something happened that may let an entry in.
func (b *board) due(now time.Time) bool {
	over := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	// What arrives while a window is open waits for its end, unless a policy
	// sends everything on at once. Held entries are looked at with each step, and when the policy wants to.
	return b.changed || over(b.windowEnds) || b.arrived && (b.windowEnds.IsZero() || b.immediate()) ||
		over(b.heldUntil) || b.windowEnds.IsZero() && b.stepped || over(b.wakeShy) || over(b.wakeSpared) || over(b.keptTo) || b.pairs.due(now)
}

// settle ends a turn.
func (b *board) settle(now time.Time) {
	b.at = len(b.order) // nobody decides on what comes later
	b.placeNamed(now, false)
	b.watchHeld()
	b.keepPace()
}

func (b *board) immediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.inForce().Immediate() })
}

// tick has every group decide that can take an entry, the one with the fewest
// KV tokens a rank first; each sees the pool that is left.
func (b *board) tick(now time.Time) {
	b.arrange()
	if len(b.order) == 0 {
		return
	}
	b.ticks++
	if b.avoiding > 0 {
		b.placeShy(now)
		b.placeNamed(now, true)
	}
	b.asked, b.at, b.again = nil, 0, false
}

// deciding says whether a group has yet to decide. Then nothing may happen to the board but
// decide, which is one round of one policy, and after it decided, which is told how long
// the round took: a board has no clock.
func (b *board) deciding() bool {
	return b.at < len(b.order) && (b.asked != nil || b.pool.Len() > 0)
}

// decide lets the next group's policy admit; where that has failed the fallback decides
// instead, so that a bug in a policy costs balance and never a request.
func (b *board) decide(now time.Time) {
	g := b.order[b.at]
	p := g.inForce()
	if b.again {
		p = &g.fallback
	}
	b.went = went{policy: p}
	if b.asked != nil {
		b.roundLocal(g, p, now)
	} else {
		b.decideRound(g, p, now)
	}
}

// decided takes in how long the last round took, and what follows from how it went.
func (b *board) decided(took time.Duration, now time.Time) {
	switch g := b.order[b.at]; {
	case b.asked != nil:
		b.decidedLocal(g)
		return
	case b.again: // the fallback is as simple as a policy gets: how its own round went changes nothing
		g.held, b.again = 0, false
	default:
		b.judge(g, took)
	}
	if !b.again {
		b.at++
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// judge draws the consequences of a round of the policy in force.
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
		g.chosen = b.choose(g.barrier) // its scratch may be half written
		b.again = true
	case went.invalid > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		b.again = true
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
		b.note(g, t, now)
	}
	for i := range b.assignments {
		if b.pairs.out > 0 && !b.steer(g, p, i, now) {
			continue
		}
		a := b.assignments[i]
		if fault := b.bind(g, p, a, now); fault != "" {
			b.went.invalid++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
	if t.Released {
		b.sent(g)
	}
}
