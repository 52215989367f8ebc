package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// avoidFor is how long an entry waits for a rank that it does not avoid. Meanwhile it is placed
// before all other entries. The time is long because a rank that fails requests at once always has free slots:
// while the other ranks are full, an entry that took any free slot would come back to the failing rank.
// An entry does not wait for ranks that are down.
const avoidFor = 30 * time.Second

// particular says whether an entry cannot go to just any rank of the board: it avoids some ranks, may go only to some, or asks for a
// name that only some list.
func (b *board) particular(e *pool.Entry) bool {
	return len(e.Avoid)+len(e.Only) > 0 || b.partial[e.Name] != nil
}

// mayGo says whether an entry may go to a rank even while the entry is shy: the rank lists its name, and is in its Only or, if that is
// empty, not in its Avoid.
func mayGo(e *pool.Entry, r *rank) bool {
	if len(e.Only) > 0 {
		return r.lists(e.Name) && slices.Contains(e.Only, r.ID)
	}
	return r.lists(e.Name) && !slices.Contains(e.Avoid, r.ID)
}

// shy says whether an entry must not go to the ranks that it avoids now: another rank is up that could take
// it, and the entry has waited for less than avoidFor. An entry with Only stays shy, however long it
// waits.
func (b *board) shy(e *pool.Entry, now time.Time) bool {
	if len(e.Only) > 0 {
		return true
	}
	if len(e.Avoid) == 0 || e.Wait(now) >= avoidFor {
		return false
	}
	for _, g := range b.groups {
		watermark := policy.Watermark(g.inForce().Policy)
		for _, r := range g.ranks {
			if r.Up && mayGo(e, r) && int64(e.Prompt) <= r.budget(watermark) {
				return true
			}
		}
	}
	return false
}

// placeShy admits the shy entries, oldest first, before the policies decide, because
// policies do not know which ranks an entry avoids. Policies do not see the shy entries that
// placeShy cannot place; wakeShy becomes the time at which the first of these stops being shy.
func (b *board) placeShy(now time.Time) {
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		if !b.shy(e, now) {
			i++
			continue
		}
		if r := b.roomFor(e, now); r != nil && b.bind(r.group, r.group.inForce(), policy.Assignment{Entry: e.ID, Worker: r.ID}, now) == "" {
			continue // it has left the pool
		}
		if until := e.Entered.Add(avoidFor); len(e.Only) == 0 && (b.wakeShy.IsZero() || until.Before(b.wakeShy)) {
			b.wakeShy = until
		}
		i++
	}
}

// roomFor returns the rank to which a shy entry goes: the emptiest rank that can take it now; nil: no rank can. It takes a rank
// of the entry's Last, or a spared rank, only if there is no other. Spared ranks are not excluded: they may serve again, while
// the ranks that the entry avoids have failed with it already.
func (b *board) roomFor(e *pool.Entry, now time.Time) (best *rank) {
	for _, g := range b.order {
		for _, r := range g.ranks {
			if r.Up && mayGo(e, r) && b.hasRoomFor(e, r, now) && (best == nil || suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	return best
}

// suitsBetter says whether rank r suits an entry better than the other rank.
func suitsBetter(e *pool.Entry, r, other *rank) bool {
	if last := slices.Contains(e.Last, r.ID); last != slices.Contains(e.Last, other.ID) {
		return !last
	}
	if r.spared != other.spared {
		return !r.spared
	}
	return r.weigh(r.kv) < other.weigh(other.kv)
}

// hasRoomFor says whether a rank that is up has a slot and KV room for an entry, and whether KV from the entry's prefill engine reaches it.
func (b *board) hasRoomFor(e *pool.Entry, r *rank, now time.Time) bool {
	if p := r.group.inForce(); !p.Immediate() && !r.fits(int64(e.Prompt), policy.Watermark(p.Policy), now) {
		return false
	}
	if b.pairs.vetoed(e, r, now) {
		b.pairs.wait(now) // nothing else may happen before the quarantine ends
		return false
	}
	return true
}

// countParticular counts anew the entries that are particular, and those that wait for each listing, after the ranks' lists of names have
// changed.
func (b *board) countParticular() {
	b.avoiding = 0
	for _, l := range b.names {
		l.waiting = 0
	}
	for id, w := range b.waiting {
		if l := b.partial[w.entry.Name]; l != nil && w.local == nil && !w.entry.Discard {
			l.waiting++
		}
		if w.particular = w.local == nil && b.particular(w.entry); w.particular {
			b.avoiding++
		}
		b.waiting[id] = w
	}
}

// hiddenFrom says whether a group's policy does not see an entry, because not all ranks of the group list its name.
func (b *board) hiddenFrom(e *pool.Entry, g *group) bool {
	l := b.partial[e.Name]
	return l != nil && !slices.Contains(l.whole, g)
}

// placeNamed binds entries to ranks that list the entry's name while other ranks of the same group do not. Before the policies decide
// (first), it only places entries that are older than every entry that policies see. After the policies, it places all that it can. So
// neither kind of entry is always served before the other.
func (b *board) placeNamed(now time.Time, first bool) {
	if b.avoiding == 0 || len(b.partial) == 0 {
		return
	}
	for i := 0; i < b.pool.Len(); {
		e := b.pool.Entries()[i]
		l := b.partial[e.Name]
		switch {
		case b.shy(e, now): // placeShy places it
		case l == nil || len(l.whole) > 0 && first:
			if first {
				return
			}
		case l.full < b.ticks && b.placeOn(l, e, now):
			continue // it has left the pool
		}
		i++
	}
}

// placeOn binds an entry to the emptiest rank of a listing that can take it now, and says whether there was such a rank. Ranks of groups
// that all list the name are left to the policies. But if all ranks that list the name are spared, placeOn looks at all of them, and
// ignores that they are spared: spare did not see this, because it looks at all ranks of the board.
func (b *board) placeOn(l *listing, e *pool.Entry, now time.Time) bool {
	var best *rank
	ranks, full := l.parts, true
	spared := !slices.ContainsFunc(l.ranks, (*rank).takes)
	if spared {
		ranks = l.ranks
	}
	for _, r := range ranks {
		if p := r.group.inForce(); (r.takes() || spared && r.Up) && (p.Immediate() || r.free() > 0) {
			full = false
			if b.hasRoomFor(e, r, now) && (best == nil || suitsBetter(e, r, best)) {
				best = r
			}
		}
	}
	if full { // no other entry need look at these ranks in this tick
		l.full = b.ticks
	}
	return best != nil && b.bind(best.group, best.group.inForce(), policy.Assignment{Entry: e.ID, Worker: best.ID}, now) == ""
}
