package policy

import (
	"cmp"
	"slices"
)

// starts is the memory of the first placements of a round, which are made in one of three ways: longestFirst, workerFirst or bestPair.
type starts struct {
	order    []ranked
	noneFits []bool  // by rank: true if no candidate fits the rank
	pairs    []pair  // used by bestPair: for each candidate, one pair with every rank
	heap     []int32 // used by longestFirst: heap of the ranks with a free slot, the smallest load on top
}

// ranked is a candidate with the value by which candidates are sorted, the largest first. In workerFirst, this is its gain: by how much the
// candidate lowers the cost if the largest load does not rise. In longestFirst, it is the length of its prompt.
type ranked struct {
	sortValue int64
	candidate int32
}

// startEvaluations bounds the work of the first placements: the number of candidates times the number of placements.
const startEvaluations = 4096

// extraCandidates returns how many candidates the search gets in addition to the n that will be placed. For small n, the usual case, this
// is the number in the settings. For large n it is smaller, to bound the work.
func (p *evenkeel) extraCandidates(n int) int {
	return min(p.set.extraCandidates, max(leastExtra, startEvaluations/max(1, n)))
}

const leastExtra = 32

// place makes the first placements of the round: the overdue entries, then other entries while slots are free, except those that are held
// back. improve makes them better later. For an overdue entry that fits no rank, place reserves a rank. The candidates that it does not
// place become p.unplaced, from which improve may take some in place of others.
func (p *evenkeel) place(s *Snapshot) {
	p.wanted = p.placeable(s)
	// With goOnInPool, later entries of the pool are placed, too, if no candidate fits.
	const goOnInPool = true
	slotsAreScarce := p.ranks.openSlots <= int64(p.wanted) // true: there is an entry for each slot; false: there is a slot for each entry
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	p.candidates.reset(s, p.loads.expectedGrowth, ageWeightFor(p.set.ageWeight, s), p.stepMs(s))
	copy(p.candidates.taken, p.heldBack.isHeld) // entries that are held back must not become candidates
	p.candidates.chooseEntries(s, p.overdueEntries, &p.ranks, p.wanted, p.extraCandidates(p.wanted))

	placeRange := p.longestFirst // fastest of the three ways, for many placements
	switch {
	case slotsAreScarce && p.wanted <= p.set.workerFirstMax:
		placeRange = p.workerFirst // more entries than slots: the choice is which entries are placed
	case !slotsAreScarce && p.wanted <= p.set.bestPairMax:
		placeRange = p.bestPair // all entries are placed: the choice is on which ranks
	}
	if p.candidates.overdueCount > 0 {
		const overdueArePlaced = true
		p.reserve(s, !overdueArePlaced) // for an entry that is too large for the present room of all ranks
		placeRange(s, 0, p.candidates.overdueCount, !goOnInPool)
		p.reserve(s, overdueArePlaced) // for an entry whose room other overdue entries have taken
	}
	placeRange(s, p.candidates.overdueCount, len(p.candidates.all), goOnInPool)

	p.unplaced = p.unplaced[:0]
	for i := range p.candidates.all {
		if !p.candidates.all[i].placed {
			p.unplaced = append(p.unplaced, int32(i))
		}
	}
}

// placeable returns how many entries the round can place at most: the number of free slots or of entries that are not held back, whichever
// is less.
func (p *evenkeel) placeable(s *Snapshot) int {
	return int(min(p.ranks.openSlots, int64(len(s.Pool)-p.heldBack.count)))
}

// fillUp places entries for which improve has made room, so that no slot stays free while a waiting entry fits.
func (p *evenkeel) fillUp(s *Snapshot) {
	const goOnInPool = true
	if p.ranks.openSlots > 0 && len(p.placed) < p.wanted {
		p.workerFirst(s, 0, len(p.candidates.all), goOnInPool)
	}
}

