package policy

import "evenkeel/dispatcher/subset"

// search is the memory of the search for better placements: the loads without the placement that is about to be changed.
type search struct {
	evaluationsLeft int        // changes that the search may still try in this round
	rank            int        // rank of the placement that is about to be changed
	ownLoad         int64      // load that the placement adds to its rank
	baseLoad        int64      // load of the rank without the placement
	others          otherLoads // largest loads of the other ranks
}

// minImprovement is the least fall of the cost for which the search makes a change, in units of 2^-fixedBits KV tokens: 2e-6 KV tokens.
const minImprovement = 2

// improve changes placements as long as changes lower the cost and the budget of evaluations lasts. For each placement, it tries three
// changes: place another candidate instead, swap the candidates with a later placement, or move to a free slot of another rank.
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
		p.liftPlacement(a)
		replaced, swapped, moved := p.tryReplacements(a), p.trySwaps(a), p.tryMoves(a)
		if replaced || swapped || moved {
			unchanged = 0
		}
	}
}

// liftPlacement sets p.search to the loads without placement a (an index in p.placed). It changes no placement.
func (p *evenkeel) liftPlacement(a int) {
	search := &p.search
	search.rank = int(p.placed[a].rank)
	search.ownLoad = p.candidates.loadOn(&p.loads, p.placed[a].candidate, search.rank)
	search.baseLoad = p.loads.load[search.rank] - search.ownLoad
	search.others = p.loads.without(search.rank)
}

// evaluateChange says whether a change of placements lowers the cost by enough, and spends one evaluation. peakAfter is the smoothed peak
// after the change. gain is by how much the sum of load and wait credit of the placed candidates rises: both lower the cost.
func (p *evenkeel) evaluateChange(peakAfter, gain int64) (worthwhile bool) {
	p.search.evaluationsLeft--
	l := &p.loads
	// A rise leaves every rank farther below the fullest, so it counts once per rank.
	rise := peakAfter - l.smoothed.value(l.peak(), l.smoothed.rootTerm)
	return int64(len(l.load))*rise-gain <= -minImprovement
}

// tryReplacements tries each unplaced candidate in place of the candidate of placement a. If that lowers the cost, the two are exchanged,
// and the next unplaced candidate is compared with the new one. An overdue candidate is never replaced. changed says whether any exchange
// was made.
func (p *evenkeel) tryReplacements(a int) (changed bool) {
	l, search := &p.loads, &p.search
	candidate := p.placed[a].candidate // present candidate of placement a
	present := &p.candidates.all[candidate]
	if present.overdue {
		return false
	}
	for i := 0; i < len(p.unplaced) && search.evaluationsLeft > 0; i++ {
		rival := &p.candidates.all[p.unplaced[i]]
		if rival.tokens-present.tokens > p.ranks.room[search.rank] { // the rival does not fit even in place of the present candidate
			continue
		}
		gain := rival.load + rival.waitCredit - present.load - present.waitCredit
		added := p.candidates.loadOn(l, p.unplaced[i], search.rank)
		load := search.baseLoad + added
		peakAfter := l.smoothed.value(max(search.others.largest, load), l.smoothed.rootTerm+l.smoothed.rootRise(l.load[search.rank], load))
		if !p.evaluateChange(peakAfter, gain) {
			continue
		}
		l.changeLoad(search.rank, added-search.ownLoad)
		p.ranks.changeRoom(search.rank, present.tokens, rival.tokens)
		present.placed, rival.placed = false, true
		p.placed[a].candidate, p.unplaced[i] = p.unplaced[i], candidate
		candidate, present = p.placed[a].candidate, rival
		changed = true
		p.liftPlacement(a) // p.search must reflect the new candidate
	}
	return changed
}

// smoothedPeakAfter returns the smoothed peak after a change of two loads: that of the rank in p.search to its baseLoad plus added, and
// that of rank b by change.
func (p *evenkeel) smoothedPeakAfter(added int64, b int, change int64) int64 {
	l, search := &p.loads, &p.search
	loadA, loadB := search.baseLoad+added, l.load[b]+change
	return l.smoothed.value(max(search.others.largestWithout(b), loadA, loadB),
		l.smoothed.rootTerm+l.smoothed.rootRise(l.load[search.rank], loadA)+l.smoothed.rootRise(l.load[b], loadB))
}

