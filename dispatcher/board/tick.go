package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// SlowRounds is how many rounds of a group the fallback decides after a round that took longer than TickLimit.
const SlowRounds = 64

// guardWaits: an entry is overdue only if it has waited at least this many times the mean wait. With a smaller factor, most entries of a
// saturated pool would be overdue, and the starvation guard would serve them first come, first served.
const guardWaits = 6

// advance ends the waits that are over. If an event happened after which a rank may take an entry, it prepares the rounds of
// decisions, which then follow one by one (see deciding).
func (b *board) advance(now time.Time) {
	b.refuseInOutage(now)
	b.refuseInNameOutage(now)
	b.expire(now)
	b.expireKept(now)
	due := b.due(now)
	b.arrived = false // entries that came while a window is open wait for its end, which makes a round due in any case
	if !due {
		b.keepPace()
		return
	}
	b.changed, b.stepped = false, false
	b.windowEnds = time.Time{}
	// Whatever still has to wait sets its time anew in this turn.
	b.heldUntil, b.pairs.checkAt = time.Time{}, time.Time{}
	b.wakeAvoiding, b.wakeSpared, b.wakeTight = time.Time{}, time.Time{}, time.Time{}
	b.spare(now)
	if b.pool.Len() > 0 {
		b.tick(now)
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// looks says whether the next advance may read how many tokens the requests on the ranks have got, so that Counts must be applied first.
func (b *board) looks(now time.Time) bool {
	if b.pool.Len() == 0 {
		return false
	}
	deadline := b.pool.NextDeadline()
	entryExpires := !deadline.IsZero() && !now.Before(deadline) // expire then compares the loads of the ranks
	return entryExpires || b.due(now)
}

// due says whether an event happened, or a time has come, after which a rank may take an entry.
func (b *board) due(now time.Time) bool {
	passed := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	windowOpen := !b.windowEnds.IsZero()
	arrived := b.arrived && (!windowOpen || b.immediate()) // in a window, only an immediate policy decides at once
	stepped := b.stepped && !windowOpen                    // a policy looks at the entries that it holds back in each step
	return b.changed || arrived || stepped || passed(b.windowEnds) || passed(b.heldUntil) || passed(b.wakeAvoiding) ||
		passed(b.wakeSpared) || passed(b.wakeTight) || passed(b.keptUntil) || b.pairs.due(now)
}

// settle ends a turn, after all its rounds: it binds the entries that policies do not see, notes when held entries must be looked at again,
// and emits the pace of the board.
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

// tick prepares the rounds: every group that can take an entry decides, the group with the fewest KV tokens per rank first. Each group sees
// the entries that the groups before it have not taken.
func (b *board) tick(now time.Time) {
	for _, p := range b.names {
		p.full = false
	}
	b.arrange()
	if len(b.order) == 0 {
		return
	}
	b.ticks++
	b.findTight(now)
	if b.restrictedCount > 0 {
		b.placeAvoiding(now)
		b.placeNamed(now, true)
	}
	b.asked, b.nextGroup, b.fallbackNext = nil, 0, false
}

// deciding says whether a group has yet to decide. While it returns true, only two calls may follow: decide, which is one round of one
// policy, and then decided, with the time that the round took, because a board has no clock.
func (b *board) deciding() bool {
	return b.nextGroup < len(b.order) && (b.asked != nil || b.pool.Len() > 0)
}

// decide runs the round of the next group's policy. If this policy has just failed, the fallback decides instead: a bug in a policy then
// makes the loads less equal, but no request fails.
func (b *board) decide(now time.Time) {
	g := b.order[b.nextGroup]
	p := g.inForce()
	if b.fallbackNext {
		p = &g.fallback
	}
	b.failure, b.invalid, b.askedBound = nil, 0, false
	if b.asked != nil {
		b.roundLocal(g, p, now)
	} else {
		b.decideRound(g, p, now)
	}
}

// decided judges the last round by the time that it took, and goes on to the next round or ends the turn.
func (b *board) decided(took time.Duration, now time.Time) {
	g := b.order[b.nextGroup]
	if b.asked != nil {
		b.decidedLocal(g)
		return
	}
	if b.fallbackNext { // this was the round of the fallback, which is not judged, because no other policy could replace it
		g.held, b.fallbackNext = 0, false
	} else {
		b.judge(g, took)
	}
	if !b.fallbackNext { // else judge wants the fallback to decide for the same group
		b.nextGroup++
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// judge lets the fallback take over if the round of the policy in force failed, broke a hard limit or took too long. It also adapts the
// search budget of the policy to the duration of the round, and sets g.held.
func (b *board) judge(g *group, took time.Duration) {
	p := g.inForce()
	g.held = policy.Held(p.Policy)
	if p == &g.fallback { // one of the rounds after a slow round; no other policy could replace the fallback, so it is not judged
		g.slow--
		return
	}
	g.budget.spent(took)
	switch {
	case b.failure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosen = b.choose(g.barrier) // the panic may have left the memory of the policy half written
		b.fallbackNext = true
	case b.invalid > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		b.fallbackNext = true
	case took > b.cfg.TickLimit:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackSlow, Policy: p.name, Duration: took})
		g.slow = SlowRounds
	}
}

// decideRound runs one round for the entries of the pool: it fills the snapshot, calls the policy and binds the entries. It counts the
// assignments that cannot be bound (invalid). If the policy failed, it binds nothing.
func (b *board) decideRound(g *group, p *policyInUse, now time.Time) {
	b.fill(g, p, now)
	b.consult(g, p, now)
	var report policy.Gathered
	if b.failure == nil {
		report = policy.GatheredBy(p.Policy)
		b.takeReport(g, report, now)
	}
	for i := range b.assignments {
		if b.pairs.quarantined > 0 && !b.steer(g, p, i, now) {
			continue // the entry stays in the pool
		}
		a := b.assignments[i] // with the rank that steer may have put there
		if fault := b.bind(g, p, a, now); fault != "" {
			b.invalid++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
	if report.Released {
		b.countRound(g)
	}
}
