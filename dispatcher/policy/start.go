package policy

import (
	"cmp"
	"slices"
)

// starts is the memory of the three ways to make the first placements: longestFirst, workerFirst and bestPair.
type starts struct {
	order    []ranked
	setAside []bool  // by rank: no candidate fits it
	pairs    []pair  // of bestPair: for each candidate, its pair with every rank
	heap     []int32 // of longestFirst: open ranks, the one with the least load on top
}

// ranked is a candidate with a value by which candidates are sorted. In workerFirst, the gain is by how much the
// candidate lowers the cost if the peak does not rise.
type ranked struct {
	gain int64
	who  int32
}

// startEvaluations bounds the work of the first placements: candidates times placements.
const startEvaluations = 4096

// extraCandidates returns how many more candidates than the n that will be placed the search has to choose from. If n is small, which it
// nearly always is, this is the number in the settings.
func (p *evenkeel) extraCandidates(n int) int {
	return min(p.set.candidates, max(leastExtra, startEvaluations/max(1, n)))
}

const leastExtra = 32

// place makes the first placements of the round, which improve then improves:
// the overdue entries, then as many of the others as there are slots. For an overdue
// entry that fits no rank, a rank is reserved.
func (p *evenkeel) place(s *Snapshot) {
	scarce := p.ranks.openSlots <= int64(len(s.Pool))
	n := int(min(p.ranks.openSlots, int64(len(s.Pool))))
	p.late = overdue(s, p.late[:0])
	p.candidates.reset(s, p.loads.growth, ageWeightFor(p.set.ageWeight, s), p.stepMs(s))
	p.candidates.choose(s, p.late, &p.ranks, n, p.extraCandidates(n))

	placeRange := p.longestFirst
	switch {
	case scarce && n <= p.set.refill:
		placeRange = p.workerFirst
	case !scarce && n <= p.set.pairs:
		placeRange = p.bestPair
	}
	p.wanted = n
	if p.candidates.overdueCount > 0 {
		p.reserve(s, true)
		placeRange(s, 0, p.candidates.overdueCount, false)
		p.reserve(s, false)
	}
	placeRange(s, p.candidates.overdueCount, len(p.candidates.all), true)

	p.unplaced = p.unplaced[:0]
	for i := range p.candidates.all {
		if !p.candidates.all[i].placed {
			p.unplaced = append(p.unplaced, int32(i))
		}
	}
}

// fillUp places entries for which improve has made room, so that no slot stays free for which there
// is an entry.
func (p *evenkeel) fillUp(s *Snapshot) {
	if p.ranks.openSlots > 0 && len(p.placed) < p.wanted {
		p.workerFirst(s, 0, len(p.candidates.all), true)
	}
}

// reserve reserves a rank for the first overdue entry that fits no rank with a free slot. beforePlacing says that no entry is placed
// yet. Afterwards, an overdue entry also counts if it was not placed although slots are free, because the others left it no room.
func (p *evenkeel) reserve(s *Snapshot, beforePlacing bool) {
	room := p.ranks.largestRoom()
	for i := range p.candidates.overdueCount {
		if c := &p.candidates.all[i]; !c.placed && (c.tokens > room || !beforePlacing && p.ranks.openSlots > 0) {
			p.ranks.reserve(s, int(c.entry))
			return
		}
	}
}

// workerFirst gives the rank with the smallest load the candidate of [from, to) that changes the cost least there, again and again until
// p.wanted are placed. With fromPool, a rank that no candidate fits gets a later entry of the pool.
func (p *evenkeel) workerFirst(s *Snapshot, from, to int, fromPool bool) {
	order := p.sortByGain(from, to)
	p.start.setAside = sized(p.start.setAside, len(p.loads.load))
	clear(p.start.setAside)
	for len(p.placed) < p.wanted && (len(order) > 0 || fromPool) {
		g := p.leastLoaded()
		if g == none {
			return
		}
		if at := p.bestFor(g, order); at != none {
			p.add(order[at].who, g)
			order = slices.Delete(order, at, at+1)
			continue
		}
		who := none
		if fromPool {
			who = p.candidates.addFromPool(s, p.ranks.room[g])
		}
		if who == none {
			p.start.setAside[g] = true
			continue
		}
		p.add(int32(who), g)
	}
}