// trySwaps tries to exchange the candidate of placement a with that of each later placement on another rank. changed says whether any
// exchange lowered the cost.
func (p *evenkeel) trySwaps(a int) (changed bool) {
	l, search := &p.loads, &p.search
	for b := a + 1; b < len(p.placed) && search.evaluationsLeft > 0; b++ {
		g := int(p.placed[b].rank)
		indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
		candidateA, candidateB := &p.candidates.all[indexA], &p.candidates.all[indexB]
		fits := candidateB.tokens-candidateA.tokens <= p.ranks.room[search.rank] && candidateA.tokens-candidateB.tokens <= p.ranks.room[g]
		if g == search.rank || g == p.ranks.reserved || !fits { // the reserved rank is kept free for an overdue entry
			continue
		}
		added := p.candidates.loadOn(l, indexB, search.rank)
		change := p.candidates.loadOn(l, indexA, g) - p.candidates.loadOn(l, indexB, g)
		const noGain = 0 // the same candidates stay placed
		if !p.evaluateChange(p.smoothedPeakAfter(added, g, change), noGain) {
			continue
		}
		p.exchange(a, b)
		changed = true
		p.liftPlacement(a)
	}
	return changed
}

// exchange swaps the candidates of placements a and b, so that each gets the other's rank, and updates the loads and the KV room of both
// ranks. The caller must have called p.liftPlacement(a), which fills p.search with the rank of a and the load that a adds to this rank.
func (p *evenkeel) exchange(a, b int) {
	l, rankA, rankB := &p.loads, p.search.rank, int(p.placed[b].rank)
	indexA, indexB := p.placed[a].candidate, p.placed[b].candidate
	tokensA, tokensB := p.candidates.all[indexA].tokens, p.candidates.all[indexB].tokens
	changeA := p.candidates.loadOn(l, indexB, rankA) - p.search.ownLoad
	changeB := p.candidates.loadOn(l, indexA, rankB) - p.candidates.loadOn(l, indexB, rankB)
	l.changeLoad(rankA, changeA)
	l.changeLoad(rankB, changeB)
	p.ranks.changeRoom(rankA, tokensA, tokensB)
	p.ranks.changeRoom(rankB, tokensB, tokensA)
	p.placed[a].candidate, p.placed[b].candidate = indexB, indexA
}

// tryMoves tries to move placement a to a free slot of each other rank. changed says whether any move lowered the cost.
func (p *evenkeel) tryMoves(a int) (changed bool) {
	l, search := &p.loads, &p.search
	if p.ranks.openSlots == 0 { // there is nowhere to move to
		return false
	}
	c := &p.candidates.all[p.placed[a].candidate]
	for _, rank := range p.ranks.withSlots {
		g := int(rank)
		if search.evaluationsLeft <= 0 {
			break
		}
		if g == search.rank || !p.ranks.fits(g, c.tokens) {
			continue
		}
		added := p.candidates.loadOn(l, p.placed[a].candidate, g)
		const nothingAdded, noGain = 0, 0 // no load comes to the present rank, and the same candidates stay placed
		if !p.evaluateChange(p.smoothedPeakAfter(nothingAdded, g, added), noGain) {
			continue
		}
		p.relocate(a, g)
		changed = true
		p.liftPlacement(a)
	}
	return changed
}

// relocate moves placement a to a free slot of rank g, and updates loads, slots and room. p.liftPlacement(a) must have been called before.
func (p *evenkeel) relocate(a, g int) {
	c := &p.candidates.all[p.placed[a].candidate]
	p.loads.changeLoad(p.search.rank, -p.search.ownLoad)
	p.loads.changeLoad(g, p.candidates.loadOn(&p.loads, p.placed[a].candidate, g))
	p.ranks.uncharge(p.search.rank, c.tokens)
	p.ranks.charge(g, c.tokens)
	p.placed[a].rank = int32(g)
}

// changeRoom updates the KV room of rank g when an entry of `in` tokens replaces an entry of `out` tokens. Unlimited room stays unlimited.
func (r *ranks) changeRoom(g int, out, in int64) {
	if r.room[g] != subset.Unlimited {
		r.room[g] += out - in
	}
}

// uncharge frees the slot and the KV room of an entry on rank g.
func (r *ranks) uncharge(g int, tokens int64) {
	r.free[g]++
	r.openSlots++
	r.changeRoom(g, tokens, 0)
}
