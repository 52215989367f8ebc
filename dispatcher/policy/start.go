package policy

import (
	"cmp"
	"slices"
)

// starts is the memory of the first placements of a round.
type starts struct {
	way      way
	order    []ranked
	noneFits []bool  // by rank: no candidate fits it
	pairs    []pair  // used by bestPair: for each candidate, one pair with every rank
	heap     []int32 // used by candidateFirst: the ranks with a free slot, the smallest load on top
}

// ranked is a candidate with its sort value: in workerFirst its gain, by how much it lowers the
// cost if the largest load does not rise, and in candidateFirst the length of its prompt.
type ranked struct {
	sortValue int64
	candidate int32
}

// startEvaluations bounds the number of candidates times the number of placements.
const startEvaluations = 4096

// extraCandidates returns how many candidates the search gets in addition to the n that will be
// placed. It is smaller for large n, to bound the work.
func (p *evenkeel) extraCandidates(n int) int {
	return min(p.set.extraCandidates, max(leastExtra, startEvaluations/max(1, n)))
}

const leastExtra = 32

// place makes the first placements of the round: the overdue entries, then others while slots are
// free. improve makes them better later, and may take some of p.unplaced in place of others.
func (p *evenkeel) place(s *Snapshot) {
	p.wanted = p.placeable(s)
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	p.candidates.reset(s, p.loads.extraPerRequest, ageWeightFor(p.set.ageWeight, s), p.stepMs(s))
	copy(p.candidates.taken, p.heldBack.isHeld) // entries that are held back must not become candidates
	p.candidates.chooseEntries(s, p.overdueEntries, &p.ranks, p.wanted, p.extraCandidates(p.wanted))

	p.start.way = chooseWay(p)                // before the placements change the number of open slots
	overdueCount := p.candidates.overdueCount // the overdue candidates come first
	if overdueCount > 0 {
		reserveForTooLarge(p, s) // before the others could take the room of the reserved rank
		placeRange(p, s, 0, overdueCount, onlyRange)
		reserveForLeftOut(p, s) // for one that had room at first, but was left over
	}
	placeRange(p, s, overdueCount, len(p.candidates.all), thenPool) // if slots are left, later entries of the pool get them

	p.unplaced = p.unplaced[:0]
	for i := range p.candidates.all {
		if !p.candidates.all[i].placed {
			p.unplaced = append(p.unplaced, int32(i))
		}
	}
}

type way uint8

const (
	byCandidate way = iota // see candidateFirst
	byWorker               // see workerFirst
	byPair                 // see bestPair
)

// chooseWay returns the best way that is fast enough for the number of placements.
func chooseWay(p *evenkeel) way {
	slotsAreScarce := p.ranks.openSlots <= int64(p.wanted)
	switch {
	case slotsAreScarce && p.wanted <= p.set.workerFirstMax:
		return byWorker // more entries than slots: the choice is which entries are placed
	case !slotsAreScarce && p.wanted <= p.set.bestPairMax:
		return byPair // all entries are placed: the choice is on which ranks
	}
	return byCandidate // the fastest way, for many placements
}

// Values of the parameter mayGoOn.
const (
	onlyRange = false
	thenPool  = true // when no candidate of the range fits, go on with later entries of the pool
)

// placeRange places the candidates with the indices from `from` to `to`-1. bestPair need not know
// mayGoOn: with byPair there are more slots than entries, and all entries that fit are candidates.
func placeRange(p *evenkeel, s *Snapshot, from, to int, mayGoOn bool) {
	switch p.start.way {
	case byWorker:
		p.workerFirst(s, from, to, mayGoOn)
	case byPair:
		p.bestPair(from, to)
	case byCandidate:
		p.candidateFirst(s, from, to, mayGoOn)
	}
}

func (p *evenkeel) placeable(s *Snapshot) int {
	return int(min(p.ranks.openSlots, int64(len(s.Pool)-p.heldBack.count)))
}

// fillUp places entries for which improve has made room.
func (p *evenkeel) fillUp(s *Snapshot) {
	if p.ranks.openSlots > 0 && len(p.placed) < p.wanted {
		p.workerFirst(s, 0, len(p.candidates.all), thenPool)
	}
}

// reserveForTooLarge reserves a rank for the first overdue candidate that is larger than the room
// of all ranks with a free slot.
func reserveForTooLarge(p *evenkeel, s *Snapshot) {
	room := p.ranks.largestRoom()
	for i := range p.candidates.overdueCount {
		if c := &p.candidates.all[i]; !c.placed && c.tokens > room {
			p.ranks.reserveOnce(s, int(c.entry))
			return
		}
	}
}

func reserveForLeftOut(p *evenkeel, s *Snapshot) {
	for i := range p.candidates.overdueCount {
		if c := &p.candidates.all[i]; !c.placed {
			p.ranks.reserveOnce(s, int(c.entry))
			return
		}
	}
}

