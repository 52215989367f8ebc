package policy

import "evenkeel/dispatcher/subset"

// search is the memory of the search for better placements. fillSearch fills in the fields from ownRank on, for the placement that is about
// to be changed.
type search struct {
	evaluationsLeft int        // changes that the search may still try in this round; lowersCost takes one off
	ownRank         int        // rank of the placement
	ownLoad         int64      // load that the placement adds to ownRank
	loadWithout     int64      // load of ownRank without the placement
	otherRanks      otherLoads // largest loads of the other ranks
}

// minImprovement is the least fall of the cost for which the search makes a change, in units of 2^-fixedBits KV tokens: 2e-6 KV tokens.
const minImprovement = 2

// improve changes placements as long as changes lower the cost and the budget of evaluations lasts. For each placement, it tries three
// changes: place another candidate instead, swap the candidates with a later placement, or move to a free slot of another rank. In the
// cost, the smoothed peak stands for the largest load (see the type smoothedPeak), so that changes of the ranks below the fullest count,
// too.
func (p *evenkeel) improve(budget int) {
	p.search.evaluationsLeft = budget
	p.loads.startSmoothing(p.set.kappa)
	unchanged := 0 // placements in a row that could not be improved; the search ends when no placement can be
	for a := 0; unchanged < len(p.placed) && p.search.evaluationsLeft > 0; a++ {
		if a == len(p.placed) { // go through all placements again, because changes may have made others worthwhile
			a = 0
		}
		unchanged++
		if int(p.placed[a].rank) == p.ranks.reserved {
			continue // the reserved rank is kept free for an overdue entry
		}
		p.fillSearch(a) // each of the tries fills p.search again when it has changed placement a
		replaced, swapped, moved := p.tryReplacements(a), p.trySwaps(a), p.tryMoves(a)
		if replaced || swapped || moved {
			unchanged = 0
		}
	}
}

// fillSearch fills p.search with the rank and the load of placement a (an index in p.placed), and with the loads of the ranks without this
// placement. It changes neither the placement nor the loads.
func (p *evenkeel) fillSearch(a int) {
	search := &p.search
	search.ownRank = int(p.placed[a].rank)
	search.ownLoad = p.candidates.loadOn(&p.loads, p.placed[a].candidate, search.ownRank)
	search.loadWithout = p.loads.load[search.ownRank] - search.ownLoad
	search.otherRanks = p.loads.without(search.ownRank)
}

// lowersCost says whether a change of placements lowers the cost by at least minImprovement, and spends one evaluation. The cost is the
// number of ranks times the smoothed peak (about the largest load), less the loads and wait credits of all placed candidates. peakAfter is
// the smoothed peak after the change. gain is by how much the sum of these loads and credits rises; below 0: it falls. It is 0 if the same
// candidates stay placed.
func (p *evenkeel) lowersCost(peakAfter, gain int64) (worthwhile bool) {
	p.search.evaluationsLeft--
	rankCount, rise := int64(len(p.loads.load)), peakAfter-p.loads.presentSmoothedPeak()
	costChange := rankCount*rise - gain
	return costChange <= -minImprovement
}

// tryReplacements tries each unplaced candidate (a rival) in place of the candidate of placement a. If that lowers the cost, the two are
// exchanged, and the next rival is compared with the new candidate. A rival lowers the cost by its load, because it brings the rank closer
// to the fullest one, and by the credit for its wait. It raises the cost if it raises the peak. An overdue candidate is never replaced.
// changed says whether any exchange was made. p.search must be filled for placement a, and is filled again after each exchange.
func (p *evenkeel) tryReplacements(a int) (changed bool) {
	l, search := &p.loads, &p.search
	present := &p.candidates.all[p.placed[a].candidate]
	if present.overdue {
		return false
	}
	for i := 0; i < len(p.unplaced) && search.evaluationsLeft > 0; i++ {
		rival := &p.candidates.all[p.unplaced[i]]
		if rival.tokens-present.tokens > p.ranks.room[search.ownRank] { // the rival does not fit even in place of the present candidate
			continue
		}
		gain := rival.load + rival.waitCredit - present.load - present.waitCredit
		rivalLoad := p.candidates.loadOn(l, p.unplaced[i], search.ownRank)
		peakAfter := smoothedPeakWithOwn(p, search.loadWithout+rivalLoad)
		if !p.lowersCost(peakAfter, gain) { // spends one of evaluationsLeft
			continue
		}
		replaceCandidate(p, a, i)
		present = rival
		changed = true
		p.fillSearch(a) // with the new candidate
	}
	return changed
}

