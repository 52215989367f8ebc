package policy

import (
	"cmp"
	"slices"
)

// starts is the memory of the three ways to make the first placements: longestFirst, workerFirst and bestPair.
type starts struct {
	order []ranked
	aside []bool  // by rank: no candidate fits it
	pairs []pair  // of bestPair: for each candidate, its pair with every rank
	heap  []int32 // of longestFirst: open ranks, the one with the least load on top
}

// ranked is a candidate with a value by which candidates are sorted. In workerFirst, the gain is by how much the
// candidate lowers the cost if the peak does not rise.
type ranked struct {
	gain int64
	who  int32
}

// startEvaluations bounds the work of the first placements: candidates times placements.
const startEvaluations = 4096

// beyond returns how many candidates there are beyond the n that will be placed. If n is
// small, which it nearly always is, this is the number in the settings.
func (p *evenkeel) beyond(n int) int {
	return min(p.set.candidates, max(leastBeyond, startEvaluations/max(1, n)))
}

const leastBeyond = 32

// place makes the first placements of the round, which improve then improves:
// the overdue entries, then as many of the others as there are slots. For an overdue
// entry that fits no rank, a rank is reserved.
func (p *evenkeel) place(s *Snapshot) {
	scarce := p.ranks.open <= int64(len(s.Pool))
	n := int(min(p.ranks.open, int64(len(s.Pool))))
	p.late = overdue(s, p.late[:0])
	p.pick.reset(s, p.loads.growth, ageWeightFor(p.set.ageWeight, s), p.stepMs(s))
	p.pick.choose(s, p.late, &p.ranks, n, p.beyond(n))

	fill := p.longestFirst
	switch {
	case scarce && n <= p.set.refill:
		fill = p.workerFirst
	case !scarce && n <= p.set.pairs:
		fill = p.bestPair
	}
	p.wanted = n
	if p.pick.late > 0 {
		p.reserve(s, true)
		fill(s, 0, p.pick.late, false)
		p.reserve(s, false)
	}
	fill(s, p.pick.late, len(p.pick.all), true)

	p.spare = p.spare[:0]
	for i := range p.pick.all {
		if !p.pick.all[i].placed {
			p.spare = append(p.spare, int32(i))
		}
	}
}

// fillUp places entries for which improve has made room, so that no slot stays free for which there
// is an entry.
func (p *evenkeel) fillUp(s *Snapshot) {
	if p.ranks.open > 0 && len(p.placed) < p.wanted {
		p.workerFirst(s, 0, len(p.pick.all), true)
	}
}

// reserve reserves a rank for the first overdue entry that fits no rank with a free
// slot. With before set, no entry is placed yet. Afterwards, an overdue entry also counts if it was not placed although slots
// are free, because the others left it no room.
func (p *evenkeel) reserve(s *Snapshot, before bool) {
	room := p.ranks.largestRoom()
	for i := range p.pick.late {
		if c := &p.pick.all[i]; !c.placed && (c.tokens > room || !before && p.ranks.open > 0) {
			p.ranks.reserve(s, int(c.entry))
			return
		}
	}
}

// workerFirst gives the rank with the smallest load the
// candidate of [from, to) that changes the cost least there, again and again until p.wanted are placed.
// If further is set and no candidate fits the rank, it takes a later entry of the pool.
func (p *evenkeel) workerFirst(s *Snapshot, from, to int, further bool) {
	order := p.sortByGain(from, to)
	p.start.aside = sized(p.start.aside, len(p.loads.x))
	clear(p.start.aside)
	for len(p.placed) < p.wanted && (len(order) > 0 || further) {
		g := p.lowest()
		if g == none {
			return
		}
		if at := p.bestFor(g, order); at != none {
			p.add(order[at].who, g)
			order = slices.Delete(order, at, at+1)
			continue
		}
		who := none
		if further {
			who = p.pick.beyond(s, p.ranks.room[g])
		}
		if who == none {
			p.start.aside[g] = true
			continue
		}
		p.add(int32(who), g)
	}
}

// lowest returns the rank with the smallest load that has a free slot and is not set aside.
func (p *evenkeel) lowest() int {
	best, least := none, int64(0)
	for _, rank := range p.ranks.some {
		if g := int(rank); p.ranks.free[g] > 0 && !p.start.aside[g] && (best == none || p.loads.x[g] < least) {
			best, least = g, p.loads.x[g]
		}
	}
	return best
}

