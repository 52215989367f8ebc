package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// SlowRounds is how many rounds the fallback policy decides for a group after a round of the chosen policy was too slow.
const SlowRounds = 64

// blockedLimit is how long a round may take by the wall clock. Where other processes have the CPU, a round of 0.1 ms took up to 80 ms.
const blockedLimit = time.Second

// guardWaits is the smallest multiple of the mean wait after which an entry counts as overdue, so that the starvation guard serves it
// first. With a smaller number, most entries of a saturated pool would be overdue, and the guard would serve them first come, first served.
const guardWaits = 6

// advance ends all waits that are over. If an event happened after which a rank may take an entry, it prepares rounds of decisions, which
// the caller then runs one by one (see deciding). If Config.Window is set, a window begins when the first slot of a burst comes free, and
// the board decides at its end (windowEnds) about all slots that came free in it.
func (b *board) advance(now time.Time) {
	b.refuseInOutage(now)
	b.refuseInNameOutage(now)
	b.expire(now)
	b.expireKept(now)
	due := b.decisionDue(now)
	// Arrivals need not be remembered: either a decision is due now, or a window is open, and at its end a decision is due in any case.
	b.entriesArrived = false
	if !due {
		b.emitPace() // the slots and the entries may have changed, even if no decision is due
		return
	}
	b.clearReasonsToDecide()
	b.updateSpared(now) // finds the ranks that get no requests for a while, because their engines have refused several
	if b.pool.Len() > 0 {
		b.prepareRounds(now)
	}
	if !b.deciding() { // otherwise finishRound ends the turn after the last round
		b.endTurn(now)
	}
}

// clearReasonsToDecide clears what can make a decision due (see decisionDue), because the board decides now.
func (b *board) clearReasonsToDecide() {
	b.decideNow = false
	b.heldGroupStepped = false // a group began a step while its policy held entries back
	b.windowEnds = time.Time{} // the window in which slots came free in a burst
	// Each of the following times is when a wait ends. Before the end of the turn, it is set anew if something still has to wait.
	never := time.Time{}
	b.recheckHeldAt = never          // entries that a policy holds back
	b.retryAvoidedAt = never         // entries that must not go yet to the ranks that failed them
	b.retrySparedAt = never          // ranks that get no requests, because their engines refused several
	b.keptEmptierUntil = never       // ranks that are kept emptier, because their engines preempted requests
	b.pairs.quarantineEndsAt = never // entries whose pair of engines is quarantined, because its hand-offs failed
}

// needsCounts says whether the next advance may read how many tokens the running requests have got, so that the caller must apply Counts
// first.
func (b *board) needsCounts(now time.Time) bool {
	if b.pool.Len() == 0 {
		return false
	}
	return b.decisionDue(now)
}

// decisionDue says whether, since the last decision, an event happened or a time has come after which a rank may take an entry.
func (b *board) decisionDue(now time.Time) bool {
	windowOpen := !b.windowEnds.IsZero()
	// While a window is open, only a policy that sends entries at once decides before its end.
	arrived := b.entriesArrived && (!windowOpen || b.anyImmediate())
	stepped := b.heldGroupStepped && !windowOpen // a policy decides in each step about the entries that it holds back
	return b.decideNow || arrived || stepped ||
		hasCome(b.windowEnds, now) || // the window is over: all slots that came free in it are given now
		hasCome(b.recheckHeldAt, now) || // a policy wants to decide again about entries that it holds back
		hasCome(b.retryAvoidedAt, now) || // an entry may now go to the ranks that failed it before
		hasCome(b.retrySparedAt, now) || // a rank that was spared after refusals may get a request as its trial
		hasCome(b.keptEmptierUntil, now) || // a rank that was kept emptier after preemptions may be filled as usual again
		hasCome(b.keptKVFreedAt, now) || // an engine has freed KV of ended answers
		hasCome(b.pairs.quarantineEndsAt, now) // a quarantined pair may get a hand-off as its trial
}

// endTurn ends a turn after all its rounds. It binds the entries that policies do not see, sets the time at which a policy must decide
// again about held entries, and emits how many slots are free.
func (b *board) endTurn(now time.Time) {
	b.endRounds()
	b.bindPartlyListed(now, afterPolicies)
	b.scheduleHeld()
	b.emitPace()
}

// anyImmediate says whether the policy in force of any group sends entries to ranks at once, even without a free slot.
func (b *board) anyImmediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.policyInForce().Immediate() })
}

// prepareRounds prepares one round for each group that can take an entry. The group with the fewest KV tokens per rank decides first. Each
// group sees only the entries that the groups before it have not taken. Before the rounds, prepareRounds binds entries that policies must
// not decide about.
func (b *board) prepareRounds(now time.Time) {
	for _, p := range b.sortedPlacements {
		p.noFreeSlot = false // slots may have come free since the last tick
	}
	b.sortDecidingGroups()
	if len(b.decidingGroups) == 0 {
		return
	}
	b.ticks++
	b.scheduleTightEnd(now)    // a tight rank is kept emptier for a while after preemptions
	if b.restrictedCount > 0 { // some entries may not go to every rank, and policies do not know to which ranks they may go
		b.bindAvoiding(now)                     // entries that must avoid some ranks
		b.bindPartlyListed(now, beforePolicies) // entries whose model name only some ranks of a group list
	}
	b.beginRounds(nil) // nil: the rounds are about the entries of the pool
}

