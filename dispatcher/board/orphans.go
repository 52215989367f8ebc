package board

import (
	"slices"
	"time"
)

// Orphans. A request that is bound before its prefill may end while a prefill engine could still write to
// the blocks that it has on its rank. The engine keeps these then until all is written, and where
// nothing ever is, for ever. Its slot is free, but the room of its prompt is not. No step reads it, so
// that it is no load.

// Of a rank so many orphans are told apart; what comes then counts with the latest.
const mostOrphans = 64

// gaugeLife is how old the gauges may be that tell of orphans.
const gaugeLife = 30 * time.Second

// orphan keeps what a charge that was discharged has on a rank.
func (b *board) orphan(r *rank, c *charge, now time.Time) {
	b.ledger.released.kvTokens -= int64(c.prompt)
	r.orphaned += int64(c.prompt)
	if n := len(r.orphans); n == mostOrphans {
		r.orphans[n-1] = orphan{r.orphans[n-1].tokens + int64(c.prompt), now}
		return
	}
	r.orphans = append(r.orphans, orphan{int64(c.prompt), now})
}

// forgetOrphans gives back what some orphans of a rank have.
func (b *board) forgetOrphans(r *rank, which func(orphan) bool) {
	r.orphans = slices.DeleteFunc(r.orphans, func(o orphan) bool {
		if !which(o) {
			return false
		}
		b.ledger.released.kvTokens += o.tokens
		r.orphaned -= o.tokens
		b.changed = true
		return true
	})
}

func all(orphan) bool { return true }

// restarted says whether a worker is another process than before, which has nothing of what that had.
func (r *rank) restarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

// leave forgets a rank that is gone from the fleet once nothing is charged to it.
func (b *board) leave(r *rank) {
	if !r.present && len(r.slots) == 0 {
		b.forgetOrphans(r, all)
		b.giveUp(r.kept.Clear())
		delete(b.ranks, r.ID)
	}
}

// room is what of its capacity a rank has for requests; 0: it is unlimited.
func (r *rank) room() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.Capacity-r.orphaned-r.kept.Tokens())
}

// gauged gives back the orphans that are not there any more: our requests that decode and the
// orphans would need more than is in use. Those that are bound and do not decode may have no blocks yet,
// and those that stray may have theirs on another rank.
func (b *board) gauged(r *rank, e Gauged) {
	b.refresh(r)
	missing := r.orphaned - e.KVTokens
	for i, slot := range r.slots {
		if b.seen(slot) && !b.ledger.table[slot].strays {
			missing += r.running[i].Tokens()
		}
	}
	b.forgetOrphans(r, func(o orphan) bool {
		if o.tokens > missing || !o.since.Before(e.At) {
			return false
		}
		missing -= o.tokens
		return true
	})
}
