package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// avoidFor is how long an entry waits for a rank that it does not avoid (Entry.Avoid has the ranks that failed it), if such a rank is up.
// The time is long because a rank that fails every request at once always has free slots: an entry that accepted any free slot would
// soon come back to this rank while the other ranks are full.
const avoidFor = 30 * time.Second

// isRestricted says whether some ranks of the board may not get an entry: it avoids some ranks, it may go only to some (Only), or it asks
// for a model name that only some ranks list.
func (b *board) isRestricted(e *pool.Entry) bool {
	return len(e.Avoid)+len(e.Only) > 0 || b.partialNames[e.Name] != nil
}

// mayGo says whether an entry may go to a rank in every case, and not only after avoidFor: the rank lists the model name of the entry, and
// it is in Only or, if Only is empty, not in Avoid.
func mayGo(e *pool.Entry, r *rank) bool {
	if len(e.Only) > 0 {
		return r.lists(e.Name) && slices.Contains(e.Only, r.ID)
	}
	return r.lists(e.Name) && !slices.Contains(e.Avoid, r.ID)
}

// mustAvoid says whether an entry may not yet go to the ranks that it avoids: it has waited for less than avoidFor, and another rank that
// is up could take it. An entry with Only never goes to other ranks, however long it waits.
func (b *board) mustAvoid(e *pool.Entry, now time.Time) bool {
	if len(e.Only) > 0 {
		return true
	}
	if len(e.Avoid) == 0 || e.Wait(now) >= avoidFor {
		return false
	}
	for _, g := range b.groups {
		watermark := policy.Watermark(g.policyInForce().Policy)
		for _, r := range g.steppingRanks {
			if r.Up && mayGo(e, r) && int64(e.Prompt) <= r.largestPrompt(watermark) {
				return true
			}
		}
	}
	return false
}

// bindAvoiding binds the entries for which mustAvoid is true, oldest first. It runs before the policies decide, because policies do not
// know which ranks an entry avoids. An entry that it cannot bind stays in the pool, hidden from the policies. retryAvoidedAt becomes the
// time at which the first of these entries has waited for avoidFor.
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
		if avoidsForEver := len(e.Only) > 0; !avoidsForEver {
			b.retryAvoidedAt = earlier(b.retryAvoidedAt, e.Entered.Add(avoidFor))
		}
		i++
	}
}

// bindTo binds an entry to a rank that the board itself has chosen. It returns false, and the entry stays in the pool, if this would break
// a hard limit.
func (b *board) bindTo(r *rank, e *pool.Entry, now time.Time) (bound bool) {
	return b.bind(r.group, r.group.policyInForce(), policy.Assignment{Entry: e.ID, Worker: r.ID}, now) == ""
}

