package board

import "evenkeel/dispatcher/policy"

// Strays. Some engines run a response on any of their ranks, whatever rank it names, and do not
// say which. Its policy chose a rank as if the response would run there, and its slot stands on
// that one, so that no more is sent than the engine has slots. But its KV stands in equal parts
// on all ranks of the engine. What the others have of it is load and room that is taken there,
// as Worker.Others is.

// each is what every other rank of the engine has of a request that strays.
func (r *rank) each(q *policy.Request) int64 { return int64(q.Away) / max(1, r.parts-1) }

// share divides the KV of a request of the rank that strays, as long as it is now, and returns
// how much more each other rank has of it than before.
func (r *rank) share(q *policy.Request) int64 {
	had, each := r.each(q), (int64(q.Prompt)+int64(q.Generated))/r.parts
	q.Away = int32(each * (r.parts - 1))
	return each - had
}

// lend charges every other rank of the engine with so much more.
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

// relate finds out which ranks of the fleet are of one engine, and divides anew what strays there.
// A rank that is gone lends to the others of its engine, and has nothing of theirs.
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
			if q := &r.running[i]; b.ledger.table[slot].strays {
				was := q.Tokens()
				q.Away = 0
				r.lend(r.share(q))
				r.kv += q.Tokens() - was
			}
		}
	}
}
