package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// candidates are the entries a round chooses from: those overdue, then the
// oldest, as many as can be placed and some more.
type candidates struct {
	all     []candidate
	late    int     // of them overdue, in front
	u       []int64 // contribution of each, columns long
	n       int     // columns
	rest    int     // index in the pool of the first entry not looked at
	taken   []bool  // by index in the pool
	nothing []int64 // an entry that contributes nothing
	scratch [4][]int64

	look      *lookahead
	ageTokens float64 // tokens of cost an entry is favoured by for each ms it waited
}

// candidate is an entry as the search sees it.
type candidate struct {
	entry  int32 // index in the pool
	late   bool  // overdue: must be placed, never replaced
	placed bool
	tokens int64 // of KV, unscaled
	sum    int64 // of its contributions
	age    int64 // what its wait takes off the cost, fixed point
}

// reset empties the list. stepMs 0 leaves ages out.
func (k *candidates) reset(s *Snapshot, look *lookahead, ageWeight, stepMs float64) {
	k.look, k.n = look, look.columns()
	k.all, k.u = k.all[:0], k.u[:0]
	k.late, k.rest = 0, 0
	k.taken, k.nothing = sized(k.taken, len(s.Pool)), sized(k.nothing, k.n)
	clear(k.taken)
	clear(k.nothing)
	for i := range k.scratch {
		k.scratch[i] = sized(k.scratch[i], k.n)
	}
	k.ageTokens = 0
	if stepMs > 0 {
		k.ageTokens = ageWeight / stepMs
	}
}

// add adds an entry of the pool.
func (k *candidates) add(s *Snapshot, entry int, late bool) {
	e := &s.Pool[entry]
	k.taken[entry] = true
	from := len(k.u)
	if cap(k.u) < from+k.n {
		k.u = append(make([]int64, 0, 2*(from+k.n)), k.u...)
	}
	k.u = k.u[:from+k.n]
	row := k.u[from:]
	k.look.project1(e, row)
	c := candidate{entry: int32(entry), late: late, tokens: int64(e.Prompt)}
	for _, x := range row {
		c.sum += x
	}
	c.age = int64(math.Ldexp(min(k.ageTokens*float64(e.WaitMs), 1<<30), fixedBits))
	k.all = append(k.all, c)
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

// vector is what a candidate contributes where a token costs 1.
func (k *candidates) vector(who int32) []int64 { return k.u[int(who)*k.n:][:k.n:k.n] }

func (k *candidates) buffer(i int) []int64 { return k.scratch[i] }

// on is what a candidate contributes on rank g and the sum of it; buffer is
// written to where tokens cost differently there.
func (k *candidates) on(t *columns, who int32, g int, buffer []int64) ([]int64, int64) {
	u := k.vector(who)
	if t.cost[g] == 1 {
		return u, k.all[who].sum
	}
	var sum int64
	for c, x := range u {
		buffer[c] = subset.Scaled(x, float64(t.cost[g]))
		sum += buffer[c]
	}
	return buffer, sum
}

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
