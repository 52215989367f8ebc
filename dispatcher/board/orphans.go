package board

import (
	"slices"
	"time"
)

// Orphans. A request may end while its prefill engine is still writing its KV to blocks on the
// decode rank. The decode engine keeps these blocks until the writing is done, and for ever if it
// never is: then the slot is free, but the KV room of the prompt is not. This room is an orphan. It
// does not count as load, because no step reads its blocks.

// mostOrphans of a rank are counted one by one. Any further one is added to the last.
const mostOrphans = 64

// gaugeLife is the largest age of a gauge that is still used.
const gaugeLife = 30 * time.Second

func (b *board) addOrphan(r *rank, s *slotRecord, now time.Time) {
	// discharge has counted these tokens as released, but forgetOrphans releases them.
	b.slots.released.kvTokens -= int64(s.prompt)
	r.orphanedKV += int64(s.prompt)
	if n := len(r.orphans); n == mostOrphans { // the last orphan stands for this one, too
		r.orphans[n-1] = orphan{r.orphans[n-1].tokens + int64(s.prompt), now}
		return
	}
	r.orphans = append(r.orphans, orphan{int64(s.prompt), now})
}

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

// hasRestarted is false while a process is not known (0).
func (r *rank) hasRestarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

func (b *board) dropIfGone(r *rank) {
	if !r.present && len(r.slots) == 0 {
		b.forgetOrphans(r, everyOrphan)
		b.countFreedKV(r.keptKV.Clear())
		delete(b.ranks, r.ID)
	}
}

// usableCapacity leaves out orphans and kept KV; 0: unlimited.
func (r *rank) usableCapacity() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.capacityWithoutOrphans()-r.keptKV.Tokens()) // 0 would mean unlimited
}

// capacityWithoutOrphans is what comes free sooner or later; 0: unlimited. The engine may hold
// orphans until it restarts, but frees kept KV after a set time.
func (r *rank) capacityWithoutOrphans() int64 {
	if r.Capacity == 0 {
		return 0
	}
	return max(1, r.Capacity-r.orphanedKV) // 0 would mean unlimited
}

func (r *rank) hasKVRoom(prompt int64) bool {
	return r.Capacity == 0 || r.kv+prompt <= r.usableCapacity()
}

// correctOrphans: if the decoding requests and the orphans would need more KV than the gauge shows,
// the engine no longer holds the surplus. Requests that do not decode yet are left out, because
// they may have no blocks yet, and so are those whose rank the engine chooses, and those that were
// bound after the gauge was read.
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
		if o.tokens > surplus || !o.since.Before(e.At) { // or it ended after the gauge was read
			return false
		}
		surplus -= o.tokens
		return true
	})
}