// replaceCandidate exchanges the candidate of placement a with the i-th unplaced one, and updates the load and the KV room of the rank.
// p.search must be filled for placement a.
func replaceCandidate(p *evenkeel, a, i int) {
	l, g := &p.loads, p.search.ownRank
	indexOut, indexIn := p.placed[a].candidate, p.unplaced[i]
	out, in := &p.candidates.all[indexOut], &p.candidates.all[indexIn]
	l.changeLoad(g, p.candidates.loadOn(l, indexIn, g)-p.search.ownLoad)
	p.ranks.changeRoom(g, out.tokens, in.tokens)
	out.placed, in.placed = false, true
	p.placed[a].candidate, p.unplaced[i] = indexIn, indexOut
}

// smoothedPeakWithOwn returns the smoothed peak (see the type smoothedPeak) that results if the load of p.search.ownRank changes to
// ownLoad, and no other load changes.
func smoothedPeakWithOwn(p *evenkeel, ownLoad int64) int64 {
	l, search := &p.loads, &p.search
	powerMeanTerm := l.smoothed.powerMeanTerm + l.smoothed.powerMeanRise(l.load[search.ownRank], ownLoad)
	return l.smoothed.value(max(search.otherRanks.largest, ownLoad), powerMeanTerm)
}

// smoothedPeakAfter returns the smoothed peak after a change of two loads: that of p.search.ownRank changes by ownChange, and that of rank
// b by changeB. The smoothed peak is a weighted mean of the largest load and a power mean of all loads. The power mean is computed by its
// tangent, so it rises by a term for each of the two loads.
func (p *evenkeel) smoothedPeakAfter(ownChange int64, b int, changeB int64) int64 {
	l, search := &p.loads, &p.search
	ownLoad, loadB := l.load[search.ownRank]+ownChange, l.load[b]+changeB
	largest := max(search.otherRanks.largestWithout(b), ownLoad, loadB)
	ownRise, riseB := l.smoothed.powerMeanRise(l.load[search.ownRank], ownLoad), l.smoothed.powerMeanRise(l.load[b], loadB)
	return l.smoothed.value(largest, l.smoothed.powerMeanTerm+ownRise+riseB)
}

// trySwaps tries to exchange the candidate of placement a with that of each later placement (b) on another rank. changed says whether any
// exchange lowered the cost. p.search must be filled for placement a: search.ownRank is its rank. It is filled again after each exchange,
// because a then has another candidate. Each exchange that is tried spends one evaluation. This is a hot loop, so it repeats the formula of
// swapChanges instead of calling it.
func (p *evenkeel) trySwaps(a int) (changed bool) {
	l, search := &p.loads, &p.search
	for b := a + 1; b < len(p.placed) && search.evaluationsLeft > 0; b++ {
		g := int(p.placed[b].rank)
		indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
		candidateA, candidateB := &p.candidates.all[indexA], &p.candidates.all[indexB]
		fits := candidateB.tokens-candidateA.tokens <= p.ranks.room[search.ownRank] && candidateA.tokens-candidateB.tokens <= p.ranks.room[g]
		if g == search.ownRank || g == p.ranks.reserved || !fits { // the reserved rank is kept free for an overdue entry
			continue
		}
		changeA := p.candidates.loadOn(l, indexB, search.ownRank) - search.ownLoad // of the load of the rank of a
		changeB := p.candidates.loadOn(l, indexA, g) - p.candidates.loadOn(l, indexB, g)
		const noGain = 0 // the same candidates stay placed, so only the peak can change the cost
		if !p.lowersCost(p.smoothedPeakAfter(changeA, g, changeB), noGain) {
			continue
		}
		p.exchange(a, b)
		changed = true
		p.fillSearch(a)
	}
	return changed
}

