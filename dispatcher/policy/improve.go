package policy

import "evenkeel/dispatcher/subset"

// climb is the scratch of the improvement: one placement taken out of its rank.
type climb struct {
	left int     // evaluations
	g    int     // its rank
	own  []int64 // what it contributes there
	sum  int64
	base []int64 // the rank's load without it
	rest rest    // the largest loads of the other ranks
}

// worthwhile is the smallest gain of a move, in units of 2^-20 tokens: 1e-6.
const worthwhile = 2

// improve makes moves that lower the cost until none does or the budget is
// spent: for each placement a candidate in its place, a swap with a later one, a
// free slot elsewhere. Moves that could not pay even if
// the peak fell by all that their ranks alone hold up are passed by for free.
func (p *evenkeel) improve(budget int) {
	p.climb.left = budget
	p.climb.base = sized(p.climb.base, p.cols.n)
	p.climb.rest.size(p.cols.n)
	if p.set.mix {
		p.cols.startMix(p.set.kappa)
		defer p.cols.endMix()
	}
	for a, quiet := 0, 0; quiet < len(p.placed) && p.climb.left > 0; a++ {
		if a == len(p.placed) {
			a = 0
		}
		quiet++
		if int(p.placed[a].rank) == p.ranks.reserved {
			continue // its room is to grow
		}
		p.without(a)
		replaced, swapped := p.replace(a), p.swap(a)
		if p.move(a) || replaced || swapped {
			quiet = 0
		}
	}
}

// without looks at the loads as if placement a were not there.
func (p *evenkeel) without(a int) {
	m := &p.climb
	m.g = int(p.placed[a].rank)
	m.own, m.sum = p.pick.on(&p.cols, p.placed[a].who, m.g, p.pick.buffer(0))
	row := p.cols.row(m.g)
	own, base := m.own[:len(row)], m.base[:len(row)]
	for c, x := range row {
		base[c] = x - own[c]
	}
	p.cols.without(m.g, &m.rest)
}

// mayPay says whether a move could lower the cost, given how far the peak could
// fall at most and what the move adds to the sum of the loads and of the ages.
func (p *evenkeel) mayPay(fall, gain int64) bool {
	return p.cols.mix != nil || int64(p.cols.ranks)*fall+gain >= worthwhile
}

// pays spends one evaluation: whether the move to that ceiling lowers the cost.
func (p *evenkeel) pays(ceiling, gain int64) bool {
	p.climb.left--
	return int64(p.cols.ranks)*(ceiling-p.cols.ceiling())-gain <= -worthwhile
}

// replace tries every spare candidate in the place of a. An overdue one stays.
func (p *evenkeel) replace(a int) (changed bool) {
	t, m := &p.cols, &p.climb
	who := p.placed[a].who
	old := &p.pick.all[who]
	if old.late {
		return false
	}
	for i := 0; i < len(p.spare) && m.left > 0; i++ {
		c := &p.pick.all[p.spare[i]]
		if c.tokens-old.tokens > p.ranks.room[m.g] {
			continue
		}
		gain := c.sum + c.age - old.sum - old.age
		in, sum := p.pick.on(t, p.spare[i], m.g, p.pick.buffer(1))
		if !p.mayPay(t.lead[m.g], gain) || !p.pays(p.ceilingWith(in), gain) {
			continue
		}
		t.shift(m.g, in, m.own, sum-m.sum)
		p.ranks.exchange(m.g, old.tokens, c.tokens)
		old.placed, c.placed = false, true
		p.placed[a].who, p.spare[i] = p.spare[i], who
		who, old, changed = p.placed[a].who, c, true
		p.without(a)
	}
	return changed
}

func (p *evenkeel) ceilingWith(in []int64) int64 {
	t, m := &p.cols, &p.climb
	peak := peakWith(m.rest.most, m.base, in)
	if t.mix != nil {
		return t.mix.ceiling(peak, t.mix.smooth+t.mix.rise(t.row(m.g), m.base, in, p.pick.nothing))
	}
	return peak
}

// ceilingWithTwo also changes rank b.
func (p *evenkeel) ceilingWithTwo(in []int64, b int, back, out []int64) int64 {
	t, m := &p.cols, &p.climb
	peak := peakWithTwo(&m.rest, m.base, in, b, t.row(b), back, out)
	if t.mix != nil {
		row := t.row(b)
		return t.mix.ceiling(peak, t.mix.smooth+t.mix.rise(t.row(m.g), m.base, in, p.pick.nothing)+t.mix.rise(row, row, back, out))
	}
	return peak
}

// swap tries to exchange a with every later placement on another rank.
func (p *evenkeel) swap(a int) (changed bool) {
	t, m := &p.cols, &p.climb
	for b := a + 1; b < len(p.placed) && m.left > 0; b++ {
		g := int(p.placed[b].rank)
		whoA, whoB := p.placed[a].who, p.placed[b].who
		x, y := &p.pick.all[whoA], &p.pick.all[whoB]
		if g == m.g || g == p.ranks.reserved || y.tokens-x.tokens > p.ranks.room[m.g] || x.tokens-y.tokens > p.ranks.room[g] {
			continue
		}
		if !p.mayPay(t.lead[m.g]+t.lead[g], 0) {
			continue
		}
		in, inSum := p.pick.on(t, whoB, m.g, p.pick.buffer(1))
		out, outSum := in, inSum
		back, backSum := m.own, m.sum
		if !t.even {
			out, outSum = p.pick.on(t, whoB, g, p.pick.buffer(2))
			back, backSum = p.pick.on(t, whoA, g, p.pick.buffer(3))
		}
		if !p.pays(p.ceilingWithTwo(in, g, back, out), 0) {
			continue
		}
		t.shift(m.g, in, m.own, inSum-m.sum)
		t.shift(g, back, out, backSum-outSum)
		p.ranks.exchange(m.g, x.tokens, y.tokens)
		p.ranks.exchange(g, y.tokens, x.tokens)
		p.placed[a].who, p.placed[b].who = whoB, whoA
		changed = true
		p.without(a)
	}
	return changed
}

// move tries to take a to a free slot of another rank.
func (p *evenkeel) move(a int) (changed bool) {
	t, m := &p.cols, &p.climb
	if p.ranks.open == 0 {
		return false
	}
	c := &p.pick.all[p.placed[a].who]
	for _, rank := range p.ranks.some {
		g := int(rank)
		if m.left <= 0 {
			break
		}
		if g == m.g || !p.ranks.fits(g, c.tokens) {
			continue
		}
		back, sum := m.own, m.sum
		if !t.even {
			back, sum = p.pick.on(t, p.placed[a].who, g, p.pick.buffer(3))
		}
		if !p.mayPay(t.lead[m.g], 0) || !p.pays(p.ceilingWithTwo(p.pick.nothing, g, back, p.pick.nothing), 0) {
			continue
		}
		t.shift(m.g, p.pick.nothing, m.own, -m.sum)
		t.shift(g, back, p.pick.nothing, sum)
		p.ranks.uncharge(m.g, c.tokens)
		p.ranks.charge(g, c.tokens)
		p.placed[a].rank = int32(g)
		changed = true
		p.without(a)
	}
	return changed
}

// exchange books one entry on rank g in the place of another.
func (r *ranks) exchange(g int, out, in int64) {
	if r.room[g] != subset.Unlimited {
		r.room[g] += out - in
	}
}

// uncharge takes an entry back from rank g.
func (r *ranks) uncharge(g int, tokens int64) {
	r.free[g]++
	r.open++
	r.exchange(g, tokens, 0)
}