// emptiestRankFor returns the emptiest rank that can take an entry now and that the entry does not avoid; nil: there is none. It returns a
// rank whose engine has refused requests only if there is no other: a rank in the entry's Last, or a spared rank (spare.go). Such a rank
// may serve again by now, but the ranks that the entry avoids have already failed this very entry.
func (b *board) emptiestRankFor(e *pool.Entry, now time.Time) (best *rank) {
	for _, g := range b.decidingGroups {
		for _, r := range g.steppingRanks {
			if r.Up && mayGo(e, r) && b.hasRoomFor(e, r, now) && (best == nil || suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	return best
}

// suitsBetter says whether rank r suits an entry better than the other rank: its engine has not refused requests or, in a tie, its load is
// smaller.
func suitsBetter(e *pool.Entry, r, other *rank) bool {
	if lastResort := slices.Contains(e.Last, r.ID); lastResort != slices.Contains(e.Last, other.ID) {
		return !lastResort
	}
	if r.spared != other.spared {
		return !r.spared
	}
	return r.scaleByCost(r.kv) < other.scaleByCost(other.kv)
}

// hasRoomFor says whether a rank that is up has a slot and KV room for an entry, and no quarantine keeps the entry's prefill engine from
// sending its KV there (pairs.go). If only a quarantine does, the board decides again when the first quarantine ends.
func (b *board) hasRoomFor(e *pool.Entry, r *rank, now time.Time) bool {
	p := r.group.policyInForce()
	mustFit := !p.Immediate() // an immediate policy lets the engine queue what has no room yet
	if mustFit && !r.hasSlotAndRoom(int64(e.Prompt), policy.Watermark(p.Policy), now) {
		return false
	}
	if b.pairs.isQuarantined(e, r, now) {
		b.pairs.wakeAtQuarantineEnd(now) // without this the board would decide again only after the next event, which may come much later
		return false
	}
	return true
}

// countRestricted counts the restricted entries anew, and for each name that only some ranks list the entries that wait for it. It runs
// after the ranks' lists of names have changed.
func (b *board) countRestricted() {
	b.restrictedCount = 0
	for _, p := range b.sortedPlacements {
		p.waiting = 0
	}
	for id, w := range b.waiting {
		inPool := w.Local == nil // a local entry never enters the pool
		if p := b.partialNames[w.Entry.Name]; p != nil && inPool && !w.Entry.Discard {
			p.waiting++
		}
		if w.restricted = inPool && b.isRestricted(w.Entry); w.restricted {
			b.restrictedCount++
		}
		b.waiting[id] = w
	}
}

// hiddenFrom says whether an entry is hidden from a group's policy. It is hidden if some rank of the group does not list the model name
// that the entry asks for.
func (b *board) hiddenFrom(e *pool.Entry, g *group) bool {
	p := b.partialNames[e.Name]
	return p != nil && !slices.Contains(p.wholeGroups, g)
}

// The values of a parameter of bindPartlyListed.
const beforePolicies, afterPolicies = true, false

// bindPartlyListed binds the entries whose model name only some ranks of a group list, because policies do not see these entries. Before
// the policies decide, it binds only those that are older than every entry that policies see. After the policies have decided, it binds all
// that it can. This keeps either kind of entry from always being served before the other.
func (b *board) bindPartlyListed(now time.Time, before bool) {
	if b.restrictedCount == 0 || len(b.partialNames) == 0 {
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		p := b.partialNames[e.Name]
		// Policies see an entry whose name all ranks of a group list, and choose between such groups. What they leave may go to other groups.
		leftToPolicies := p == nil || before && len(p.wholeGroups) > 0
		switch {
		case b.mustAvoid(e, now): // bindAvoiding binds it
		case leftToPolicies && before: // all entries after it are younger than an entry that policies see
			return
		case !leftToPolicies && !p.noFreeSlot && b.bindToPlacement(p, e, now):
			continue // the entry has left the pool, so the next one has the index i now
		}
		i++
	}
}

// bindToPlacement binds an entry to the emptiest rank that lists its name and can take it now, and says whether there was such a rank.
// Groups in which every rank lists the name are left to the policies. But if every rank that lists the name is spared or down, all ranks
// that are up count as not spared: updateSpared keeps at least one rank of the board in service, but not one for each name.
func (b *board) bindToPlacement(p *namePlacement, e *pool.Entry, now time.Time) (bound bool) {
	var best *rank
	full := true // no rank has a free slot
	ranks := p.partialGroupRanks
	allSpared := !slices.ContainsFunc(p.ranks, (*rank).takesRequests)
	if allSpared {
		ranks = p.ranks
	}
	for _, r := range ranks {
		takes := r.takesRequests() || allSpared && r.Up
		if takes && (r.group.policyInForce().Immediate() || r.freeSlots() > 0) {
			full = false
			if b.hasRoomFor(e, r, now) && (best == nil || suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	if full { // other entries with this name need not try these ranks again in this tick
		p.noFreeSlot = true
	}
	return best != nil && b.bindTo(best, e, now)
}
