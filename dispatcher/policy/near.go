package policy

import (
	"math"
	"slices"
)

// residents has a linked list for each rank: the placements on it.
type residents struct {
	first []int32 // by rank: the first placement on it, or none
	next  []int32 // by placement: the next placement on the same rank, or none
}

// build makes the lists from all placements of the round, each list in the order of the placements. ranks is the number of ranks. push puts
// a placement at the front of its list, so build goes backwards.
func (r *residents) build(placed []placement, ranks int) {
	r.first, r.next = sized(r.first, ranks), sized(r.next, len(placed))
	for g := range r.first {
		r.first[g] = none
	}
	for i := len(placed) - 1; i >= 0; i-- {
		r.push(int32(i), placed[i].rank)
	}
}

// push puts placement i at the front of the list of a rank. The placement must be in no list.
func (r *residents) push(i, rank int32) { r.first[rank], r.next[i] = i, r.first[rank] }

// move moves placement i from the list of one rank to that of another.
func (r *residents) move(i, from, to int32) {
	link := &r.first[from] // points to the link that leads to i
	for *link != i {
		link = &r.next[*link]
	}
	*link = r.next[i]
	r.push(i, to)
}

// maxNearLooks bounds the work of preferPrefixRanks in a round: the number of hits and placements that it may look at.
const maxNearLooks = 1024

// preferPrefixRanks moves placements to ranks whose prefix caches hold more of their prompts (hits), so that less KV must be copied to the
// ranks. It is for ranks that only decode. It never lets the load of the fullest rank rise, but the loads of the other ranks may become
// less equal, and the setting near limits by how much. With near=0.01, a move that saves the copy of a whole prompt may raise the smoothed
// peak (a mean of the largest load and a power mean of all loads) by 1 % of a step, and a move that saves half of it by 0.5 %. The number
// of hits and placements that it may look at is bounded (maxNearLooks). If the round leaves no slot free, no placement is moved.
func (p *evenkeel) preferPrefixRanks(s *Snapshot) {
	anyHits := len(s.Waits) > 0 // on ranks that only decode, Waits is empty if no prompt has hits
	if p.set.nearShare == 0 || !anyHits || p.ranks.openSlots == 0 {
		return
	}
	near := newNearSearch(p, s)
	p.search.evaluationsLeft = maxNearLooks
	p.placementsOn.build(p.placed, len(s.Workers)) // bestSwap looks up the placements on a rank
	for a := 0; a < len(p.placed) && p.search.evaluationsLeft > 0; a++ {
		isReserved := int(p.placed[a].rank) == p.ranks.reserved // the reserved rank is kept free for an overdue entry
		if !isReserved && len(near.hits(p.placed[a].candidate)) > 0 {
			near.moveNearHits(a)
		}
	}
}

// nearSearch is the state of preferPrefixRanks: the limits that its moves must keep.
type nearSearch struct {
	*evenkeel
	s            *Snapshot
	peak         int64   // largest load of a rank when the moves begin, which no move may exceed
	smoothedPeak float64 // smoothed peak of the loads when the moves begin, see the type smoothedPeak
	allowance    float64 // how much the smoothed peak may rise for a move that saves the copy of a whole prompt
}

// newNearSearch returns the limits that moves to ranks with prefix hits must keep, given the present loads. No load may exceed the present
// peak, the largest load. The smoothed peak, a mean of the largest load and a power mean of all loads, may rise by the allowance: the
// length of a step times the setting near (nearShare). Loads are in units of 2^-fixedBits KV tokens, and so is the length of a step: it is
// the load that would take as long.
func newNearSearch(p *evenkeel, s *Snapshot) nearSearch {
	smoothedPeak := float64(p.loads.presentSmoothedPeak())
	step := smoothedPeak
	if s.C1Ms > 0 { // plus the load that would take as long as the part of a step that does not depend on the load
		step += math.Ldexp(float64(s.C0Ms)/float64(s.C1Ms), fixedBits)
	}
	return nearSearch{evenkeel: p, s: s, peak: p.loads.peak(), smoothedPeak: smoothedPeak, allowance: step * p.set.nearShare}
}

// hits returns the ranks that have a part of a candidate's prompt in their prefix cache. candidate is an index in p.candidates.all.
func (p *nearSearch) hits(candidate int32) []Hit {
	return p.s.Waits[p.candidates.all[candidate].entry].Hits
}

// tokensHeld returns how many tokens of a candidate's prompt are in the prefix cache of rank g; 0 also if g has no hit. The hits are sorted
// by the ID of their worker.
func (p *nearSearch) tokensHeld(candidate int32, g int) int {
	hits := p.hits(candidate)
	if at, ok := slices.BinarySearchFunc(hits, p.s.Workers[g].ID, func(h Hit, id int32) int { return int(h.Worker) - int(id) }); ok {
		return hits[at].Tokens
	}
	return 0
}

// moveNearHits moves the candidate of placement a to the rank where the most tokens need not be copied (see bestMove). It takes a free slot
// there or, if swapWith is a placement on that rank, exchanges the candidates of both. If no rank is better, it changes nothing.
func (p *nearSearch) moveNearHits(a int) {
	p.fillSearch(a) // bestMove, exchange and relocate read the rank and the load of placement a in p.search
	rank, swapWith := p.bestMove(a)
	if swapWith != none {
		p.exchange(a, swapWith) // each placement stays on its rank and gets the other's candidate, so placementsOn does not change
	} else if rank != none {
		p.placementsOn.move(int32(a), p.placed[a].rank, int32(rank)) // before relocate changes the rank of the placement
		p.relocate(a, rank)
	}
}

