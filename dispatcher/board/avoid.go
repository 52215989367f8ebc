package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// avoidFor is how long an entry waits for a rank that has not failed it before (those are in Entry.Avoid), if such a rank is up. The time
// is long because a rank that fails every request at once always has free slots. An entry that accepted any free slot would soon come back
// to this rank while the other ranks are full.
const avoidFor = 30 * time.Second

// isRestricted says whether an entry may not go to every rank of the board: it avoids ranks that failed it (Avoid), it is limited to some
// ranks (Only), or it asks for a model name that only some ranks list.
func (b *board) isRestricted(e *pool.Entry) bool {
	return len(e.Avoid)+len(e.Only) > 0 || b.partlyListedNames[e.Name] != nil
}

// mayGo says whether an entry may go to a rank at any time, and not only after it has waited for avoidFor: the rank lists the model name of
// the entry, and it is in Only or, if Only is empty, not in Avoid.
func mayGo(e *pool.Entry, r *rank) bool {
	if len(e.Only) > 0 {
		return r.lists(e.Name) && slices.Contains(e.Only, r.ID)
	}
	return r.lists(e.Name) && !slices.Contains(e.Avoid, r.ID)
}

// mustAvoid says whether an entry must not go to the ranks in its Avoid list yet: it has waited for less than avoidFor, and another rank
// that is up and loses no hand-offs could take it. An entry with an Only list never goes to other ranks, however long it waits, so
// mustAvoid is true for it.
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
				return true // the entry need not avoid this rank, so it waits for such a rank
			}
		}
	}
	return false
}

// fitsWhenIdle says whether the rank has room for an entry under the policy p, or will have it once its requests have ended.
func (r *rank) fitsWhenIdle(e *pool.Entry, p *policyInUse) bool {
	// Orphans are KV room of ended requests that the engine may hold until it restarts (orphans.go), so this room may never come free.
	capacity := r.capacityWithoutOrphans()
	if p.Immediate() { // the policy sends entries at once, and the engine queues those for which it has no room
		capacity = r.Capacity
	}
	watermark := policy.Watermark(p.Policy) // share of a rank's KV room that the policy keeps empty
	return int64(e.Prompt) <= policy.KVBudget(capacity, watermark)
}

// bindAvoiding binds the entries for which mustAvoid is true, oldest first. Such an entry must not go to some ranks: to all that are not in
// its Only list or, if it has no such list, to those that have failed it (Avoid). It runs before the policies, because policies do not know
// these ranks. An entry that it cannot bind stays in the pool, hidden from the policies. retryAvoidedAt becomes the time at which the first
// entry may go even to the ranks that have failed it, because it has waited for avoidFor.
func (b *board) bindAvoiding(now time.Time) {
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		if !b.mustAvoid(e, now) {
			i++
			continue
		}
		if r := b.emptiestRankFor(e, now); r != nil && b.bindTo(r, e, now) {
			continue // the entry has left the pool, so the next one has the index i now
		}
		if len(e.Only) == 0 { // otherwise the entry avoids all other ranks for ever
			b.retryAvoidedAt = earlier(b.retryAvoidedAt, e.Entered.Add(avoidFor))
		}
		i++
	}
}

// bindTo binds an entry to a rank that the board has chosen without a policy. If this would break a hard limit, bindTo returns false, and
// the entry stays in the pool.
func (b *board) bindTo(r *rank, e *pool.Entry, now time.Time) (bound bool) {
	return b.bind(r.group, r.group.policyInForce(), policy.Assignment{Entry: e.ID, Worker: r.ID}, now) == ""
}

// emptiestRankFor returns the best rank for an entry, of those that can take it now and that it may go to (mayGo); nil: there is none. By
// suitsBetter, the emptiest rank is the best one. But a rank whose engine has refused this entry, or several requests in a row, comes last:
// it may serve again by now.
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

// suitsBetter says whether rank r suits an entry better than the other rank. A rank whose engine has not refused this entry (Last) is
// better. If both ranks are equal in this, a rank that is not spared is better: the engine of a spared rank has refused several requests in
// a row. Otherwise the smaller load decides, and in a tie the turn of their groups.
func (b *board) suitsBetter(e *pool.Entry, r, other *rank) bool {
	if refusedEntry := slices.Contains(e.Last, r.ID); refusedEntry != slices.Contains(e.Last, other.ID) {
		return !refusedEntry
	}
	if r.spared != other.spared {
		return !r.spared
	}
	return b.holdsLess(r, other)
}

