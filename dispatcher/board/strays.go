package board

import "evenkeel/dispatcher/policy"

// Requests that stray. Some engines run a request of the Responses API on any of their ranks, whichever rank the request names, and do not
// report on which. The policy chooses a rank as if the request ran there, and its slot is charged to this rank, so that the engine gets no
// more requests than it has slots. But its KV is charged in equal parts to all ranks of the engine. On the other ranks, these parts count
// as load and take room, like Worker.Others.

// each returns how many KV tokens of a straying request are charged to each of the other ranks of the engine; 0: there are no other ranks.
func (r *rank) each(request *policy.Request) int64 { return int64(request.Away) / max(1, r.parts-1) }

// share divides the present KV tokens of a straying request of the rank equally among the ranks of the engine. It returns how many more
// tokens of the request each other rank must be charged with than before.
func (r *rank) share(request *policy.Request) int64 {
	had, each := r.each(request), (int64(request.Prompt)+int64(request.Generated))/r.parts
	request.Away = int32(each * (r.parts - 1))
	return each - had
}

// lend charges each of the other ranks of the engine with so many more KV tokens.
func (r *rank) lend(tokens int64) {
	if tokens == 0 {
		return
	}
	for _, other := range r.engine {
		if other != r {
			other.guests, other.kv = other.guests+tokens, other.kv+tokens
		}
	}
}

// relate finds the ranks of each engine, and divides the KV of straying requests anew among them. If a rank has left the fleet, parts of
// its requests are charged to the other ranks of its engine, but no parts of their requests are charged to it.
func (b *board) relate() {
	engines := map[string][]*rank{}
	for _, r := range b.ranks {
		if r.present && r.Engine != "" {
			engines[r.Engine] = append(engines[r.Engine], r)
		}
	}
	for _, r := range b.ranks {
		r.kv, r.guests = r.kv-r.guests, 0
		r.engine, r.parts = engines[r.Engine], 1
		for _, other := range r.engine {
			if other != r {
				r.parts++
			}
		}
	}
	for _, r := range b.ranks {
		for i, slot := range r.slots {
			if request := &r.running[i]; b.slots.records[slot].strays {
				before := request.Tokens()
				request.Away = 0
				r.lend(r.share(request))
				r.kv += request.Tokens() - before
			}
		}
	}
}