// swapChanges returns by how much the loads change if two placements exchange their candidates. Placement a has the candidate indexA on
// p.search.ownRank, and p.search must be filled for it. The other placement has the candidate indexB on rankB.
func swapChanges(p *evenkeel, indexA, indexB int32, rankB int) (changeA, changeB int64) {
	l, k := &p.loads, &p.candidates
	changeA = k.loadOn(l, indexB, p.search.ownRank) - p.search.ownLoad
	changeB = k.loadOn(l, indexA, rankB) - k.loadOn(l, indexB, rankB)
	return changeA, changeB
}

// exchange swaps the candidates of placements a and b, so that each gets the other's rank, and updates the loads and the KV room of both
// ranks. p.search must be filled for placement a.
func (p *evenkeel) exchange(a, b int) {
	l, rankA, rankB := &p.loads, int(p.placed[a].rank), int(p.placed[b].rank)
	indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
	tokensA, tokensB := p.candidates.all[indexA].tokens, p.candidates.all[indexB].tokens
	changeA, changeB := swapChanges(p, indexA, indexB, rankB)
	l.changeLoad(rankA, changeA)
	l.changeLoad(rankB, changeB)
	p.ranks.changeRoom(rankA, tokensA, tokensB)
	p.ranks.changeRoom(rankB, tokensB, tokensA)
	p.placed[a].candidate, p.placed[b].candidate = indexB, indexA
}

// tryMoves tries to move placement a to a free slot of each other rank. Each move that is tried spends one evaluation. changed says whether
// any move lowered the cost. p.search must be filled for placement a. It is filled again after each move, because the next move begins from
// the new rank.
func (p *evenkeel) tryMoves(a int) (changed bool) {
	l, search := &p.loads, &p.search
	if p.ranks.openSlots == 0 { // there is nowhere to move to
		return false
	}
	c := &p.candidates.all[p.placed[a].candidate]
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if search.evaluationsLeft <= 0 {
			break
		}
		if g == search.ownRank || !p.ranks.fits(g, c.tokens) {
			continue
		}
		added := p.candidates.loadOn(l, p.placed[a].candidate, g)
		peakAfter := p.smoothedPeakAfter(-search.ownLoad, g, added)
		const noGain = 0 // the same candidates stay placed, so only the peak can change the cost
		if !p.lowersCost(peakAfter, noGain) {
			continue
		}
		p.relocate(a, g)
		changed = true
		p.fillSearch(a)
	}
	return changed
}

// relocate moves placement a to a free slot of rank g, and updates loads, slots and room. p.fillSearch(a) must have been called before.
func (p *evenkeel) relocate(a, g int) {
	c := &p.candidates.all[p.placed[a].candidate]
	p.loads.changeLoad(p.search.ownRank, -p.search.ownLoad)
	p.loads.changeLoad(g, p.candidates.loadOn(&p.loads, p.placed[a].candidate, g))
	p.ranks.uncharge(p.search.ownRank, c.tokens)
	p.ranks.charge(g, c.tokens)
	p.placed[a].rank = int32(g)
}

// changeRoom updates the KV room of rank g when an entry of `in` tokens replaces an entry of `out` tokens. Unlimited room stays unlimited.
func (r *ranks) changeRoom(g int, out, in int64) {
	if r.room[g] != subset.Unlimited {
		r.room[g] += out - in
	}
}

// uncharge frees the slot and the KV room that an entry of so many tokens has taken on rank g.
func (r *ranks) uncharge(g int, tokens int64) {
	r.free[g]++
	r.openSlots++
	const noneIn = 0 // tokens of the entry that replaces it: no entry does
	r.changeRoom(g, tokens, noneIn)
}