// leastLoaded returns the rank with the smallest load that has a free slot and is not set aside.
func (p *evenkeel) leastLoaded() int {
	best, least := none, int64(0)
	for _, rank := range p.ranks.withSlots {
		if g := int(rank); p.ranks.free[g] > 0 && !p.start.setAside[g] && (best == none || p.loads.load[g] < least) {
			best, least = g, p.loads.load[g]
		}
	}
	return best
}

// sortByGain returns the unplaced candidates of a range, those with the largest gain first; in a tie, the
// earlier.
func (p *evenkeel) sortByGain(from, to int) []ranked {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if c := &p.candidates.all[i]; !c.placed {
			order = append(order, ranked{c.load + c.age, int32(i)})
		}
	}
	p.start.order = order
	slices.SortFunc(order, byGain)
	return order
}

func byGain(a, b ranked) int { return cmp.Or(cmp.Compare(b.gain, a.gain), cmp.Compare(a.who, b.who)) }

// bestFor returns the position in order of the candidate with the smallest change of cost on rank g; none: no candidate fits.
func (p *evenkeel) bestFor(g int, order []ranked) int {
	l := &p.loads
	top, rankCount := l.peak(), int64(len(l.load))
	best, least := none, int64(0)
	room := p.ranks.room[g]
	for at := range order {
		o := &order[at]
		if best != none && -o.gain > least {
			break // this candidate would be no better even if the peak did not rise, and no later one would
		}
		c := &p.candidates.all[o.who]
		if c.tokens > room {
			continue
		}
		change := rankCount*(max(top, l.load[g]+p.candidates.loadOn(l, o.who, g))-top) - o.gain
		if best == none || change < least || change == least && o.who < order[best].who {
			best, least = at, change
		}
	}
	return best
}

// longestFirst is for many placements at once: it puts one candidate of [from, to) after the other on the rank that has the smallest
// load then and room for it. With fromPool, the oldest of them, as many as are still wanted, come sorted by length, the longest prompt
// first. The other candidates and then later entries of the pool follow while there are slots. Without it, these are the overdue
// entries, which stay in the order of their waits.
func (p *evenkeel) longestFirst(s *Snapshot, from, to int, fromPool bool) {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if !p.candidates.all[i].placed {
			order = append(order, ranked{p.candidates.all[i].tokens, int32(i)})
		}
	}
	p.start.order = order
	if fromPool {
		first := order[:min(len(order), p.wanted-len(p.placed))]
		slices.SortFunc(first, byGain)
	}
	p.heapOpen()
	for _, o := range order {
		if len(p.placed) >= p.wanted {
			return
		}
		if g := p.leastLoadedFor(p.candidates.all[o.who].tokens); g != none {
			p.add(o.who, g)
			p.heapSettle(g)
		}
	}
	for fromPool && len(p.placed) < p.wanted {
		who := p.candidates.addFromPool(s, p.ranks.largestRoom())
		if who == none {
			return
		}
		g := p.leastLoadedFor(p.candidates.all[who].tokens)
		p.add(int32(who), g)
		p.heapSettle(g)
	}
}

// leastLoadedFor returns the rank with the smallest load that has a free slot and room for so many tokens; none: no rank has.
func (p *evenkeel) leastLoadedFor(tokens int64) int {
	if h := p.start.heap; len(h) == 0 || tokens <= p.ranks.room[h[0]] {
		if len(h) == 0 {
			return none
		}
		return int(h[0])
	}
	best := none
	for _, rank := range p.ranks.withSlots {
		if g := int(rank); p.ranks.fits(g, tokens) && (best == none || p.lessLoaded(g, best)) {
			best = g
		}
	}
	return best
}

// lessLoaded says whether rank a has a smaller load than rank b or, in a tie, the lower index.
func (p *evenkeel) lessLoaded(a, b int) bool {
	x, y := p.loads.load[a], p.loads.load[b]
	return x < y || x == y && a < b
}

// heapOpen makes a heap of the ranks with a free slot, with the smallest load on top.
func (p *evenkeel) heapOpen() {
	h := p.start.heap[:0]
	for _, g := range p.ranks.withSlots {
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

// heapUp moves the rank at position i of the heap up to where its load belongs.
func (p *evenkeel) heapUp(i int) {
	h := p.start.heap
	for i > 0 && p.lessLoaded(int(h[i]), int(h[(i-1)/2])) {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		i = (i - 1) / 2
	}
}

// heapDown moves the rank at position i of the heap down to where its load belongs.
func (p *evenkeel) heapDown(i int) {
	h := p.start.heap
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h); child++ {
			if p.lessLoaded(int(h[child]), int(h[least])) {
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
