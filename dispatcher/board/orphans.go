package board

import (
	"slices"
	"time"
)

// Orphans. A request whose KV a prefill engine writes may end before all KV is written to the request's blocks on its
// rank. The decode engine then keeps the blocks until that is done, and if it is never done, for ever. So the slot is free,
// but the room of the prompt is not. No step reads these blocks, so they are no load.

// mostOrphans is how many orphans of a rank are kept one by one. Later orphans are added to the last of them.
const mostOrphans = 64

// gaugeLife is how old the values of an engine's gauges may be when the boards use them.
const gaugeLife = 30 * time.Second

// orphan counts the room of a discharged request as still taken on its rank.
func (b *board) orphan(r *rank, c *charge, now time.Time) {
	b.ledger.released.kvTokens -= int64(c.prompt)
	r.orphaned += int64(c.prompt)
	if n := len(r.orphans); n == mostOrphans {
		r.orphans[n-1] = orphan{r.orphans[n-1].tokens + int64(c.prompt), now}
		return
	}
	r.orphans = append(r.orphans, orphan{int64(c.prompt), now})
}

// forgetOrphans gives back the room of those orphans of a rank for which the function returns true.
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

// everyOrphan makes forgetOrphans forget all orphans.
func everyOrphan(orphan) bool { return true }

// restarted says whether the worker's engine is known to run as another process than before, so that its KV is gone.
func (r *rank) restarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

// leave drops a rank that is gone from the fleet once no request is charged to it.
func (b *board) leave(r *rank) {
	if !r.present && len(r.slots) == 0 {
		b.forgetOrphans(r, everyOrphan)
		b.giveUp(r.kept.Clear())
		delete(b.ranks, r.ID)
	}
}

// room returns how many KV tokens of its capacity a rank has for requests; 0: unlimited.
func (r *rank) room() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.Capacity-r.orphaned-r.kept.Tokens())
}

// gauged gives back the room of orphans that the engine cannot have any more, because our decoding requests and the
// orphans together would need more than the gauge shows in use. Requests that do not decode yet do not count, because they
// may have no blocks yet. Nor do requests that stray, because their blocks may be on another rank.
func (b *board) gauged(r *rank, e Gauged) {
	b.refresh(r)
	missing := r.orphaned - e.KVTokens
	for i, slot := range r.slots {
		if c := &b.ledger.table[slot]; b.seen(slot) && !c.strays && c.since.Before(e.At) {
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
