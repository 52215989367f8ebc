package policy

import (
	"evenkeel/dispatcher/subset"
)

// columns are the loads of every rank in every scenario and step of the round's
// grid, weighted, with what the cost of a change needs: the three largest of
// each column, so that the largest of all ranks but two is at hand.
type columns struct {
	ranks, n int
	x        []int64 // of rank g in column c at g*n+c
	level    []int64 // of each rank, all columns together
	first    ends    // largest of each column
	second   ends
	third    ends
	peak     int64   // sum of the largest
	lead     []int64 // by how much the peak would fall without the rank; see leads
	cost     []float32
	even     bool    // a token costs the same on every rank
	held     []int64 // KV tokens of each rank, unscaled, as the round began
	now      []int64 // load of each rank before the round, in what tokens cost; what does not decode yet is left out

	mix   *mixed // while objective=mix is sought, nil otherwise
	mixed mixed
}

// ends are one of the largest values of each column, and whose they are.
type ends struct {
	value []int64
	rank  []int32
}

func (e *ends) size(n int) {
	e.value, e.rank = sized(e.value, n), sized(e.rank, n)
	clear(e.value)
	for c := range e.rank {
		e.rank[c] = none
	}
}

func (t *columns) build(s *Snapshot, look *lookahead) {
	t.ranks, t.n = len(s.Workers), look.columns()
	t.x, t.level, t.lead = sized(t.x, t.ranks*t.n), sized(t.level, t.ranks), sized(t.lead, t.ranks)
	t.cost, t.held, t.now = sized(t.cost, t.ranks), sized(t.held, t.ranks), sized(t.now, t.ranks)
	t.first.size(t.n)
	t.second.size(t.n)
	t.third.size(t.n)
	t.even = true
	for g := range s.Workers {
		w := &s.Workers[g]
		t.cost[g] = w.Cost
		if w.Cost == 0 {
			t.cost[g] = 1
		}
		t.even = t.even && t.cost[g] == t.cost[0]
		row := t.row(g)
		held, later := look.project(g, w.Running, row)
		if w.Others > 0 {
			held += w.Others
			look.addConstant(w.Others, row)
		}
		t.held[g], t.now[g] = held, t.scaled(g, held-later)
		scale(row, t.cost[g])
		t.level[g] = 0
		for _, x := range row {
			t.level[g] += x
		}
		t.rank(g, row)
	}
	t.leads()
}

func (t *columns) row(g int) []int64 { return t.x[g*t.n:][:t.n:t.n] }

func (t *columns) scaled(g int, tokens int64) int64 { return subset.Scaled(tokens, float64(t.cost[g])) }

// rank takes a row that is not among the largest yet into account.
func (t *columns) rank(g int, row []int64) {
	third := t.third.value[:len(row)]
	for c, x := range row {
		if x > third[c] {
			t.insert(c, int32(g), x)
		}
	}
}

func (t *columns) insert(c int, g int32, x int64) {
	switch {
	case x > t.first.value[c]:
		t.third.value[c], t.third.rank[c] = t.second.value[c], t.second.rank[c]
		t.second.value[c], t.second.rank[c] = t.first.value[c], t.first.rank[c]
		t.first.value[c], t.first.rank[c] = x, g
	case x > t.second.value[c]:
		t.third.value[c], t.third.rank[c] = t.second.value[c], t.second.rank[c]
		t.second.value[c], t.second.rank[c] = x, g
	case x > t.third.value[c]:
		t.third.value[c], t.third.rank[c] = x, g
	}
}

// shift changes the load of rank g; sum is that of in less that of out.
func (t *columns) shift(g int, in, out []int64, sum int64) {
	row := t.row(g)
	in, out = in[:len(row)], out[:len(row)]
	first, second, third := &t.first, &t.second, &t.third
	rank := int32(g)
	for c, old := range row {
		x := old + in[c] - out[c]
		if x == old {
			continue
		}
		row[c] = x
		if t.mix != nil {
			t.mix.smooth += t.mix.slope[c] * (eighth(x) - eighth(old))
		}
		switch {
		case first.rank[c] != rank && second.rank[c] != rank && third.rank[c] != rank:
			if x > third.value[c] {
				t.insert(c, rank, x)
			}
		case x < third.value[c]:
			t.rescan(c) // it may have fallen below one that was not kept
		default:
			t.resort(c, rank, x)
		}
	}
	t.level[g] += sum
	t.leads()
}

