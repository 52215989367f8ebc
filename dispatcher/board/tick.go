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
	due := b.decisionDue(now)
	b.entriesArrived = false // entries that came while a window is open wait for its end, which makes a round due in any case
	if !due {
		b.emitPace()
		return
	}
	b.decideNow, b.heldGroupStepped = false, false
	b.windowEnds = time.Time{}
	// Whatever still has to wait sets its time anew before the turn is over.
	b.recheckHeldAt, b.pairs.quarantineEndsAt = time.Time{}, time.Time{}
	b.retryAvoidedAt, b.retrySparedAt, b.tightEndsAt = time.Time{}, time.Time{}, time.Time{}
	b.updateSpared(now)
	if b.pool.Len() > 0 {
		b.prepareRounds(now)
	}
	if !b.deciding() {
		b.endTurn(now)
	}
}

// needsCounts says whether the next advance may read how many tokens the requests on the ranks have got, so that Counts must be applied
// first.
func (b *board) needsCounts(now time.Time) bool {
	if b.pool.Len() == 0 {
		return false
	}
	entryExpires := hasCome(b.pool.NextDeadline(), now) // expire then compares the loads of the ranks
	return entryExpires || b.decisionDue(now)
}

// decisionDue says whether an event happened, or a time has come, after which a rank may take an entry.
func (b *board) decisionDue(now time.Time) bool {
	windowOpen := !b.windowEnds.IsZero()
	arrived := b.entriesArrived && (!windowOpen || b.anyImmediate()) // in a window, only an immediate policy decides at once
	stepped := b.heldGroupStepped && !windowOpen                     // a policy decides about the entries that it holds back in each step
	return b.decideNow || arrived || stepped ||
		hasCome(b.windowEnds, now) || // the slots that came free in the window are given now, all together
		hasCome(b.recheckHeldAt, now) || // the policy wants to decide about held entries
		hasCome(b.retryAvoidedAt, now) || // an entry may now go to the ranks that it avoided
		hasCome(b.retrySparedAt, now) || // a spared rank may get a request as its trial
		hasCome(b.tightEndsAt, now) || // a tight rank has its whole room again
		hasCome(b.keptKVFreedAt, now) || // an engine has freed KV of ended answers
		hasCome(b.pairs.quarantineEndsAt, now) // a quarantined pair may get a hand-off as its trial
}

// endTurn ends a turn, after all its rounds: it binds the entries that policies do not see, notes when a policy must decide about held
// entries again, and emits the pace of the board.
func (b *board) endTurn(now time.Time) {
	b.nextGroup = len(b.decidingGroups) // no group decides any more until the next tick
	b.bindPartlyListed(now, afterPolicies)
	b.scheduleHeld()
	b.emitPace()
}

// anyImmediate says whether the policy in force of any group sends entries on at once.
func (b *board) anyImmediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.policyInForce().Immediate() })
}

// prepareRounds prepares the rounds: every group that can take an entry decides, the group with the fewest KV tokens per rank first. Each
// group sees the entries that the groups before it have not taken. Before the rounds, it binds entries that policies do not see.
func (b *board) prepareRounds(now time.Time) {
	for _, p := range b.sortedPlacements {
		p.noFreeSlot = false
	}
	b.sortDecidingGroups()
	if len(b.decidingGroups) == 0 {
		return
	}
	b.ticks++
	b.scheduleTightEnd(now)
	if b.restrictedCount > 0 {
		b.bindAvoiding(now)
		b.bindPartlyListed(now, beforePolicies)
	}
	b.localEntry, b.nextGroup, b.fallbackNext = nil, 0, false
}

// deciding says whether a group has yet to decide. While it returns true, only two calls may follow: runRound, which is one round of one
// policy, and then finishRound, with the time that the round took, because a board has no clock.
func (b *board) deciding() bool {
	return b.nextGroup < len(b.decidingGroups) && (b.localEntry != nil || b.pool.Len() > 0)
}

// runRound runs the round of the next group's policy. If this policy has just failed, the fallback decides instead: a bug in a policy then
// makes the loads less equal, but no request fails.
func (b *board) runRound(now time.Time) {
	g := b.decidingGroups[b.nextGroup]
	p := g.policyInForce()
	if b.fallbackNext {
		p = &g.fallbackPolicy
	}
	b.policyFailure, b.invalidAssignments, b.localBound = nil, 0, false
	if b.localEntry != nil {
		b.runLocalRound(g, p, now)
	} else {
		b.runPoolRound(g, p, now)
	}
}

// finishRound judges the last round by the time that it took, and goes on to the next round or ends the turn.
func (b *board) finishRound(took time.Duration, now time.Time) {
	g := b.decidingGroups[b.nextGroup]
	if b.localEntry != nil {
		b.finishLocalRound(g)
		return
	}
	if b.fallbackNext { // this was the round of the fallback, which is not judged, because no other policy could replace it
		g.heldEntries, b.fallbackNext = 0, false
	} else {
		b.judgeRound(g, took)
	}
	if !b.fallbackNext { // else judgeRound wants the fallback to decide for the same group
		b.nextGroup++
	}
	if !b.deciding() {
		b.endTurn(now)
	}
}

// judgeRound lets the fallback take over if the round of the policy in force failed, broke a hard limit or took too long. After a slow
// round the fallback decides the next SlowRounds rounds, otherwise only one, which follows at once (fallbackNext). judgeRound also adapts
// the search budget of the policy to the duration of the round, and notes how many entries the policy held back.
func (b *board) judgeRound(g *group, took time.Duration) {
	p := g.policyInForce()
	g.heldEntries = policy.Held(p.Policy)
	if p == &g.fallbackPolicy { // one of the rounds after a slow round; no other policy could replace the fallback, so it is not judged
		g.fallbackRounds--
		return
	}
	g.searchBudget.adapt(took)
	switch {
	case b.policyFailure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosenPolicy = b.policyFor(g.barrier) // the panic may have left the memory of the policy half written
		b.fallbackNext = true
	case b.invalidAssignments > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		b.fallbackNext = true
	case took > b.cfg.TickLimit:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackSlow, Policy: p.name, Duration: took})
		g.fallbackRounds = SlowRounds
	}
}

// runPoolRound runs one round for the entries of the pool: it fills the snapshot, calls the policy and binds the entries. It counts the
// assignments that cannot be bound (invalidAssignments). If the policy failed, there are no assignments.
func (b *board) runPoolRound(g *group, p *policyInUse, now time.Time) {
	b.fillSnapshot(g, p, now)
	b.runPolicy(g, p, now)
	var report policy.HoldReport
	if b.policyFailure == nil {
		report = policy.HoldReportOf(p.Policy)
		b.storeHoldReport(g, report, now)
	}
	for i := range b.assignments {
		if b.pairs.quarantinedCount > 0 && !b.avoidQuarantinedPair(g, p, i, now) {
			continue // the entry stays in the pool
		}
		a := b.assignments[i] // with the rank that avoidQuarantinedPair may have put there
		if fault := b.bind(g, p, a, now); fault != "" {
			b.invalidAssignments++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
	if report.Released { // the policy sent a round of requests that it had held back
		b.countRound(g)
	}
}
