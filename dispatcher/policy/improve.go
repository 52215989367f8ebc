package policy

import "evenkeel/dispatcher/subset"

// climb is the memory of the search: the loads as if one placement were not there.
type climb struct {
	left int   // evaluations that may still be spent
	g    int   // the rank of the placement
	own  int64 // what the placement adds to that rank's load
	base int64 // the rank's load without the placement
	rest rest  // the largest loads of the other ranks
}

// worthwhile is the smallest gain for which a move is made, in units of 2^-20 KV tokens: about 2e-6 tokens.
const worthwhile = 2

// improve changes placements as long as that lowers the cost and the budget of evaluations is not
// spent. For each placement it tries a spare candidate in its place, a swap with a later placement, and a
// free slot of another rank.
func (p *evenkeel) improve(budget int) {
	p.climb.left = budget
	p.loads.startMix(p.set.kappa)
	for a, quiet := 0, 0; quiet < len(p.placed) && p.climb.left > 0; a++ {
		if a == len(p.placed) {
			a = 0
		}
		quiet++
		if int(p.placed[a].rank) == p.ranks.reserved {
			continue // the reserved rank is kept free for an overdue entry
		}
		p.without(a)
		replaced, swapped := p.replace(a), p.swap(a)
		if p.move(a) || replaced || swapped {
			quiet = 0
		}
	}
}

// without sets p.climb to the loads as if placement a were not there.
func (p *evenkeel) without(a int) {
	m := &p.climb
	m.g = int(p.placed[a].rank)
	m.own = p.pick.on(&p.loads, p.placed[a].who, m.g)
	m.base = p.loads.x[m.g] - m.own
	m.rest = p.loads.without(m.g)
}

// pays spends one evaluation. It says whether a move that leads to the given ceiling and gain lowers the cost.
func (p *evenkeel) pays(ceiling, gain int64) bool {
	p.climb.left--
	l := &p.loads
	return int64(len(l.x))*(ceiling-l.mix.ceiling(l.peak(), l.mix.smooth))-gain <= -worthwhile
}

// replace tries every spare candidate in the place of placement a, unless the entry placed there is overdue.
func (p *evenkeel) replace(a int) (changed bool) {
	l, m := &p.loads, &p.climb
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
		gain := c.load + c.age - old.load - old.age
		in := p.pick.on(l, p.spare[i], m.g)
		if !p.pays(l.mix.ceiling(max(m.rest.most, m.base+in), l.mix.smooth+l.mix.rise(l.x[m.g], m.base+in)), gain) {
			continue
		}
		l.shift(m.g, in-m.own)
		p.ranks.exchange(m.g, old.tokens, c.tokens)
		old.placed, c.placed = false, true
		p.placed[a].who, p.spare[i] = p.spare[i], who
		who, old, changed = p.placed[a].who, c, true
		p.without(a)
	}
	return changed
}

// ceilingWithTwo returns the ceiling if the load of climb's rank becomes base + in, and that of rank b changes by `by`.
func (p *evenkeel) ceilingWithTwo(in int64, b int, by int64) int64 {
	l, m := &p.loads, &p.climb
	x, y := m.base+in, l.x[b]+by
	return l.mix.ceiling(max(m.rest.but(b), x, y), l.mix.smooth+l.mix.rise(l.x[m.g], x)+l.mix.rise(l.x[b], y))
}

// swap tries to exchange placement a with every later placement on another rank.
func (p *evenkeel) swap(a int) (changed bool) {
	l, m := &p.loads, &p.climb
	for b := a + 1; b < len(p.placed) && m.left > 0; b++ {
		g := int(p.placed[b].rank)
		whoA, whoB := p.placed[a].who, p.placed[b].who
		x, y := &p.pick.all[whoA], &p.pick.all[whoB]
		if g == m.g || g == p.ranks.reserved || y.tokens-x.tokens > p.ranks.room[m.g] || x.tokens-y.tokens > p.ranks.room[g] {
			continue
		}
		in, by := p.pick.on(l, whoB, m.g), p.pick.on(l, whoA, g)-p.pick.on(l, whoB, g)
		if !p.pays(p.ceilingWithTwo(in, g, by), 0) {
			continue
		}
		p.exchange(a, b)
		changed = true
		p.without(a)
	}
	return changed
}

// exchange swaps the ranks of placements a and b. p.without(a) must have been called.
func (p *evenkeel) exchange(a, b int) {
	l, m, g := &p.loads, &p.climb, int(p.placed[b].rank)
	whoA, whoB := p.placed[a].who, p.placed[b].who
	x, y := p.pick.all[whoA].tokens, p.pick.all[whoB].tokens
	in, by := p.pick.on(l, whoB, m.g), p.pick.on(l, whoA, g)-p.pick.on(l, whoB, g)
	l.shift(m.g, in-m.own)
	l.shift(g, by)
	p.ranks.exchange(m.g, x, y)
	p.ranks.exchange(g, y, x)
	p.placed[a].who, p.placed[b].who = whoB, whoA
}

// move tries to move placement a to a free slot of another rank.
func (p *evenkeel) move(a int) (changed bool) {
	l, m := &p.loads, &p.climb
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
		back := p.pick.on(l, p.placed[a].who, g)
		if !p.pays(p.ceilingWithTwo(0, g, back), 0) {
			continue
		}
		p.relocate(a, g)
		changed = true
		p.without(a)
	}
	return changed
}

// relocate moves placement a to a free slot of rank g. p.without(a) must have been called.
func (p *evenkeel) relocate(a, g int) {
	c := &p.pick.all[p.placed[a].who]
	p.loads.shift(p.climb.g, -p.climb.own)
	p.loads.shift(g, p.pick.on(&p.loads, p.placed[a].who, g))
	p.ranks.uncharge(p.climb.g, c.tokens)
	p.ranks.charge(g, c.tokens)
	p.placed[a].rank = int32(g)
}

// exchange updates the room of rank g when an entry of `in` tokens takes the place of an entry of `out` tokens.
func (r *ranks) exchange(g int, out, in int64) {
	if r.room[g] != subset.Unlimited {
		r.room[g] += out - in
	}
}

// uncharge gives back the slot and the room of an entry on rank g.
func (r *ranks) uncharge(g int, tokens int64) {
	r.free[g]++
	r.open++
	r.exchange(g, tokens, 0)
}
