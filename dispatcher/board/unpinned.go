package board

import "evenkeel/dispatcher/policy"

// Unpinned requests. Some engines run a request of the Responses API on any of their ranks,
// whichever rank it names, and do not report on which. The slot is charged to the rank that the
// policy chose, so that the engine gets no more requests than it has slots. But the KV is charged
// in equal parts to all ranks of the engine. On the other ranks, these parts count as load and take
// room, like Worker.Others.

// kvPerOtherRank: request.KVElsewhere is the sum over all other ranks.
func (r *rank) kvPerOtherRank(request *policy.Request) int64 {
	return int64(request.KVElsewhere) / max(1, r.kvParts-1)
}

// divideKV divides the present KV of an unpinned request among the kvParts ranks of its engine. The
// caller must charge moreForEach tokens to each other rank (chargeOtherRanks).
func (r *rank) divideKV(request *policy.Request) (moreForEach int64) {
	partBefore, part := r.kvPerOtherRank(request), (int64(request.Prompt)+int64(request.Generated))/r.kvParts
	request.KVElsewhere = int32(part * (r.kvParts - 1))
	return part - partBefore
}

func (r *rank) spreadKV(request *policy.Request) { r.chargeOtherRanks(r.divideKV(request)) }

func (r *rank) chargeOtherRanks(tokens int64) {
	if tokens == 0 {
		return
	}
	for _, other := range r.engineRanks {
		if other != r {
			other.kvFromOtherRanks, other.kv = other.kvFromOtherRanks+tokens, other.kv+tokens
		}
	}
}

// regroupEngines divides the KV of unpinned requests anew. The requests of a rank that has left the
// fleet may still run, so other ranks are charged with parts of them. No KV of others is charged to
// that rank, because no policy looks at its load any more.
//
// First, each rank forgets the parts of other ranks. Only then are the requests divided, so that no
// new part is forgotten.
func (b *board) regroupEngines() {
	engines := map[string][]*rank{}
	for _, r := range b.ranks {
		if r.present && r.Engine != "" {
			engines[r.Engine] = append(engines[r.Engine], r)
		}
	}
	for _, r := range b.ranks {
		r.kv, r.kvFromOtherRanks = r.kv-r.kvFromOtherRanks, 0
		r.setEngineRanks(engines[r.Engine])
	}
	for _, r := range b.ranks {
		for i, slot := range r.slots {
			if b.slots.records[slot].engineChoosesRank {
				r.spreadAnew(&r.running[i])
			}
		}
	}
}

// spreadAnew needs the parts of the request to be taken off all other ranks before.
func (r *rank) spreadAnew(request *policy.Request) {
	partBefore := request.Tokens() // of this rank
	request.KVElsewhere = 0
	r.spreadKV(request)
	r.kv += request.Tokens() - partBefore
}

// setEngineRanks: the caller must then divide the KV of the unpinned requests anew.
func (r *rank) setEngineRanks(ranks []*rank) {
	r.engineRanks, r.kvParts = ranks, 1 // one part is for r, even if it has left the fleet
	for _, other := range ranks {
		if other != r {
			r.kvParts++
		}
	}
}
