package board

import (
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// avoidFor is how long an entry waits for a rank that it does not avoid, ahead
// of all others. It is long because a rank that fails at once is always free:
// while the others are full, an entry that takes what is free comes back to it.
// Ranks that are down are not waited for.
const avoidFor = 30 * time.Second

// particular says whether an entry does not go to any rank.
func particular(e *pool.Entry) bool { return len(e.Avoid)+len(e.Only) > 0 }

// wants says whether an entry may go to a rank as long as it is shy.
func wants(e *pool.Entry, rank int32) bool {
	if len(e.Only) > 0 {
		return slices.Contains(e.Only, rank)
	}
	return !slices.Contains(e.Avoid, rank)
}

// shy says whether an entry must not go to the ranks it avoids now: there is
// another, and it has not waited for that too long. One that may go to some
// ranks only never stops being shy.
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
			if r.Up && wants(e, r.ID) && int64(e.Prompt) <= r.budget(watermark) {
				return true
			}
		}
	}
	return false
}

// placeShy admits the shy entries, oldest first, ahead of what policies decide:
// those know nothing of what an entry went through. Whom it cannot place waits
// unseen by them; wakeShy is when the first of these stops being shy.
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

// roomFor is the rank that a shy entry goes to of those that can take it now: the emptiest, and one of those that come last for it, or
// that are spared, only if there is no other. A rank that is spared may serve again, and those that the entry avoids have refused it. It
// is nil if none can.
func (b *board) roomFor(e *pool.Entry, now time.Time) (best *rank) {
	for _, g := range b.order {
		p := g.inForce()
		watermark := policy.Watermark(p.Policy)
		for _, r := range g.ranks {
			fits := p.Immediate() || r.free() > 0 && r.kv+int64(e.Prompt) <= policy.KVBudget(r.capacity(watermark, now), watermark)
			if r.Up && fits && wants(e, r.ID) && !b.pairs.vetoed(e, r, now) && (best == nil || before(e, r, best)) {
				best = r
			}
		}
	}
	return best
}

// before says whether an entry goes to a rank rather than to another one.
func before(e *pool.Entry, r, other *rank) bool {
	if last := slices.Contains(e.Last, r.ID); last != slices.Contains(e.Last, other.ID) {
		return !last
	}
	if r.spared != other.spared {
		return !r.spared
	}
	return r.weigh(r.kv) < other.weigh(other.kv)
}
