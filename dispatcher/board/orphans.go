package board

import (
	"slices"
	"time"
)

// Orphans. A request may end while its prefill engine is still writing its KV to the request's blocks on the decode rank. The decode engine
// keeps these blocks until the writing is done, and for ever if it never is: the slot is free, but the KV room of the prompt is not. The
// blocks are no load, because no step reads them.

// mostOrphans is how many orphans of a rank are counted one by one. The tokens of later ones are added to the last.
const mostOrphans = 64

// gaugeLife is the greatest age at which the boards still use the values of an engine's gauges.
const gaugeLife = 30 * time.Second

// addOrphan counts the room of a discharged request as still taken on its rank.
func (b *board) addOrphan(r *rank, s *slotRecord, now time.Time) {
	b.slots.released.kvTokens -= int64(s.prompt) // discharge has counted these tokens as released, but only forgetOrphans releases them
	r.orphanedKV += int64(s.prompt)
	if n := len(r.orphans); n == mostOrphans { // the last orphan stands for all later ones
		r.orphans[n-1] = orphan{r.orphans[n-1].tokens + int64(s.prompt), now}
		return
	}
	r.orphans = append(r.orphans, orphan{int64(s.prompt), now})
}

// forgetOrphans frees the room of the orphans of a rank for which mustForget returns true. The next Tick decides about this room.
func (b *board) forgetOrphans(r *rank, mustForget func(orphan) bool) {
	r.orphans = slices.DeleteFunc(r.orphans, func(o orphan) bool {
		if !mustForget(o) {
			return false
		}
		b.slots.released.kvTokens += o.tokens
		r.orphanedKV -= o.tokens
		b.decideNow = true
		return true
	})
}

// everyOrphan makes forgetOrphans forget all orphans.
func everyOrphan(orphan) bool { return true }

// hasRestarted says whether the worker's engine is known to have restarted, which loses its KV.
func (r *rank) hasRestarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

// dropIfGone drops a rank that has left the fleet, once no request is charged to it. It does nothing to other ranks.
func (b *board) dropIfGone(r *rank) {
	if !r.present && len(r.slots) == 0 {
		b.forgetOrphans(r, everyOrphan)
		b.countFreedKV(r.keptKV.Clear())
		delete(b.ranks, r.ID)
	}
}

// usableCapacity returns how many KV tokens of its capacity a rank has for requests, whether or not requests use them; 0: unlimited.
// Orphans and kept KV of answers take room that requests cannot use.
func (r *rank) usableCapacity() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.Capacity-r.orphanedKV-r.keptKV.Tokens()) // at least 1, because 0 would mean unlimited
}

// hasKVRoom says whether a rank has KV room for a prompt of so many tokens, whether or not a slot is free.
func (r *rank) hasKVRoom(prompt int64) bool {
	return r.Capacity == 0 || r.kv+prompt <= r.usableCapacity()
}

// correctOrphans frees the room of orphans that the engine cannot have any more, because the decoding requests and the orphans together
// would need more KV than the engine's gauge shows in use. It leaves out requests that do not decode yet, because they may have no blocks
// yet, unpinned requests, because their blocks may be on another rank, and all that began after the gauge was read.
func (b *board) correctOrphans(r *rank, e Gauged) {
	b.refresh(r)
	surplus := r.orphanedKV - e.KVTokens // KV tokens that the board counts beyond the gauge
	for i, slot := range r.slots {
		if s := &b.slots.records[slot]; b.firstEventCame(slot) && !s.unpinned && s.boundAt.Before(e.At) {
			surplus += r.running[i].Tokens()
		}
	}
	b.forgetOrphans(r, func(o orphan) bool {
		if o.tokens > surplus || !o.since.Before(e.At) {
			return false
		}
		surplus -= o.tokens
		return true
	})
}