// workerFirst takes the rank with the smallest load, places the candidate there that changes the
// cost least, and repeats this. The cost is the sum over the ranks of the tokens by which each is
// below the fullest rank, less the wait credits of the placed candidates.
func (p *evenkeel) workerFirst(s *Snapshot, from, to int, mayGoOn bool) {
	order := p.sortByGain(from, to)
	p.start.noneFits = sized(p.start.noneFits, len(p.loads.load))
	clear(p.start.noneFits)
	for len(p.placed) < p.wanted && (len(order) > 0 || mayGoOn) {
		g := p.leastLoaded()
		if g == none { // no slot is free any more, or no entry fits
			return
		}
		if best := p.bestCandidateFor(g, order); best != none {
			p.placeOn(order[best].candidate, g)
			order = slices.Delete(order, best, best+1)
			continue
		}
		candidate := none
		if mayGoOn {
			candidate = p.candidates.addFromPool(s, p.ranks.room[g])
		}
		if candidate == none {
			p.start.noneFits[g] = true
			continue
		}
		p.placeOn(int32(candidate), g)
	}
}

func (p *evenkeel) leastLoaded() int {
	best, least := none, int64(0)
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		mayTakeEntry := p.ranks.free[g] > 0 && !p.start.noneFits[g]
		if mayTakeEntry && (best == none || p.loads.load[g] < least) {
			best, least = g, p.loads.load[g]
		}
	}
	return best
}

// sortByGain returns the unplaced candidates of a range, the largest gain first; in a tie, the
// earlier candidate.
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

func largestFirst(a, b ranked) int {
	return cmp.Or(cmp.Compare(b.sortValue, a.sortValue), cmp.Compare(a.candidate, b.candidate))
}

// bestCandidateFor returns the index in order, or none. The change of the cost is the rise of the
// largest load (the peak) times the number of ranks, less the gain of the candidate. order must
// have the largest gain first.
func (p *evenkeel) bestCandidateFor(g int, order []ranked) int {
	l := &p.loads
	peak, rankCount := l.peak(), int64(len(l.load))
	best, least := none, int64(0)
	room := p.ranks.room[g]
	for i := range order {
		o := &order[i]
		gain := o.sortValue
		if best != none && -gain > least {
			break // even without a rise of the peak, the later candidates change the cost by more
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

// candidateFirst is for many placements at once: it places one candidate after the other on the
// rank with the smallest load that has room for it.
func (p *evenkeel) candidateFirst(s *Snapshot, from, to int, mayGoOn bool) {
	longestFirstCount := 0 // the overdue candidates stay in the order of their waits
	if mayGoOn {
		longestFirstCount = p.wanted - len(p.placed) // the oldest candidates, as many as are still wanted
	}
	order := inPlacingOrder(p, from, to, longestFirstCount)
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
	if mayGoOn {
		placeFromPool(p, s)
	}
}

// placeFromPool places entries that are no candidates yet, the oldest first. The heap must be
// built.
func placeFromPool(p *evenkeel, s *Snapshot) {
	for len(p.placed) < p.wanted {
		candidate := p.candidates.addFromPool(s, p.ranks.largestRoom())
		if candidate == none {
			return
		}
		g := p.leastLoadedFor(p.candidates.all[candidate].tokens) // never none: the entry fits the rank with the largest room
		p.placeOn(int32(candidate), g)
		p.heapUpdate(g)
	}
}

// inPlacingOrder puts the longest prompt first among the first longestFirstCount, because short
// prompts then level the loads that long ones leave.
func inPlacingOrder(p *evenkeel, from, to, longestFirstCount int) []ranked {
	order := p.start.order[:0]
	for i := from; i < to; i++ {
		if !p.candidates.all[i].placed {
			order = append(order, ranked{sortValue: p.candidates.all[i].tokens, candidate: int32(i)})
		}
	}
	p.start.order = order
	slices.SortFunc(order[:min(len(order), longestFirstCount)], largestFirst)
	return order
}

func (p *evenkeel) leastLoadedFor(tokens int64) int {
	h := p.start.heap
	if len(h) == 0 {
		return none
	}
	if tokens <= p.ranks.room[h[0]] {
		return int(h[0])
	}
	best := none // the heap does not help to find the next smallest load
	for _, rank := range p.ranks.hadSlots {
		if g := int(rank); p.ranks.fits(g, tokens) && (best == none || p.lessLoaded(g, best)) {
			best = g
		}
	}
	return best
}

func (p *evenkeel) lessLoaded(a, b int) bool {
	x, y := p.loads.load[a], p.loads.load[b]
	return x < y || x == y && a < b
}

func (p *evenkeel) buildHeap() {
	h := p.start.heap[:0]
	for _, g := range p.ranks.hadSlots {
		if p.ranks.free[g] > 0 {
			h = append(h, g)
		}
	}
	p.start.heap = h
	for i := len(h)/2 - 1; i >= 0; i-- {
		p.heapDown(i)
	}
}

// heapUpdate restores the order of the heap after rank g got an entry.
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

func (p *evenkeel) heapUp(i int) {
	h := p.start.heap
	for i > 0 && p.lessLoaded(int(h[i]), int(h[(i-1)/2])) {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		i = (i - 1) / 2
	}
}

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
