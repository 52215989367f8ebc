package board

import "time"

// Kept KV. A decode engine may keep the KV of an answer that has ended, so that a prefill engine
// can fetch it for the next turn of the chat. vLLM's NIXL connector does so with
// bidirectional_kv_xfer (0.33, request_finished in nixl/pull_scheduler.py). It frees the blocks
// once they are fetched, or after a fixed time, but not when it lacks room, or when its prefix
// cache is reset. The board does not learn when KV is fetched.

// keepKV needs a rank whose engine keeps KV.
func (b *board) keepKV(r *rank, s *slotRecord, generated int, now time.Time) {
	tokens := int64(s.prompt) + int64(max(0, generated))
	// It ran on this rank, or the other ranks are not known.
	if !s.engineChoosesRank || len(r.engineRanks) == 0 {
		b.keepKVOn(r, tokens, now)
		return
	}
	// It is not known on which of these ranks it ran.
	part := tokens / int64(len(r.engineRanks))
	for _, other := range r.engineRanks {
		if other.KeepsKVFor > 0 { // otherwise its KV is free already
			b.keepKVOn(other, part, now)
		}
	}
}

func (b *board) keepKVOn(r *rank, tokens int64, now time.Time) {
	b.slots.keptTotal += tokens
	expired := r.keptKV.Add(tokens, now, r.KeepsKVFor) // Add first drops the KV whose time is over
	b.countFreedKV(expired)
	b.keptKVFreedAt = earlier(b.keptKVFreedAt, r.keptKV.Next())
}

func (b *board) countFreedKV(tokens int64) {
	b.slots.freedTotal += tokens
	b.decideNow = b.decideNow || tokens > 0
}

func (b *board) expireKept(now time.Time) {
	if !hasCome(b.keptKVFreedAt, now) {
		return
	}
	b.keptKVFreedAt = time.Time{}
	for _, r := range b.ranks {
		b.countFreedKV(r.keptKV.Expire(now))
		b.keptKVFreedAt = earlier(b.keptKVFreedAt, r.keptKV.Next())
	}
}

// correctKept lowers the kept KV of a rank to what the gauge allows. Two usual causes: several
// answers share a prefix, which the engine stores once, or a prefill engine has fetched some of the
// KV.
func (b *board) correctKept(r *rank, e Gauged) {
	b.refreshLoad(r)
	counted := r.keptKV.AddedBefore(e.At)
	for i, slot := range r.slots {
		// As in correctOrphans, not all requests count.
		if s := &b.slots.records[slot]; s.boundAt.Before(e.At) && b.firstEventCame(slot) && !s.engineChoosesRank {
			counted += r.running[i].Tokens()
		}
	}
	surplus := counted - e.KVTokens // below 0: nothing is dropped
	b.countFreedKV(r.keptKV.DropSurplus(surplus, e.At))
}