// reserve reserves a rank for the first overdue entry that fits no rank with a free slot. Before the overdue entries are placed
// (overdueArePlaced false), only an entry that is larger than the room of all these ranks gets a reservation. Afterwards, an overdue entry
// without a rank also gets one if slots are still free, because then it lacks only KV room.
func (p *evenkeel) reserve(s *Snapshot, overdueArePlaced bool) {
	room := p.ranks.largestRoom()
	slotsButNoRoom := overdueArePlaced && p.ranks.openSlots > 0
	for i := range p.candidates.overdueCount {
		c := &p.candidates.all[i]
		if !c.placed && (c.tokens > room || slotsButNoRoom) {
			p.ranks.reserve(s, int(c.entry))
			return
		}
	}
}

// workerFirst takes the rank with the smallest load, places the candidate there that changes the cost least, and repeats this until
// p.wanted entries are placed. The candidates are those with the indices from `from` to `to`-1. With goOnInPool, a rank that no such
// candidate fits gets a later entry of the pool.
func (p *evenkeel) workerFirst(s *Snapshot, from, to int, goOnInPool bool) {
	order := p.sortByGain(from, to)
	p.start.noneFits = sized(p.start.noneFits, len(p.loads.load))
	clear(p.start.noneFits)
	for len(p.placed) < p.wanted && (len(order) > 0 || goOnInPool) {
		g := p.leastLoaded()
		if g == none { // no slot is free any more, or nothing fits a rank with a free slot
			return
		}
		if best := p.bestCandidateFor(g, order); best != none {
			p.placeOn(order[best].candidate, g)
			order = slices.Delete(order, best, best+1)
			continue
		}
		candidate := none
		if goOnInPool {
			candidate = p.candidates.addFromPool(s, p.ranks.room[g])
		}
		if candidate == none { // leastLoaded must choose another rank from now on
			p.start.noneFits[g] = true
			continue
		}
		p.placeOn(int32(candidate), g)
	}
}

// leastLoaded returns the rank with the smallest load among those with a free slot; none: there is no such rank. It leaves out the ranks
// for which workerFirst has found no waiting entry that fits (noneFits).
func (p *evenkeel) leastLoaded() int {
	best, least := none, int64(0)
	for _, rank := range p.ranks.withSlots {
		g := int(rank)
		mayTakeEntry := p.ranks.free[g] > 0 && !p.start.noneFits[g]
		if mayTakeEntry && (best == none || p.loads.load[g] < least) {
			best, least = g, p.loads.load[g]
		}
	}
	return best
}

// sortByGain returns the unplaced candidates of a range, the largest gain first; in a tie, the earlier candidate. A candidate lowers the
// cost by its load (it brings its rank closer to the fullest rank) and by the credit for its wait.
func (p *evenkeel) sortByGain(from, to int) []ranked {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if c := &p.candidates.all[i]; !c.placed {
			order = append(order, ranked{c.load + c.waitCredit, int32(i)})
		}
	}
	p.start.order = order
	slices.SortFunc(order, largestFirst)
	return order
}

// largestFirst sorts candidates by their sort values, the largest first; in a tie, by index.
func largestFirst(a, b ranked) int {
	return cmp.Or(cmp.Compare(b.sortValue, a.sortValue), cmp.Compare(a.candidate, b.candidate))
}

// bestCandidateFor returns the index in order of the candidate that changes the cost least on rank g, or none if no candidate fits. The
// change of the cost is the rise of the largest load (the peak) times the number of ranks, less the gain of the candidate. In a tie, the
// earlier candidate wins. order must have the largest gain first.
func (p *evenkeel) bestCandidateFor(g int, order []ranked) int {
	l := &p.loads
	peak, rankCount := l.peak(), int64(len(l.load))
	best, least := none, int64(0)
	room := p.ranks.room[g]
	for i := range order {
		o := &order[i]
		gain := o.sortValue
		if best != none && -gain > least {
			break // even without a rise of the peak, this and all later candidates would change the cost by more
		}
		if p.candidates.all[o.candidate].tokens > room {
			continue
		}
		peakWith := max(peak, l.load[g]+p.candidates.loadOn(l, o.candidate, g))
		change := rankCount*(peakWith-peak) - gain
		if best == none || change < least || change == least && o.candidate < order[best].candidate {
			best, least = i, change
		}
	}
	return best
}