// sortByGain returns the unplaced candidates of a range, those with the largest gain first; in a tie, the
// earlier.
func (p *evenkeel) sortByGain(from, to int) []ranked {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if c := &p.pick.all[i]; !c.placed {
			order = append(order, ranked{c.load + c.age, int32(i)})
		}
	}
	p.start.order = order
	slices.SortFunc(order, byGain)
	return order
}

func byGain(a, b ranked) int { return cmp.Or(cmp.Compare(b.gain, a.gain), cmp.Compare(a.who, b.who)) }

// bestFor returns the position in order of the candidate with the smallest
// change of cost on rank g, none if none fits.
func (p *evenkeel) bestFor(g int, order []ranked) int {
	l := &p.loads
	top, group := l.peak(), int64(len(l.x))
	best, least := none, int64(0)
	room := p.ranks.room[g]
	for at := range order {
		o := &order[at]
		if best != none && -o.gain > least {
			break // this candidate would be no better even if the peak did not rise, and no later one would
		}
		c := &p.pick.all[o.who]
		if c.tokens > room {
			continue
		}
		change := group*(max(top, l.x[g]+p.pick.on(l, o.who, g))-top) - o.gain
		if best == none || change < least || change == least && o.who < order[best].who {
			best, least = at, change
		}
	}
	return best
}

// longestFirst is for many placements at once: it takes the oldest candidates, the longest prompt first, and puts each on
// the rank that has the smallest load then and room for it.
func (p *evenkeel) longestFirst(s *Snapshot, from, to int, further bool) {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if !p.pick.all[i].placed {
			order = append(order, ranked{p.pick.all[i].tokens, int32(i)})
		}
	}
	p.start.order = order
	if further { // else these are the overdue entries, which stay in the order of their waits
		first := order[:min(len(order), p.wanted-len(p.placed))]
		slices.SortFunc(first, byGain)
	}
	p.heapOpen()
	for _, o := range order {
		if len(p.placed) >= p.wanted {
			return
		}
		if g := p.leastNow(p.pick.all[o.who].tokens); g != none {
			p.add(o.who, g)
			p.heapSettle(g)
		}
	}
	for further && len(p.placed) < p.wanted {
		who := p.pick.beyond(s, p.ranks.largestRoom())
		if who == none {
			return
		}
		g := p.leastNow(p.pick.all[who].tokens)
		p.add(int32(who), g)
		p.heapSettle(g)
	}
}

// leastNow returns the rank with the smallest load now that has a free slot and room for so many tokens; none if there is none.
func (p *evenkeel) leastNow(tokens int64) int {
	if h := p.start.heap; len(h) == 0 || tokens <= p.ranks.room[h[0]] {
		if len(h) == 0 {
			return none
		}
		return int(h[0])
	}
	best := none
	for _, rank := range p.ranks.some {
		if g := int(rank); p.ranks.fits(g, tokens) && (best == none || p.lessNow(g, best)) {
			best = g
		}
	}
	return best
}

func (p *evenkeel) lessNow(a, b int) bool {
	x, y := p.loads.x[a], p.loads.x[b]
	return x < y || x == y && a < b
}

// heapOpen makes a heap of the ranks with a free slot, with the smallest load on top.
func (p *evenkeel) heapOpen() {
	h := p.start.heap[:0]
	for _, g := range p.ranks.some {
		if p.ranks.free[g] > 0 {
			h = append(h, g)
		}
	}
	p.start.heap = h
	for i := len(h)/2 - 1; i >= 0; i-- {
		p.heapDown(i)
	}
}

// heapSettle restores the heap after rank g took an entry: g moves down or, without a free slot, out.
func (p *evenkeel) heapSettle(g int) {
	i := 0
	if p.start.heap[0] != int32(g) {
		i = slices.Index(p.start.heap, int32(g))
	}
	if p.ranks.free[g] == 0 {
		last := len(p.start.heap) - 1
		moved := p.start.heap[last]
		p.start.heap[i] = moved
		p.start.heap = p.start.heap[:last]
		if i == last {
			return
		}
		p.heapUp(i)
	}
	p.heapDown(i)
}

func (p *evenkeel) heapUp(i int) {
	h := p.start.heap
	for i > 0 && p.lessNow(int(h[i]), int(h[(i-1)/2])) {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		i = (i - 1) / 2
	}
}

func (p *evenkeel) heapDown(i int) {
	h := p.start.heap
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h); child++ {
			if p.lessNow(int(h[child]), int(h[least])) {
				least = child
			}
		}
		if least == i {
			return
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
