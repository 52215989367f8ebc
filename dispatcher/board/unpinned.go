package board

import "evenkeel/dispatcher/policy"

// Unpinned requests. Some engines run a request of the Responses API on any of their ranks, whichever rank the request names, and do not
// report on which. The policy chooses a rank as if the request ran there. The slot is charged to this rank, so that the engine gets no more
// requests than it has slots. But the KV is charged in equal parts to all ranks of the engine. On the other ranks, these parts count as
// load and take room, like Worker.Others.

// kvPerOtherRank returns how many KV tokens of an unpinned request are charged to each of the other ranks of its engine; 0: there are no
// other ranks. request.KVElsewhere is the sum over all these ranks.
func (r *rank) kvPerOtherRank(request *policy.Request) int64 {
	return int64(request.KVElsewhere) / max(1, r.kvParts-1)
}

// divideKV divides the present KV tokens of an unpinned request equally among the ranks of its engine (kvParts of them). It stores in the
// request how many tokens are on the other ranks, and returns how many more tokens must be charged to each other rank than before; below 0:
// fewer. The caller charges them (chargeOtherRanks).
func (r *rank) divideKV(request *policy.Request) (moreForEach int64) {
	partBefore, part := r.kvPerOtherRank(request), (int64(request.Prompt)+int64(request.Generated))/r.kvParts
	request.KVElsewhere = int32(part * (r.kvParts - 1))
	return part - partBefore
}

// spreadKV divides the present KV tokens of an unpinned request equally among the ranks of its engine (see divideKV), and changes the
// charges of the other ranks to their parts.
func (r *rank) spreadKV(request *policy.Request) { r.chargeOtherRanks(r.divideKV(request)) }

// chargeOtherRanks charges this many more KV tokens to each of the other ranks of the rank's engine; below 0: fewer. They are parts of the
// KV of unpinned requests. Such a request has its slot on this rank, but the engine may run it on any of its ranks, so each rank is charged
// with an equal part.
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

// regroupEngines finds the ranks of each engine, and divides the KV of unpinned requests anew among them, because the engine may run these
// requests on any of its ranks. The requests of a rank that has left the fleet may still run, so parts of their KV are charged to the other
// ranks of its engine. But no KV of other requests is charged to the rank that has left, because no policy looks at its load any more.
//
// First, each rank forgets the parts of requests with slots on other ranks. Only then are the requests divided anew: each of them charges
// new parts to other ranks, which must not be forgotten again.
func (b *board) regroupEngines() {
	engines := map[string][]*rank{}
	for _, r := range b.ranks {
		if r.present && r.Engine != "" {
			engines[r.Engine] = append(engines[r.Engine], r)
		}
	}
	for _, r := range b.ranks {
		r.kv, r.kvFromOtherRanks = r.kv-r.kvFromOtherRanks, 0 // forgets the parts of requests with slots on other ranks
		r.setEngineRanks(engines[r.Engine])
	}
	for _, r := range b.ranks {
		for i, slot := range r.slots {
			if b.slots.records[slot].engineChoosesRank { // the request is unpinned
				r.spreadAnew(&r.running[i]) // divides its KV among the ranks of the engine
			}
		}
	}
}

// spreadAnew divides the KV of an unpinned request, whose slot is on this rank, anew among the ranks of the engine. The parts of the
// request must have been taken off all other ranks before.
func (r *rank) spreadAnew(request *policy.Request) {
	partBefore := request.Tokens() // the part of this rank
	request.KVElsewhere = 0        // no part is on another rank now
	r.spreadKV(request)            // charges the other ranks with their new parts, and stores their sum in KVElsewhere
	r.kv += request.Tokens() - partBefore
}

// setEngineRanks sets the ranks among which the KV of unpinned requests with slots on this rank is divided. The engine may run an unpinned
// request on any of these ranks, and does not report on which. The caller must then divide the KV of the requests anew.
func (r *rank) setEngineRanks(ranks []*rank) {
	r.engineRanks, r.kvParts = ranks, 1 // one part is for r itself, even if it has left the fleet and is not among the ranks
	for _, other := range ranks {
		if other != r {
			r.kvParts++
		}
	}
}
