package policy

import (
	"math"
	"slices"
)

// residents lists the placements on each rank, as linked lists.
type residents struct {
	first []int32 // by rank: the first placement on it, or none
	next  []int32 // by placement: the next placement on the same rank, or none
}

// build makes the lists from all placements of the round. ranks is the number of ranks.
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

// preferPrefixRanks moves placements to ranks whose prefix caches hold more of their prompts, so that less KV must be copied to the ranks.
// The load of the fullest rank never rises, but the loads of the other ranks may become less equal. With the setting near=0.01, a move that
// saves the copy of a whole prompt may raise the smoothed peak of the loads by 1 % of a step, and a move that saves half of it by 0.5 %.
func (p *evenkeel) preferPrefixRanks(s *Snapshot) {
	anyHits := len(s.Waits) > 0 // on ranks that only decode, Waits is empty if no prompt has hits
	// If no slot is free after the round, leave the placements as they are.
	if p.set.prefixAffinity == 0 || !anyHits || p.ranks.openSlots == 0 {
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

// newNearSearch returns the limits for moves that begin with the present loads. The allowance is a step's length times the setting near.
func newNearSearch(p *evenkeel, s *Snapshot) nearSearch {
	smoothedPeak := float64(p.loads.presentSmoothedPeak())
	step := smoothedPeak // length of a step, expressed in the units of loads
	if s.C1Ms > 0 {
		step += math.Ldexp(float64(s.C0Ms)/float64(s.C1Ms), fixedBits) // plus the part of a step that does not depend on the load
	}
	return nearSearch{evenkeel: p, s: s, peak: p.loads.peak(), smoothedPeak: smoothedPeak, allowance: step * p.set.prefixAffinity}
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

// moveNearHits moves the candidate of placement a to the rank where the most tokens need not be copied (are spared). It takes a free slot
// there or, if it cannot, exchanges the candidates of a and of a placement on that rank. The loads must stay within the limits of the
// nearSearch (see affords). Each hit, and each placement that could be exchanged, spends one evaluation.
func (p *nearSearch) moveNearHits(a int) {
	candidate := p.placed[a].candidate
	heldHere := p.tokensHeld(candidate, int(p.placed[a].rank))
	mostSpared, rank, swapWith := 0, none, none // best move so far: tokens that it spares, its rank, and the placement to exchange with
	// affords, bestSwap and relocate read the rank and the load of placement a in p.search.
	p.fillSearch(a)
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
		const nothingAdded = 0 // a move takes the candidate off its present rank, and brings no other there
		fits := p.ranks.fits(g, p.candidates.all[candidate].tokens)
		if fits && p.affords(nothingAdded, g, p.candidates.loadOn(&p.loads, candidate, g), spared, candidate) {
			mostSpared, rank, swapWith = spared, g, none
			continue
		}
		if bothSpared, b := p.bestSwap(a, g, spared, mostSpared); b != none {
			mostSpared, rank, swapWith = bothSpared, g, b
		}
	}
	if swapWith != none {
		p.exchange(a, swapWith)
	} else if rank != none {
		p.placementsOn.move(int32(a), p.placed[a].rank, int32(rank))
		p.relocate(a, rank)
	}
}

// bestSwap looks for the placement on rank g whose exchange with placement a spares the most tokens in sum, and more than least. spared is
// what the move of placement a alone spares. swapWith is the placement found, or none.
func (p *nearSearch) bestSwap(a, g, spared, least int) (mostSpared, swapWith int) {
	mostSpared, swapWith = least, none
	for b := p.placementsOn.first[g]; b != none && p.search.evaluationsLeft > 0; b = p.placementsOn.next[b] {
		p.search.evaluationsLeft--
		if bothSpared := spared + p.sparesFor(int(b), g); bothSpared > mostSpared && p.canSwap(a, int(b), g, bothSpared) {
			mostSpared, swapWith = bothSpared, int(b)
		}
	}
	return mostSpared, swapWith
}

// affords says whether a change of loads is acceptable, given that it spares the copy of so many prompt tokens (spared) of a candidate. In
// the change, the load of p.search.ownRank becomes loadWithout plus added, and the load of rank g changes by change. No load may exceed the
// peak. The smoothed peak may rise by the part of the allowance that the spared tokens are of the candidate's prompt.
func (p *nearSearch) affords(added int64, g int, change int64, spared int, candidate int32) bool {
	l, search := &p.loads, &p.search
	if max(search.otherRanks.largestWithout(g), search.loadWithout+added, l.load[g]+change) > p.peak {
		return false
	}
	share := min(1, float64(spared)/float64(max(1, p.candidates.all[candidate].tokens)))
	return float64(p.smoothedPeakAfter(added, g, change))-p.smoothedPeak <= p.allowance*share
}

// sparesFor returns how many fewer tokens must be copied for the candidate of placement b if it moves from rank g to p.search.ownRank;
// below 0: more.
func (p *nearSearch) sparesFor(b, g int) int {
	candidate := p.placed[b].candidate
	return p.tokensHeld(candidate, p.search.ownRank) - p.tokensHeld(candidate, g)
}

// canSwap says whether placements a and b may exchange their candidates: both must find room, and the loads must not become too unequal for
// the number of prompt tokens that need not be copied (spared). p.search must be filled for placement a. rankB is the rank of b.
func (p *nearSearch) canSwap(a, b, rankB, spared int) bool {
	rankA := p.search.ownRank
	indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
	candidateA, candidateB := &p.candidates.all[indexA], &p.candidates.all[indexB]
	if candidateB.tokens-candidateA.tokens > p.ranks.room[rankA] || candidateA.tokens-candidateB.tokens > p.ranks.room[rankB] {
		return false
	}
	l := &p.loads
	addedToA := p.candidates.loadOn(l, indexB, rankA) // affords itself takes the load of a's candidate off this rank
	changeOfB := p.candidates.loadOn(l, indexA, rankB) - p.candidates.loadOn(l, indexB, rankB)
	return p.affords(addedToA, rankB, changeOfB, spared, indexA)
}