// resort gives one of the three largest another value, no smaller than theirs.
func (t *columns) resort(c int, rank int32, x int64) {
	kept := [...]*ends{&t.first, &t.second, &t.third}
	at := 0
	for kept[at].rank[c] != rank {
		at++
	}
	for at > 0 && kept[at-1].value[c] < x {
		kept[at].value[c], kept[at].rank[c] = kept[at-1].value[c], kept[at-1].rank[c]
		at--
	}
	if at == 0 && kept[1].value[c] > x {
		kept[0].value[c], kept[0].rank[c] = kept[1].value[c], kept[1].rank[c]
		at = 1
	}
	kept[at].value[c], kept[at].rank[c] = x, rank
}

// rescan finds the three largest of a column anew.
func (t *columns) rescan(c int) {
	for _, e := range [...]*ends{&t.first, &t.second, &t.third} {
		e.value[c], e.rank[c] = 0, none
	}
	for g, at := 0, c; at < len(t.x); g, at = g+1, at+t.n {
		if x := t.x[at]; x > t.third.value[c] {
			t.insert(c, int32(g), x)
		}
	}
}

// leads sums the peak, and what of it each rank alone holds up.
func (t *columns) leads() {
	clear(t.lead)
	t.peak = 0
	for c, x := range t.first.value {
		t.peak += x
		if g := t.first.rank[c]; g >= 0 {
			t.lead[g] += x - t.second.value[c]
		}
	}
}

// ceiling is what the objective makes of the largest loads.
func (t *columns) ceiling() int64 {
	if t.mix != nil {
		return t.mix.ceiling(t.peak, t.mix.smooth)
	}
	return t.peak
}

// fullest is the load that sets the length of a step.
func (t *columns) fullest() (most int64) {
	for _, x := range t.now {
		most = max(most, x)
	}
	return most
}

// rest is what stands of the largest loads when one rank, and perhaps another,
// are to change: the largest but the one's, whose that is, and the next.
type rest struct {
	most, next []int64
	owner      []int32
}

func (r *rest) size(n int) {
	r.most, r.next, r.owner = sized(r.most, n), sized(r.next, n), sized(r.owner, n)
}

func (t *columns) without(g int, r *rest) {
	for c := range t.n {
		rank := int32(g)
		switch {
		case t.first.rank[c] == rank:
			r.most[c], r.owner[c], r.next[c] = t.second.value[c], t.second.rank[c], t.third.value[c]
		case t.second.rank[c] == rank:
			r.most[c], r.owner[c], r.next[c] = t.first.value[c], t.first.rank[c], t.third.value[c]
		default:
			r.most[c], r.owner[c], r.next[c] = t.first.value[c], t.first.rank[c], t.second.value[c]
		}
	}
}

// peakWith is the sum of the largest loads when one rank's becomes base + in and
// the others' largest are most. This is where a search's time goes: flat slices
// of one length, nothing checked or branched on, and two sums four columns at a
// time, half the time of the plain loop.
func peakWith(most, base, in []int64) (peak int64) {
	base, in = base[:len(most)], in[:len(most)]
	c, even, odd := 0, int64(0), int64(0)
	for ; c+3 < len(most); c += 4 {
		m, b, i := most[c:c+4:c+4], base[c:c+4:c+4], in[c:c+4:c+4]
		even += max(m[0], b[0]+i[0])
		odd += max(m[1], b[1]+i[1])
		even += max(m[2], b[2]+i[2])
		odd += max(m[3], b[3]+i[3])
	}
	for ; c < len(most); c++ {
		peak += max(most[c], base[c]+in[c])
	}
	return peak + even + odd
}

// peakWithTwo is peakWith when rank b's load also changes, from row by back less out.
func peakWithTwo(r *rest, base, in []int64, b int, row, back, out []int64) (peak int64) {
	n := len(r.most)
	next, owner := r.next[:n], r.owner[:n]
	base, in, row, back, out = base[:n], in[:n], row[:n], back[:n], out[:n]
	for c, m := range r.most {
		other := next[c] // read in any case: a conditional move instead of a branch
		if owner[c] == int32(b) {
			m = other
		}
		peak += max(m, base[c]+in[c], row[c]+back[c]-out[c])
	}
	return peak
}

// peakWithout is the peak if rank g's load were less by u.
func (t *columns) peakWithout(g int, u []int64) (peak int64) {
	row := t.row(g)
	first, second, rank := t.first.value[:len(row)], t.second.value[:len(row)], t.first.rank[:len(row)]
	u = u[:len(row)]
	for c, x := range row {
		m := first[c]
		if rank[c] == int32(g) {
			m = second[c]
		}
		peak += max(m, x-u[c])
	}
	return peak
}
