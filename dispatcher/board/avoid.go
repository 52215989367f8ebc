package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// avoidFor is how long an entry waits for a rank that has not failed it before (Entry.Avoid). The
// time is long because a rank that fails every request at once always has free slots: an entry that
// took any free slot would soon come back to it.
const avoidFor = 30 * time.Second

func (b *board) isRestricted(e *pool.Entry) bool {
	return len(e.Avoid)+len(e.Only) > 0 || b.partlyListedNames[e.Name] != nil
}

// mayGo leaves out that after avoidFor an entry may go to the ranks in Avoid, too.
func mayGo(e *pool.Entry, r *rank) bool {
	if len(e.Only) > 0 {
		return r.lists(e.Name) && slices.Contains(e.Only, r.ID)
	}
	return r.lists(e.Name) && !slices.Contains(e.Avoid, r.ID)
}

// mustAvoid is also true for an entry with an Only list: it never goes to other ranks, however long
// it waits.
func (b *board) mustAvoid(e *pool.Entry, now time.Time) bool {
	if len(e.Only) > 0 {
		return true
	}
	if len(e.Avoid) == 0 || e.Wait(now) >= avoidFor {
		return false
	}
	for _, g := range b.groups {
		p := g.policyInForce()
		for _, r := range g.steppingRanks {
			if r.Up && mayGo(e, r) && r.fitsWhenIdle(e, p) && !b.pairs.isQuarantined(e, r, now) {
				return true
			}
		}
	}
	return false
}

func (r *rank) fitsWhenIdle(e *pool.Entry, p *policyInUse) bool {
	// The engine may hold the KV room of orphans until it restarts.
	capacity := r.capacityWithoutOrphans()
	if p.Immediate() {
		capacity = r.Capacity
	}
	watermark := policy.Watermark(p.Policy)
	return int64(e.Prompt) <= policy.KVBudget(capacity, watermark)
}

// bindAvoiding binds the entries for which mustAvoid is true, oldest first, before the policies,
// which do not know about this. Those that it cannot bind stay in the pool, hidden from the
// policies.
func (b *board) bindAvoiding(now time.Time) {
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		if !b.mustAvoid(e, now) {
			i++
			continue
		}
		if r := b.emptiestRankFor(e, now); r != nil && b.bindTo(r, e, now) {
			continue // the next entry has the index i now
		}
		if len(e.Only) == 0 { // otherwise the entry avoids all other ranks for ever
			b.retryAvoidedAt = earlier(b.retryAvoidedAt, e.Entered.Add(avoidFor))
		}
		i++
	}
}

func (b *board) bindTo(r *rank, e *pool.Entry, now time.Time) (bound bool) {
	return b.bind(r.group, r.group.policyInForce(), policy.Assignment{Entry: e.ID, Worker: r.ID}, now) == ""
}

func (b *board) emptiestRankFor(e *pool.Entry, now time.Time) (best *rank) {
	for _, g := range b.decidingGroups {
		for _, r := range g.steppingRanks {
			canTake := r.Up && mayGo(e, r) && b.hasRoomFor(e, r, now)
			if canTake && (best == nil || b.suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	return best
}

// suitsBetter: a rank whose engine refused this entry (Last), or several requests in a row
// (spared), comes last, but not never: it may serve again by now.
func (b *board) suitsBetter(e *pool.Entry, r, other *rank) bool {
	if refusedEntry := slices.Contains(e.Last, r.ID); refusedEntry != slices.Contains(e.Last, other.ID) {
		return !refusedEntry
	}
	if r.spared != other.spared {
		return !r.spared
	}
	return b.holdsLess(r, other)
}

// hasRoomFor also checks the quarantines of pairs.go.
func (b *board) hasRoomFor(e *pool.Entry, r *rank, now time.Time) bool {
	p := r.group.policyInForce()
	mustFit := !p.Immediate() // the engine queues entries for which it has no room
	if mustFit && !r.hasSlotAndRoom(int64(e.Prompt), policy.Watermark(p.Policy), now) {
		return false
	}
	if b.pairs.isQuarantined(e, r, now) {
		// Otherwise the board would decide again only after the next event, which may come much later.
		b.pairs.wakeAtQuarantineEnd(now)
		return false
	}
	return true
}

// countRestricted counts the restricted entries anew, after the lists of model names have changed.
func (b *board) countRestricted() {
	b.restrictedCount = 0
	for _, placement := range b.sortedPlacements {
		placement.waitingForName = 0
	}
	for id, w := range b.waiting {
		inPool := w.Local == nil // an entry with Local never enters the pool
		if inPool {
			b.countWaitingForName(w.Entry, 1)
		}
		if w.restricted = inPool && b.isRestricted(w.Entry); w.restricted {
			b.restrictedCount++
		}
		b.waiting[id] = w // forgetWaiting reads restricted
	}
}

// hiddenFrom: a policy does not see entries whose model name some rank of its group does not list,
// because policies do not know about names.
func (b *board) hiddenFrom(e *pool.Entry, g *group) bool {
	p := b.partlyListedNames[e.Name]
	return p != nil && !slices.Contains(p.wholeGroups, g)
}

const beforePolicies, afterPolicies = true, false

// bindPartlyListed binds entries that hiddenFrom hides from policies. It runs twice in a turn, so
// that these and the other entries are served about in the order of their age: before the policies
// it stops at the first entry that a policy sees, and after them it goes through the whole pool.
func (b *board) bindPartlyListed(now time.Time, beforeRounds bool) {
	if b.restrictedCount == 0 || len(b.partlyListedNames) == 0 {
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i] // oldest first
		placement := b.partlyListedNames[e.Name]
		listedByAllOrNone := placement == nil
		aPolicySees := listedByAllOrNone || len(placement.wholeGroups) > 0
		switch {
		case b.mustAvoid(e, now): // bindAvoiding binds such entries
		case beforeRounds && aPolicySees: // the younger entries are for the second run
			return
		case listedByAllOrNone: // the policies have left it in the pool
		case placement.noFreeSlot:
		case b.bindToPlacement(placement, e, now):
			continue
		}
		i++
	}
}

// ranksForBoard: where all ranks of a group list the name, its policy decides. If every rank that
// lists the name is spared or down, even spared ones are used: updateSpared keeps one rank of the
// board in service, but not one for each name.
func (p *namePlacement) ranksForBoard() (ranks []*rank, evenSpared bool) {
	if anyInService := slices.ContainsFunc(p.ranks, (*rank).takesRequests); anyInService {
		return p.partialGroupRanks, false
	}
	return p.ranks, true
}

func (b *board) bindToPlacement(p *namePlacement, e *pool.Entry, now time.Time) (bound bool) {
	var best *rank
	full := true
	ranks, evenSpared := p.ranksForBoard()
	for _, r := range ranks {
		takes := r.takesRequests() || evenSpared && r.Up
		if takes && (r.group.policyInForce().Immediate() || r.freeSlots() > 0) {
			full = false
			if b.hasRoomFor(e, r, now) && (best == nil || b.suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	if full { // in this tick, other entries with this name need not look here
		p.noFreeSlot = true
	}
	return best != nil && b.bindTo(best, e, now)
}
