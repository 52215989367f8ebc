package policy

import (
	"cmp"
	"slices"
)

// starts is the scratch of the three ways to begin.
type starts struct {
	order []ranked
	aside []bool // ranks that take none of the overdue
	pairs []pair // candidate by candidate, each with every rank
	heap  []int32
}

// ranked is a candidate with what placing it brings where nothing overflows.
type ranked struct {
	gain int64
	who  int32
}

// startEvaluations bounds what the start looks at: entries times slots.
const startEvaluations = 4096

// beyond is how many candidates are looked at beyond the n that will be placed:
// all that the settings allow while few are placed, which is nearly always.
func (p *evenkeel) beyond(n int) int {
	return min(p.set.candidates, max(leastBeyond, startEvaluations/max(1, n)))
}

const leastBeyond = 32

// place makes the first, good placement of the round:
// the overdue entries, then as many of the others as there are slots. An overdue
// entry that fits nowhere keeps a rank closed.
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

// fillUp places what improving has made room for: no slot idles for which there
// is an entry.
func (p *evenkeel) fillUp(s *Snapshot) {
	if p.ranks.open > 0 && len(p.placed) < p.wanted {
		p.workerFirst(s, 0, len(p.pick.all), true)
	}
}

// reserve closes a rank for the first overdue entry that fits none with a free
// slot. Before any is placed the most overdue come first;
// afterwards one that others left no room for counts too.
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
// candidate among [from, to) that suits it best, until there are as many as
// wanted. Where further is set and no candidate fits it goes on in the pool.
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

// lowest is the open rank with the smallest load.
func (p *evenkeel) lowest() int {
	best, least := none, int64(0)
	for _, rank := range p.ranks.some {
		if g := int(rank); p.ranks.free[g] > 0 && !p.start.aside[g] && (best == none || p.loads.x[g] < least) {
			best, least = g, p.loads.x[g]
		}
	}
	return best
}

// sortByGain puts the unplaced candidates of a range in the order in which they
// would be taken if none overflowed the envelope; a tie goes to the earlier.
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
			break // even without overflow no better, and so are all that follow
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

// longestFirst is for many at once: the oldest, longest prompt first, each to
// the fitting rank that holds least now.
func (p *evenkeel) longestFirst(s *Snapshot, from, to int, further bool) {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if !p.pick.all[i].placed {
			order = append(order, ranked{p.pick.all[i].tokens, int32(i)})
		}
	}
	p.start.order = order
	if further { // the overdue come by their wait
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

// leastNow is the rank with a free slot that holds least now and has room.
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

// heapOpen puts the ranks with a free slot in a heap, least load on top.
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

// heapSettle puts rank g where it belongs after it took an entry.
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