// hasRoomFor says whether a rank that is up has a slot and KV room for an entry, and no quarantine of pairs.go keeps the entry's prefill
// engine from sending its KV there. If a quarantine is the only obstacle, the board decides again when the next quarantine ends.
func (b *board) hasRoomFor(e *pool.Entry, r *rank, now time.Time) bool {
	p := r.group.policyInForce()
	mustFit := !p.Immediate() // a policy that sends entries at once lets the engine queue those for which it has no room
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

// countRestricted counts two kinds of entries of the pool anew, after the ranks' lists of model names have changed: those that are
// restricted (they may not go to every rank), and those that wait for each name that only some ranks list. Each such name has a placement,
// which says which ranks list the name and how many entries wait for it.
func (b *board) countRestricted() {
	b.restrictedCount = 0
	for _, placement := range b.sortedPlacements {
		placement.waitingForName = 0
	}
	for id, w := range b.waiting {
		inPool := w.Local == nil // an entry with Local, which has no hand-off, never enters the pool
		if inPool {
			b.countWaitingForName(w.Entry, 1) // adds to the placement of the entry's name, if there is one
		}
		if w.restricted = inPool && b.isRestricted(w.Entry); w.restricted {
			b.restrictedCount++
		}
		b.waiting[id] = w // stores restricted, by which forgetWaiting counts the entry out
	}
}

// hiddenFrom says whether an entry is hidden from the policy of a group, because some rank of the group does not list the model name that
// the entry asks for. Policies do not know about names.
func (b *board) hiddenFrom(e *pool.Entry, g *group) bool {
	p := b.partlyListedNames[e.Name]
	return p != nil && !slices.Contains(p.wholeGroups, g)
}

// Values of the parameter beforeRounds of bindPartlyListed: whether it runs before or after the rounds of the policies.
const beforePolicies, afterPolicies = true, false

// bindPartlyListed binds the entries whose model name is listed by only some ranks of a group, because the policy of such a group does not
// see them. It runs twice in a turn, so that these entries and those that policies see are served about in the order of their age. Before
// the policies decide (beforeRounds), it goes through the pool from the oldest entry, and stops at the first one that a policy sees. After
// the policies have decided, it goes through the whole pool.
func (b *board) bindPartlyListed(now time.Time, beforeRounds bool) {
	if b.restrictedCount == 0 || len(b.partlyListedNames) == 0 { // no waiting entry asks for such a name
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i] // the oldest entry comes first
		placement := b.partlyListedNames[e.Name]
		listedByAllOrNone := placement == nil // only policies decide about such entries
		// In a whole group, every rank lists the name, so the policy of this group sees the entry.
		aPolicySees := listedByAllOrNone || len(placement.wholeGroups) > 0
		switch {
		case b.mustAvoid(e, now): // bindAvoiding binds such entries
		case beforeRounds && aPolicySees: // the policies decide now; the younger entries that follow are for the second run
			return
		case listedByAllOrNone: // the policies have left it in the pool
		case placement.noFreeSlot: // an older entry has found no free slot on the ranks that list the name
		case b.bindToPlacement(placement, e, now):
			continue // the entry has left the pool, so the next one has the index i now
		}
		i++
	}
}

// ranksForBoard returns the ranks to which the board itself, without a policy, may bind an entry that asks for the name: the ranks that
// list it, in groups in which another rank does not. In the other groups, the policies decide. A rank is spared (gets no requests) after
// its engine has refused several in a row. If every rank that lists the name is spared or down, ranksForBoard returns all of them, and even
// spared ones may be used: updateSpared keeps at least one rank of the board in service, but not one for each name.
func (p *namePlacement) ranksForBoard() (ranks []*rank, evenSpared bool) {
	if anyInService := slices.ContainsFunc(p.ranks, (*rank).takesRequests); anyInService {
		return p.partialGroupRanks, false
	}
	return p.ranks, true
}

// bindToPlacement binds an entry to the emptiest rank that lists its model name and can take it now. p has the ranks that list the name. It
// returns false if no rank can take the entry. If none of the ranks has a free slot, it also sets noFreeSlot.
func (b *board) bindToPlacement(p *namePlacement, e *pool.Entry, now time.Time) (bound bool) {
	var best *rank
	full := true // no rank that takes requests has a free slot
	ranks, evenSpared := p.ranksForBoard()
	for _, r := range ranks {
		takes := r.takesRequests() || evenSpared && r.Up
		// The policy of the rank's group does not choose the rank, but it decides whether a slot must be free: if it sends entries
		// at once, the engine queues them.
		if takes && (r.group.policyInForce().Immediate() || r.freeSlots() > 0) {
			full = false
			if b.hasRoomFor(e, r, now) && (best == nil || b.suitsBetter(e, r, best)) { // suitsBetter compares refusals and loads
				best = r
			}
		}
	}
	if full { // in this tick, other entries with this name need not look at these ranks
		p.noFreeSlot = true
	}
	return best != nil && b.bindTo(best, e, now)
}
