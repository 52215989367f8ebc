package board

import "time"

// Kept KV. A decode engine may keep the KV of an answer that has ended, so that a prefill engine can fetch it for the next turn of the
// chat. vLLM's NIXL connector does so with bidirectional_kv_xfer (0.33, request_finished in nixl/pull_scheduler.py). It frees the blocks
// once they are fetched, or after a fixed time. It does not free them earlier when it lacks room, or when its prefix cache is reset. The
// board does not learn when KV is fetched.

// keepKV counts the KV that the engine of a rank keeps of a request that has left the rank. generated is the number of tokens of the
// answer. The caller has checked that the engine of r keeps KV of ended answers.
func (b *board) keepKV(r *rank, s *slotRecord, generated int, now time.Time) {
	tokens := int64(s.prompt) + int64(max(0, generated))
	// The request ran on the rank of its slot, or the other ranks of the engine are not known.
	if !s.engineChoosesRank || len(r.engineRanks) == 0 {
		b.keepKVOn(r, tokens, now)
		return
	}
	// The request is unpinned: it ran on one of these ranks, but it is not known on which. So an equal part counts for each of them.
	part := tokens / int64(len(r.engineRanks))
	for _, other := range r.engineRanks {
		if other.KeepsKVFor > 0 { // if the request ran on a rank that keeps no KV, its KV is free already
			b.keepKVOn(other, part, now)
		}
	}
}

// keepKVOn counts this many KV tokens as kept on a rank from now on, for the time that its engine keeps KV (KeepsKVFor).
func (b *board) keepKVOn(r *rank, tokens int64, now time.Time) {
	b.slots.keptTotal += tokens
	expired := r.keptKV.Add(tokens, now, r.KeepsKVFor) // Add first drops the KV whose time is over
	b.countFreedKV(expired)
	b.keptKVFreedAt = earlier(b.keptKVFreedAt, r.keptKV.Next())
}

// countFreedKV records that engines have freed this many kept KV tokens of ended answers. If there are any, the board decides anew.
func (b *board) countFreedKV(tokens int64) {
	b.slots.freedTotal += tokens
	b.decideNow = b.decideNow || tokens > 0
}

// expireKept stops counting the KV that engines have kept for their full time (Worker.KeepsKVFor), because they free it now.
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

// correctKept lowers the count of a rank's kept KV, which its engine keeps of ended answers for the next turns of their chats, to what the
// engine's gauge (e) allows. If the decoding requests and the kept KV together need more tokens than the gauge shows in use, the engine no
// longer keeps the difference (the surplus). There are two usual causes: several answers share a prefix, which the engine stores only once,
// or a prefill engine has fetched some of the KV, so that the decode engine has freed it.
func (b *board) correctKept(r *rank, e Gauged) {
	b.refreshLoad(r)
	counted := r.keptKV.AddedBefore(e.At) // KV that was kept before the gauge was read; the tokens of requests are added below
	for i, slot := range r.slots {
		// Three kinds of requests do not count: those that were bound after the gauge was read, those whose KV may not have come
		// yet, and those that may run on another rank of the engine.
		if s := &b.slots.records[slot]; s.boundAt.Before(e.At) && b.firstEventCame(slot) && !s.engineChoosesRank {
			counted += r.running[i].Tokens()
		}
	}
	surplus := counted - e.KVTokens // below 0: nothing is dropped
	b.countFreedKV(r.keptKV.DropSurplus(surplus, e.At))
}
