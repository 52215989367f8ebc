package board

import (
	"slices"
	"time"
)

// Orphans. A request may end while its prefill engine is still writing its KV to blocks on the decode rank. The decode engine keeps these
// blocks until the writing is done, and for ever if it never is: then the slot is free, but the KV room of the prompt is not. The board
// counts this room as an orphan. Orphans do not count as load, because no step reads their blocks.

// mostOrphans is how many orphans of a rank are counted one by one. The tokens of any further orphan are added to the last one.
const mostOrphans = 64

// gaugeLife is the largest age at which the boards still use a value of an engine's gauges.
const gaugeLife = 30 * time.Second

// addOrphan counts the KV room of a request that has left its slot as still taken on its rank, from now on: its prefill engine may still be
// writing the KV there, and the decode engine keeps the room until this is done. forgetOrphans frees it.
func (b *board) addOrphan(r *rank, s *slotRecord, now time.Time) {
	// discharge has counted these tokens as released, but they are released only when the orphan is forgotten.
	b.slots.released.kvTokens -= int64(s.prompt)
	r.orphanedKV += int64(s.prompt)
	if n := len(r.orphans); n == mostOrphans { // the list is full, so the last orphan stands for this one, too
		r.orphans[n-1] = orphan{r.orphans[n-1].tokens + int64(s.prompt), now}
		return
	}
	r.orphans = append(r.orphans, orphan{int64(s.prompt), now})
}

// forgetOrphans frees the room of those orphans of a rank for which mustForget returns true, and makes the next Tick decide about this
// room.
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

func everyOrphan(orphan) bool { return true }

// hasRestarted says whether the engine of the rank has another process now than before. A restarted engine has lost all KV. If either
// process is not known (0), it counts as not restarted.
func (r *rank) hasRestarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

// dropIfGone drops the rank if it has left the fleet and no request is charged to it any more.
func (b *board) dropIfGone(r *rank) {
	if !r.present && len(r.slots) == 0 {
		b.forgetOrphans(r, everyOrphan)
		b.countFreedKV(r.keptKV.Clear())
		delete(b.ranks, r.ID)
	}
}

// usableCapacity returns the KV tokens of the rank's capacity that requests may use, whether or not they use them now; 0: unlimited.
// Orphans and kept KV of ended answers take the rest.
func (r *rank) usableCapacity() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.capacityWithoutOrphans()-r.keptKV.Tokens()) // at least 1, because 0 would mean unlimited
}

// capacityWithoutOrphans returns the KV tokens of the rank's capacity that are free sooner or later; 0: unlimited. Orphans take the rest,
// because the engine may hold them until it restarts. It frees the kept KV of ended answers after a set time.
func (r *rank) capacityWithoutOrphans() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.Capacity-r.orphanedKV) // at least 1, because 0 would mean unlimited
}

// hasKVRoom says whether the rank has KV room for a prompt of this many tokens, whether or not a slot is free.
func (r *rank) hasKVRoom(prompt int64) bool {
	return r.Capacity == 0 || r.kv+prompt <= r.usableCapacity()
}

// correctOrphans frees the room of orphans that the engine cannot have any more. An orphan is KV room of a request that has ended, if the
// engine may still hold it. If the decoding requests and the orphans together would need more KV than the engine's gauge shows in use, the
// engine no longer holds the difference (surplus). Three kinds of requests do not count: those that do not decode yet, because they may
// have no blocks yet, those whose rank the engine chooses, because their blocks may be on another rank, and those that were bound after the
// gauge was read.
func (b *board) correctOrphans(r *rank, e Gauged) {
	b.refreshLoad(r)
	decodingKV := int64(0)
	for i, slot := range r.slots {
		if s := &b.slots.records[slot]; b.firstEventCame(slot) && !s.engineChoosesRank && s.boundAt.Before(e.At) {
			decodingKV += r.running[i].Tokens()
		}
	}
	surplus := decodingKV + r.orphanedKV - e.KVTokens
	b.forgetOrphans(r, func(o orphan) bool {
		if o.tokens > surplus || !o.since.Before(e.At) { // the engine may still have its KV, or the gauge was read before the request ended
			return false
		}
		surplus -= o.tokens
		return true
	})
}
