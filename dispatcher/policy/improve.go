package policy

import "evenkeel/dispatcher/subset"

// search is the memory of the search for better placements. fillSearch fills in the fields from
// ownRank on, for the placement that is about to be changed.
type search struct {
	evaluationsLeft int // changes that may still be tried; lowersCost takes one off
	ownRank         int
	ownLoad         int64 // load that the placement adds to ownRank
	loadWithout     int64 // load of ownRank without the placement
	otherRanks      otherLoads
}

// minImprovement is the least fall of the cost for which a change is made, in units of 2^-fixedBits
// KV tokens: 2e-6 KV tokens.
const minImprovement = 2

// improve changes placements as long as this lowers the cost and the budget of evaluations lasts.
// In the cost, the smoothed peak stands for the largest load, so that changes of the ranks below
// the fullest count, too.
func (p *evenkeel) improve(budget int) {
	p.search.evaluationsLeft = budget
	p.loads.startSmoothing(p.set.kappa)
	unchanged := 0 // placements in a row that could not be improved
	for a := 0; unchanged < len(p.placed) && p.search.evaluationsLeft > 0; a++ {
		if a == len(p.placed) { // changes may have made others worthwhile
			a = 0
		}
		unchanged++
		if int(p.placed[a].rank) == p.ranks.reserved {
			continue // the reserved rank is kept free for an overdue entry
		}
		p.fillSearch(a) // each of the tries fills it again when it has changed placement a
		replaced, swapped, moved := p.tryReplacements(a), p.trySwaps(a), p.tryMoves(a)
		if replaced || swapped || moved {
			unchanged = 0
		}
	}
}

func (p *evenkeel) fillSearch(a int) {
	search := &p.search
	search.ownRank = int(p.placed[a].rank)
	search.ownLoad = p.candidates.loadOn(&p.loads, p.placed[a].candidate, search.ownRank)
	search.loadWithout = p.loads.load[search.ownRank] - search.ownLoad
	search.otherRanks = p.loads.without(search.ownRank)
}

// lowersCost spends one evaluation. The cost is the number of ranks times the smoothed peak, less
// the loads and wait credits of all placed candidates; gain is the rise of the sum of these.
func (p *evenkeel) lowersCost(peakAfter, gain int64) (worthwhile bool) {
	p.search.evaluationsLeft--
	rankCount, rise := int64(len(p.loads.load)), peakAfter-p.loads.presentSmoothedPeak()
	costChange := rankCount*rise - gain
	return costChange <= -minImprovement
}

// tryReplacements tries each unplaced candidate (a rival) in place of that of placement a. An
// overdue candidate is never replaced. p.search must be filled for placement a, and is filled again
// after each exchange.
func (p *evenkeel) tryReplacements(a int) (changed bool) {
	l, search := &p.loads, &p.search
	present := &p.candidates.all[p.placed[a].candidate]
	if present.overdue {
		return false
	}
	for i := 0; i < len(p.unplaced) && search.evaluationsLeft > 0; i++ {
		rival := &p.candidates.all[p.unplaced[i]]
		if rival.tokens-present.tokens > p.ranks.room[search.ownRank] {
			continue
		}
		gain := rival.load + rival.waitCredit - present.load - present.waitCredit
		rivalLoad := p.candidates.loadOn(l, p.unplaced[i], search.ownRank)
		peakAfter := smoothedPeakWithOwn(p, search.loadWithout+rivalLoad)
		if !p.lowersCost(peakAfter, gain) {
			continue
		}
		replaceCandidate(p, a, i)
		present = rival
		changed = true
		p.fillSearch(a)
	}
	return changed
}

// replaceCandidate exchanges the candidate of placement a with the i-th unplaced one. p.search must
// be filled for a.
func replaceCandidate(p *evenkeel, a, i int) {
	l, g := &p.loads, p.search.ownRank
	indexOut, indexIn := p.placed[a].candidate, p.unplaced[i]
	out, in := &p.candidates.all[indexOut], &p.candidates.all[indexIn]
	l.changeLoad(g, p.candidates.loadOn(l, indexIn, g)-p.search.ownLoad)
	p.ranks.changeRoom(g, out.tokens, in.tokens)
	out.placed, in.placed = false, true
	p.placed[a].candidate, p.unplaced[i] = indexIn, indexOut
}

// smoothedPeakWithOwn returns the smoothed peak if the load of p.search.ownRank changes to ownLoad.
func smoothedPeakWithOwn(p *evenkeel, ownLoad int64) int64 {
	l, search := &p.loads, &p.search
	powerMeanTerm := l.smoothed.powerMeanTerm + l.smoothed.powerMeanRise(l.load[search.ownRank], ownLoad)
	return l.smoothed.value(max(search.otherRanks.largest, ownLoad), powerMeanTerm)
}

// smoothedPeakAfter returns the smoothed peak after changes of the load of p.search.ownRank and
// that of rank b.
func (p *evenkeel) smoothedPeakAfter(ownChange int64, b int, changeB int64) int64 {
	l, search := &p.loads, &p.search
	ownLoad, loadB := l.load[search.ownRank]+ownChange, l.load[b]+changeB
	largest := max(search.otherRanks.largestWithout(b), ownLoad, loadB)
	ownRise, riseB := l.smoothed.powerMeanRise(l.load[search.ownRank], ownLoad), l.smoothed.powerMeanRise(l.load[b], loadB)
	return l.smoothed.value(largest, l.smoothed.powerMeanTerm+ownRise+riseB)
}

// trySwaps tries to exchange the candidate of placement a with that of each later placement on
// another rank. p.search must be filled for placement a, and is filled again after each exchange.
// This is a hot loop, so it repeats the formula of swapChanges instead of calling it.
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
		changeA := p.candidates.loadOn(l, indexB, search.ownRank) - search.ownLoad
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

// swapChanges returns by how much the loads change if two placements exchange their candidates.
// p.search must be filled for placement a.
func swapChanges(p *evenkeel, indexA, indexB int32, rankB int) (changeA, changeB int64) {
	l, k := &p.loads, &p.candidates
	changeA = k.loadOn(l, indexB, p.search.ownRank) - p.search.ownLoad
	changeB = k.loadOn(l, indexA, rankB) - k.loadOn(l, indexB, rankB)
	return changeA, changeB
}

// exchange swaps the candidates of placements a and b. p.search must be filled for a.
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

// tryMoves tries to move placement a to a free slot of each other rank. p.search must be filled for
// a, and is filled again after each move.
func (p *evenkeel) tryMoves(a int) (changed bool) {
	l, search := &p.loads, &p.search
	if p.ranks.openSlots == 0 {
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

// relocate moves placement a to a free slot of rank g. p.search must be filled for a.
func (p *evenkeel) relocate(a, g int) {
	c := &p.candidates.all[p.placed[a].candidate]
	p.loads.changeLoad(p.search.ownRank, -p.search.ownLoad)
	p.loads.changeLoad(g, p.candidates.loadOn(&p.loads, p.placed[a].candidate, g))
	p.ranks.uncharge(p.search.ownRank, c.tokens)
	p.ranks.charge(g, c.tokens)
	p.placed[a].rank = int32(g)
}

// changeRoom leaves unlimited room unlimited.
func (r *ranks) changeRoom(g int, out, in int64) {
	if r.room[g] != subset.Unlimited {
		r.room[g] += out - in
	}
}

func (r *ranks) uncharge(g int, tokens int64) {
	r.free[g]++
	r.openSlots++
	const noneIn = 0
	r.changeRoom(g, tokens, noneIn)
}