// deciding says whether a group has yet to decide. While it is true, only two calls may follow: runRound, which runs one policy, and then
// finishRound with the duration of that round, because a board has no clock.
func (b *board) deciding() bool {
	return b.nextGroup < len(b.decidingGroups) && (b.localEntry != nil || b.pool.Len() > 0)
}

// beginRounds makes the groups decide one after the other, the first of decidingGroups first. The rounds are about localEntry only, a
// request whose prompt a decode rank is to compute itself; nil: about the entries of the pool.
func (b *board) beginRounds(localEntry *pool.Entry) {
	b.localEntry, b.nextGroup, b.fallbackNext = localEntry, 0, false
}

// endRounds lets no group decide any more until beginRounds is called: the index of the next group is then beyond the last group.
func (b *board) endRounds() { b.nextGroup = len(b.decidingGroups) }

// runRound runs the policy of the next group once. If this policy has just failed, the fallback policy decides instead. So a bug in a
// policy makes the loads less equal, but no request fails.
func (b *board) runRound(now time.Time) {
	g := b.decidingGroups[b.nextGroup]
	p := g.policyInForce()
	if b.fallbackNext {
		p = &g.fallbackPolicy
	}
	b.policyFailure, b.invalidAssignments, b.localBound = nil, 0, false
	if b.localEntry != nil { // the policy decides only about this request, whose prompt a decode rank is to compute itself
		b.runLocalRound(g, p, now)
	} else {
		b.runPoolRound(g, p, now)
	}
}

// finishRound checks whether the last round failed or took too long, and goes on to the next round or ends the turn. last is the last
// round.
func (b *board) finishRound(last *Decided, now time.Time) {
	g := b.decidingGroups[b.nextGroup]
	// localEntry is a request whose prompt a decode rank is to compute itself. A round about it decides about no entry of the pool.
	if b.localEntry != nil {
		b.finishLocalRound(g)
		return
	}
	if b.fallbackNext { // the fallback policy has decided; it is not judged, because no other policy could replace it
		g.heldEntries, b.fallbackNext = 0, false // it holds no entries back
	} else {
		b.fallbackNext = b.judgeRound(g, last)
	}
	if !b.fallbackNext { // otherwise the fallback policy must now decide for the same group
		b.nextGroup++
	}
	if !b.deciding() {
		b.endTurn(now)
	}
}

// judgeRound lets the fallback policy take over if the policy in force panicked, broke a hard limit, or was too slow. A slow
// round has served its entries, so the group needs no other round now, but the fallback decides its next SlowRounds rounds
// (fallbackRounds). After the other failures, entries may be left without a rank, so the fallback decides at once, in one more round of the
// same group: judgeRound returns true. It also adapts the search budget of the policy to the duration of the round, and notes how many
// entries the policy held back.
func (b *board) judgeRound(g *group, last *Decided) (fallbackNext bool) {
	p := g.policyInForce()
	g.heldEntries = policy.Held(p.Policy)
	if p == &g.fallbackPolicy { // it is in force for some rounds after a slow one, and is not judged in these either
		g.fallbackRounds--
		return false
	}
	g.searchBudget.adapt(last.Computed)
	switch {
	case b.policyFailure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosenPolicy = b.policyFor(g.barrier) // the panic may have left the state of the old policy half written
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

// fallBack lets the fallback policy decide the next SlowRounds rounds of a group.
func (b *board) fallBack(g *group, p *policyInUse, why string, took time.Duration) {
	b.emit(Effect{Kind: EffectFallback, Label: why, Policy: p.name, Duration: took})
	g.fallbackRounds, g.fallbackReason = SlowRounds, why
}

// runPoolRound runs one round for the entries of the pool: it fills the snapshot, calls the policy and binds the entries as the policy
// assigned them. If the policy panicked, there are no assignments.
func (b *board) runPoolRound(g *group, p *policyInUse, now time.Time) {
	b.fillSnapshot(g, p, now)
	b.runPolicy(g, p, now)
	if b.policyFailure != nil {
		return
	}
	report := policy.HoldReportOf(p.Policy) // about the entries that the policy holds back
	b.storeHoldReport(g, report, now)
	b.bindAssignments(g, p, now)
	if report.Released { // the policy sent a round of requests that it had held back
		b.countRound(g)
	}
}

// bindAssignments binds the entries as the policy assigned them. It counts the assignments that break a hard limit and are not bound
// (invalidAssignments). A pair of a prefill and a decode engine is quarantined after hand-offs between the two have failed. An entry that
// the policy sends to such a pair gets another rank, or stays in the pool.
func (b *board) bindAssignments(g *group, p *policyInUse, now time.Time) {
	for i := range b.assignments {
		if b.pairs.AnyOut() && !b.avoidQuarantinedPair(g, p, i, now) {
			continue // the entry stays in the pool
		}
		a := b.assignments[i] // read only now, because avoidQuarantinedPair may have put another rank there
		if fault := b.bind(g, p, a, now); fault != "" {
			b.invalidAssignments++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
}