// bestMove returns the rank to which placement a should move: the one where the most tokens need not be copied (are spared), compared with
// its present rank; none: no move spares any. swapWith is the placement on that rank with which it must exchange candidates; none: it takes
// a free slot. A move must keep the limits of the nearSearch (see affords). Each hit, and each placement that could be exchanged, spends
// one evaluation. p.search must be filled for placement a.
func (p *nearSearch) bestMove(a int) (rank, swapWith int) {
	candidate := p.placed[a].candidate
	heldHere := p.tokensHeld(candidate, p.search.ownRank)
	mostSpared := 0 // tokens that the best move so far spares
	rank, swapWith = none, none
	for _, h := range p.hits(candidate) {
		if p.search.evaluationsLeft--; p.search.evaluationsLeft < 0 {
			break
		}
		g, ok := p.s.index(h.Worker)
		spared := h.Tokens - heldHere
		isOther := ok && g != p.search.ownRank && g != p.ranks.reserved // not ok: the hit is on a rank that is not in the snapshot
		if !isOther || spared <= mostSpared {
			continue
		}
		fits := p.ranks.fits(g, p.candidates.all[candidate].tokens)
		if fits && p.affords(-p.search.ownLoad, g, p.candidates.loadOn(&p.loads, candidate, g), p.shareOf(candidate, spared)) {
			mostSpared, rank, swapWith = spared, g, none
			continue
		}
		if bothSpared, b := p.bestSwap(a, g, spared, mostSpared); b != none {
			mostSpared, rank, swapWith = bothSpared, g, b
		}
	}
	return rank, swapWith
}

// bestSwap looks for the placement on rank g with which placement a should exchange its candidate, so that each candidate goes to the
// other's rank. spared is how many fewer tokens must be copied for the candidate of a on rank g. For the other candidate it may be fewer or
// more, and both numbers count together. bestSwap takes the exchange that spares the most tokens, if these are more than sparedSoFar, which
// the best move so far spares. The more it spares, the less level the loads may become by it (see affords). swapWith is the placement
// found, or none.
func (p *nearSearch) bestSwap(a, g, spared, sparedSoFar int) (mostSpared, swapWith int) {
	mostSpared, swapWith = sparedSoFar, none
	for b := p.placementsOn.first[g]; b != none && p.search.evaluationsLeft > 0; b = p.placementsOn.next[b] {
		p.search.evaluationsLeft--
		bothSpared := spared + p.sparedOnOwnRank(int(b), g) // the candidate of b goes to the rank of a, p.search.ownRank
		if bothSpared > mostSpared && p.canSwap(a, int(b), g, bothSpared) {
			mostSpared, swapWith = bothSpared, int(b)
		}
	}
	return mostSpared, swapWith
}

// affords says whether a move keeps the limits. It changes the load of p.search.ownRank by ownChange, and that of rank b by changeB. No
// load may exceed the peak from before the moves. The smoothed peak may rise by a share of the allowance (sparedShare), so that a move may
// cost more the more of a prompt it spares from being copied.
func (p *nearSearch) affords(ownChange int64, b int, changeB int64, sparedShare float64) bool {
	l, search := &p.loads, &p.search
	if max(search.otherRanks.largestWithout(b), l.load[search.ownRank]+ownChange, l.load[b]+changeB) > p.peak {
		return false
	}
	return float64(p.smoothedPeakAfter(ownChange, b, changeB))-p.smoothedPeak <= p.allowance*sparedShare
}

// shareOf returns which share of a candidate's prompt so many tokens are, at most 1.
func (p *nearSearch) shareOf(candidate int32, tokens int) float64 {
	return min(1, float64(tokens)/float64(max(1, p.candidates.all[candidate].tokens)))
}

// sparedOnOwnRank returns how many fewer tokens must be copied for the candidate of placement b if it goes to p.search.ownRank instead of
// its present rank g; below 0: more.
func (p *nearSearch) sparedOnOwnRank(b, g int) int {
	candidate := p.placed[b].candidate
	return p.tokensHeld(candidate, p.search.ownRank) - p.tokensHeld(candidate, g)
}

// canSwap says whether placements a and b may exchange their candidates. Both must find room, and the loads must stay within the limits of
// affords. spared is how many fewer tokens must be copied for both candidates together; it counts as a share of the prompt of a's
// candidate. p.search must be filled for placement a. rankB is the rank of b.
func (p *nearSearch) canSwap(a, b, rankB, spared int) bool {
	rankA := p.search.ownRank
	indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
	candidateA, candidateB := &p.candidates.all[indexA], &p.candidates.all[indexB]
	if candidateB.tokens-candidateA.tokens > p.ranks.room[rankA] || candidateA.tokens-candidateB.tokens > p.ranks.room[rankB] {
		return false
	}
	changeA, changeB := swapChanges(p.evenkeel, indexA, indexB, rankB) // of the loads of rankA and rankB
	return p.affords(changeA, rankB, changeB, p.shareOf(indexA, spared))
}
