package policy

// pair is by how much the cost changes if one candidate is placed on one rank. The cost is the number of ranks times the largest load, less
// the loads and the wait credits of the placed candidates.
type pair struct {
	change   int64
	peakRise int64 // rise of the largest load, from when bestPair began until change was computed; notComputed: change is not valid
}

const notComputed = -1 // stands for a value that must be computed before it is used

// bestPair places the candidates with the indices from `from` to `to`-1. Again and again, it takes the candidate and the rank that change
// the cost least. In a tie, it takes the rank with the smallest load: a rank that is filled while others are empty would soon become the
// fullest. pairs keeps the changes of the cost that were computed, so that bestRank computes only a few anew.
func (p *evenkeel) bestPair(from, to int) {
	ranks := len(p.loads.load)
	pairs := sized(p.start.pairs, (to-from)*ranks) // the pairs of the first candidate with each rank, then those of the next candidate
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].peakRise = notComputed
	}
	var peakRise int64 // rise of the largest load since this call began
	for len(p.placed) < p.wanted {
		candidate, rank, least := none, none, int64(0)
		for i := from; i < to; i++ {
			if p.candidates.all[i].placed {
				continue
			}
			g, change := p.bestRank(int32(i), pairs[(i-from)*ranks:][:ranks], peakRise)
			if g != none && (candidate == none || change < least) {
				candidate, rank, least = i, g, change
			}
		}
		if candidate == none { // no candidate fits any rank
			return
		}
		before := p.loads.peak()
		p.placeOn(int32(candidate), rank)
		peakRise += p.loads.peak() - before
		// The load of this rank has changed, so its pairs with all candidates must be computed anew. For all other pairs, only the
		// largest load may have changed, and bestRank knows by its rise how far they can have fallen.
		for i := rank; i < len(pairs); i += ranks {
			pairs[i].peakRise = notComputed
		}
	}
}

// bestRank returns the rank on which a candidate changes the cost least, and this change; none: the candidate fits no rank. The cost is the
// number of ranks times the largest load (the peak), less the loads and the wait credits of the placed candidates. The peak follows from
// the loads that candidates have on their ranks (loadOn), which are scaled by the ranks' costs. The loads that are subtracted (c.load) are
// those on a rank of cost 1, so that no rank gains by being slow.
//
// candidate is an index in p.candidates.all, pairs has the pair of the candidate with each rank, and peakRise is the rise of the peak since
// bestPair began. A pair is computed anew only if it could be the best: since it was computed, its change can have fallen by at most the
// rise of the peak times the number of ranks.
func (p *evenkeel) bestRank(candidate int32, pairs []pair, peakRise int64) (best int, least int64) {
	l := &p.loads
	c, rankCount := &p.candidates.all[candidate], int64(len(l.load))
	best = none
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if !p.ranks.fits(g, c.tokens) {
			continue
		}
		known := &pairs[g]
		if known.peakRise != peakRise {
			leastChange := known.change - rankCount*(peakRise-known.peakRise)
			if known.peakRise != notComputed && best != none && leastChange > least {
				continue
			}
			peakWith := max(l.peak(), l.load[g]+p.candidates.loadOn(l, candidate, g))
			known.change = rankCount*(peakWith-l.peak()) - c.load - c.waitCredit
			known.peakRise = peakRise
		}
		if best == none || known.change < least || known.change == least && l.load[g] < l.load[best] {
			best, least = g, known.change
		}
	}
	return best, least
}
