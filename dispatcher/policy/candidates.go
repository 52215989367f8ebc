package policy

import "math"

// candidates are the entries a round chooses from: those overdue, then the
// oldest, as many as can be placed and some more.
type candidates struct {
	all   []candidate
	late  int    // of them overdue, in front
	rest  int    // index in the pool of the first entry not looked at
	taken []bool // by index in the pool

	growth    int64   // KV tokens that each is counted for beyond its prompt
	ageTokens float64 // tokens of cost an entry is favoured by for each ms it waited
}

// candidate is an entry as the search sees it.
type candidate struct {
	entry  int32 // index in the pool
	late   bool  // overdue: must be placed, never replaced
	placed bool
	tokens int64 // of KV, unscaled
	load   int64 // what it adds to a rank where a token costs 1, fixed point
	age    int64 // what its wait takes off the cost, fixed point
}

// reset empties the list. stepMs 0 leaves ages out.
func (k *candidates) reset(s *Snapshot, growth int64, ageWeight, stepMs float64) {
	k.all = k.all[:0]
	k.late, k.rest = 0, 0
	k.taken = sized(k.taken, len(s.Pool))
	clear(k.taken)
	k.growth, k.ageTokens = growth, 0
	if stepMs > 0 {
		k.ageTokens = ageWeight / stepMs
	}
}

// add adds an entry of the pool.
func (k *candidates) add(s *Snapshot, entry int, late bool) {
	e := &s.Pool[entry]
	k.taken[entry] = true
	k.all = append(k.all, candidate{
		entry: int32(entry), late: late, tokens: int64(e.Prompt), load: (int64(e.Prompt) + k.growth) << fixedBits,
		age: int64(math.Ldexp(min(k.ageTokens*float64(e.WaitMs), 1<<30), fixedBits)),
	})
}

// choose takes the overdue entries and the oldest others that have a place
// somewhere: n in all, and more to choose from.
func (k *candidates) choose(s *Snapshot, late []wait, r *ranks, n, more int) {
	for _, w := range late[:min(len(late), n)] {
		k.add(s, int(w.entry), true)
	}
	k.late = len(k.all)
	room := r.largestRoom()
	for ; k.rest < len(s.Pool) && len(k.all) < n+more; k.rest++ {
		if !k.taken[k.rest] && int64(s.Pool[k.rest].Prompt) <= room {
			k.add(s, k.rest, false)
		}
	}
}

// beyond takes the oldest entry further back that fits rank g, where no
// candidate did; it returns its index, or none.
func (k *candidates) beyond(s *Snapshot, room int64) int {
	for i := k.rest; i < len(s.Pool); i++ {
		if !k.taken[i] && int64(s.Pool[i].Prompt) <= room {
			k.add(s, i, false)
			return len(k.all) - 1
		}
	}
	return none
}

// on is what a candidate adds to the load of rank g.
func (k *candidates) on(l *loads, who int32, g int) int64 { return l.scaled(g, k.all[who].load) }

// largestRoom is the most any rank with a free slot can take.
func (r *ranks) largestRoom() int64 {
	most := int64(math.MinInt64)
	for _, g := range r.some {
		if r.free[g] > 0 {
			most = max(most, r.room[g])
		}
	}
	return most
}
