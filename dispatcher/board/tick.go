package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// SlowRounds is how many rounds the fallback policy decides after one that was too slow.
const SlowRounds = 64

// blockedLimit is how long a round may take by the wall clock. Where other processes have the CPU,
// a round of 0.1 ms took up to 80 ms.
const blockedLimit = time.Second

// guardWaits times the mean wait, at least, make an entry overdue for the starvation guard. With a
// smaller number, most entries of a saturated pool would be overdue, and the guard would serve them
// first come, first served.
const guardWaits = 6

// advance ends all waits that are over, and prepares rounds of decisions if a decision is due. The
// caller then runs them one by one (see deciding).
func (b *board) advance(now time.Time) {
	b.refuseInOutage(now)
	b.refuseInNameOutage(now)
	b.expire(now)
	b.expireKept(now)
	due := b.decisionDue(now)
	// Arrivals need not be remembered: if a window is open, a decision is due at its end in any case.
	b.entriesArrived = false
	if !due {
		b.emitPace()
		return
	}
	b.clearReasonsToDecide()
	b.updateSpared(now)
	if b.pool.Len() > 0 {
		b.prepareRounds(now)
	}
	if !b.deciding() { // otherwise finishRound ends the turn after the last round
		b.endTurn(now)
	}
}

func (b *board) clearReasonsToDecide() {
	b.decideNow = false
	b.heldGroupStepped = false
	b.windowEnds = time.Time{}
	// Each of these times is set anew before the end of the turn if something still has to wait.
	never := time.Time{}
	b.recheckHeldAt = never
	b.retryAvoidedAt = never
	b.retrySparedAt = never
	b.keptEmptierUntil = never
	b.pairs.quarantineEndsAt = never
}

// needsCounts says whether the caller must apply Counts before the next advance.
func (b *board) needsCounts(now time.Time) bool {
	if b.pool.Len() == 0 {
		return false
	}
	return b.decisionDue(now)
}

func (b *board) decisionDue(now time.Time) bool {
	windowOpen := !b.windowEnds.IsZero()
	// While a window is open, only a policy that sends entries at once decides before its end.
	arrived := b.entriesArrived && (!windowOpen || b.anyImmediate())
	stepped := b.heldGroupStepped && !windowOpen
	return b.decideNow || arrived || stepped ||
		hasCome(b.windowEnds, now) ||
		hasCome(b.recheckHeldAt, now) ||
		hasCome(b.retryAvoidedAt, now) ||
		hasCome(b.retrySparedAt, now) ||
		hasCome(b.keptEmptierUntil, now) ||
		hasCome(b.keptKVFreedAt, now) ||
		hasCome(b.pairs.quarantineEndsAt, now)
}

func (b *board) endTurn(now time.Time) {
	b.endRounds()
	b.bindPartlyListed(now, afterPolicies)
	b.scheduleHeld()
	b.emitPace()
}

func (b *board) anyImmediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.policyInForce().Immediate() })
}

// prepareRounds prepares one round for each group that can take an entry, the group with the fewest
// KV tokens per rank first. Each group sees only the entries that those before it have not taken.
func (b *board) prepareRounds(now time.Time) {
	for _, p := range b.sortedPlacements {
		p.noFreeSlot = false // slots may have come free since the last tick
	}
	b.sortDecidingGroups()
	if len(b.decidingGroups) == 0 {
		return
	}
	b.ticks++
	b.scheduleTightEnd(now)
	if b.restrictedCount > 0 { // policies do not know to which ranks these may go
		b.bindAvoiding(now)
		b.bindPartlyListed(now, beforePolicies)
	}
	b.beginRounds(nil)
}

// deciding says whether a group has yet to decide. While it is true, only runRound may follow, and
// then finishRound with the duration of that round, because a board has no clock.
func (b *board) deciding() bool {
	return b.nextGroup < len(b.decidingGroups) && (b.localEntry != nil || b.pool.Len() > 0)
}

func (b *board) beginRounds(localEntry *pool.Entry) {
	b.localEntry, b.nextGroup, b.fallbackNext = localEntry, 0, false
}

func (b *board) endRounds() { b.nextGroup = len(b.decidingGroups) }

// runRound runs the policy of the next group, or the fallback policy if it has just failed: a bug
// in a policy makes the loads less equal, but no request fails.
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

func (b *board) finishRound(last *Decided, now time.Time) {
	g := b.decidingGroups[b.nextGroup]
	if b.localEntry != nil {
		b.finishLocalRound(g)
		return
	}
	if b.fallbackNext { // the fallback policy is not judged, because no other could replace it
		g.heldEntries, b.fallbackNext = 0, false
	} else {
		b.fallbackNext = b.judgeRound(g, last)
	}
	if !b.fallbackNext {
		b.nextGroup++
	}
	if !b.deciding() {
		b.endTurn(now)
	}
}

// judgeRound lets the fallback policy take over after a failure. A slow round has served its
// entries, so the fallback decides the next SlowRounds rounds. After the other failures, entries
// may be left without a rank, so the fallback decides at once, in one more round (fallbackNext).
func (b *board) judgeRound(g *group, last *Decided) (fallbackNext bool) {
	p := g.policyInForce()
	g.heldEntries = policy.Held(p.Policy)
	if p == &g.fallbackPolicy { // not judged in its rounds after a slow one either
		g.fallbackRounds--
		return false
	}
	g.searchBudget.adapt(last.Computed)
	switch {
	case b.policyFailure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosenPolicy = b.policyFor(g.barrier) // the panic may have left its state half written
		return true
	case b.invalidAssignments > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		return true
	case last.Computed > b.cfg.TickLimit:
		b.fallBack(g, p, FallbackSlow, last.Computed)
	case last.Took > blockedLimit:
		b.fallBack(g, p, FallbackBlocked, last.Took)
	}
	return false
}

func (b *board) fallBack(g *group, p *policyInUse, why string, took time.Duration) {
	b.emit(Effect{Kind: EffectFallback, Label: why, Policy: p.name, Duration: took})
	g.fallbackRounds, g.fallbackReason = SlowRounds, why
}

func (b *board) runPoolRound(g *group, p *policyInUse, now time.Time) {
	b.fillSnapshot(g, p, now)
	b.runPolicy(g, p, now)
	if b.policyFailure != nil {
		return
	}
	report := policy.HoldReportOf(p.Policy)
	b.storeHoldReport(g, report, now)
	b.bindAssignments(g, p, now)
	if report.Released { // the policy sent entries that it had held back
		b.countRound(g)
	}
}

func (b *board) bindAssignments(g *group, p *policyInUse, now time.Time) {
	for i := range b.assignments {
		if b.pairs.AnyOut() && !b.avoidQuarantinedPair(g, p, i, now) {
			continue
		}
		// Read only now, because avoidQuarantinedPair may have put another rank there.
		a := b.assignments[i]
		if fault := b.bind(g, p, a, now); fault != "" {
			b.invalidAssignments++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
}
