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

// orphan counts the room of a discharged request as still taken on its rank.
func (b *board) orphan(r *rank, s *slotRecord, now time.Time) {
	b.slots.released.kvTokens -= int64(s.prompt) // forgetOrphans counts these tokens as released
	r.orphaned += int64(s.prompt)
	if n := len(r.leaked); n == mostOrphans {
		r.leaked[n-1] = leakedKV{r.leaked[n-1].tokens + int64(s.prompt), now}
		return
	}
	r.leaked = append(r.leaked, leakedKV{int64(s.prompt), now})
}

// forgetOrphans frees the room of the orphans of a rank for which the function returns true.
func (b *board) forgetOrphans(r *rank, which func(leakedKV) bool) {
	r.leaked = slices.DeleteFunc(r.leaked, func(l leakedKV) bool {
		if !which(l) {
			return false
		}
		b.slots.released.kvTokens += l.tokens
		r.orphaned -= l.tokens
		b.changed = true
		return true
	})
}

// everyOrphan makes forgetOrphans forget all orphans.
func everyOrphan(leakedKV) bool { return true }

// restarted says whether the worker's engine is known to have restarted, which loses its KV.
func (r *rank) restarted(w *Worker) bool {
	return r.Process != 0 && w.Process != 0 && w.Process != r.Process
}

// leave drops a rank that has left the fleet, once no request is charged to it.
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

// correctOrphans frees the room of orphans that the engine cannot have any more, because the decoding requests and the orphans together
// would need more KV than the engine's gauge shows in use. It leaves out requests that do not decode yet, because they may have no blocks
// yet, requests that stray, because their blocks may be on another rank, and all that began after the gauge was read.
func (b *board) correctOrphans(r *rank, e Gauged) {
	b.refresh(r)
	surplus := r.orphaned - e.KVTokens // KV tokens that the board counts beyond the gauge
	for i, slot := range r.slots {
		if s := &b.slots.records[slot]; b.seen(slot) && !s.strays && s.since.Before(e.At) {
			surplus += r.running[i].Tokens()
		}
	}
	b.forgetOrphans(r, func(l leakedKV) bool {
		if l.tokens > surplus || !l.since.Before(e.At) {
			return false
		}
		surplus -= l.tokens
		return true
	})
}