// longestFirst is for many placements at once. It takes one candidate after the other, and places it on the rank with the smallest load
// that has room for it. The candidates are those with the indices from `from` to `to`-1.
//
// Without goOnInPool, these are the overdue entries, which it takes in the order of their waits. With goOnInPool, it first takes the oldest
// candidates, as many as are still wanted, sorted by prompt length, the longest first. Then it takes the other candidates, and then later
// entries of the pool, while slots are free.
func (p *evenkeel) longestFirst(s *Snapshot, from, to int, goOnInPool bool) {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if !p.candidates.all[i].placed {
			order = append(order, ranked{sortValue: p.candidates.all[i].tokens, candidate: int32(i)})
		}
	}
	p.start.order = order
	if goOnInPool {
		oldest := order[:min(len(order), p.wanted-len(p.placed))]
		slices.SortFunc(oldest, largestFirst) // the longest prompts first
	}
	p.buildHeap()
	for _, o := range order {
		if len(p.placed) >= p.wanted {
			return
		}
		if g := p.leastLoadedFor(p.candidates.all[o.candidate].tokens); g != none {
			p.placeOn(o.candidate, g)
			p.heapUpdate(g)
		}
	}
	for goOnInPool && len(p.placed) < p.wanted {
		candidate := p.candidates.addFromPool(s, p.ranks.largestRoom())
		if candidate == none { // no waiting entry fits any rank
			return
		}
		g := p.leastLoadedFor(p.candidates.all[candidate].tokens) // never none: the entry fits the rank with the largest room
		p.placeOn(int32(candidate), g)
		p.heapUpdate(g)
	}
}

// leastLoadedFor returns the rank with the smallest load that has a free slot and room for so many tokens; none: there is no such rank.
func (p *evenkeel) leastLoadedFor(tokens int64) int {
	h := p.start.heap
	if len(h) == 0 { // no rank has a free slot
		return none
	}
	if tokens <= p.ranks.room[h[0]] { // the rank with the smallest load has room
		return int(h[0])
	}
	best := none // the heap does not help to find the next smallest load, so look at all ranks
	for _, rank := range p.ranks.withSlots {
		if g := int(rank); p.ranks.fits(g, tokens) && (best == none || p.lessLoaded(g, best)) {
			best = g
		}
	}
	return best
}

// lessLoaded says whether rank a has a smaller load than rank b. In a tie, the lower index counts as less loaded.
func (p *evenkeel) lessLoaded(a, b int) bool {
	x, y := p.loads.load[a], p.loads.load[b]
	return x < y || x == y && a < b
}

// buildHeap makes a heap of the ranks with a free slot, with the smallest load on top.
func (p *evenkeel) buildHeap() {
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

// heapUpdate restores the order of the heap after rank g got an entry. If g has no free slot left, it leaves the heap.
func (p *evenkeel) heapUpdate(g int) {
	i := 0 // index of g in the heap, usually 0
	if p.start.heap[0] != int32(g) {
		i = slices.Index(p.start.heap, int32(g))
	}
	if p.ranks.free[g] == 0 {
		last := len(p.start.heap) - 1
		moved := p.start.heap[last]
		p.start.heap[i] = moved
		p.start.heap = p.start.heap[:last]
		if i == last { // g was the last element, so no other rank has moved
			return
		}
		p.heapUp(i)
	}
	p.heapDown(i)
}

// heapUp moves the rank at index i of the heap up until no parent has a larger load.
func (p *evenkeel) heapUp(i int) {
	h := p.start.heap
	for i > 0 && p.lessLoaded(int(h[i]), int(h[(i-1)/2])) {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		i = (i - 1) / 2
	}
}

// heapDown moves the rank at index i of the heap down until no child has a smaller load.
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
