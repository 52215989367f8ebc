package policy

// pair is by how much the cost changes if one candidate is placed on one rank. It is kept while
// other candidates are placed, and may then be out of date.
type pair struct {
	change         int64
	computedAtRise int64 // rise of the peak, since bestPair began, when change was computed; notComputed: change is not valid
}

const notComputed = -1

// bestPair takes the candidate and the rank that change the cost least, again and again. In a tie,
// it takes the rank with the smallest load: a rank that is filled while others are empty would soon
// become the fullest.
func (p *evenkeel) bestPair(from, to int) {
	ranks := len(p.loads.load)
	pairs := sized(p.start.pairs, (to-from)*ranks) // the pairs of the first candidate with each rank, then those of the next
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].computedAtRise = notComputed
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
		if candidate == none {
			return
		}
		before := p.loads.peak()
		p.placeOn(int32(candidate), rank)
		peakRise += p.loads.peak() - before
		// The load of this rank has changed. For all other pairs, only the peak may have changed, and
		// pair.leastNow tells how low they can be now.
		for i := rank; i < len(pairs); i += ranks {
			pairs[i].computedAtRise = notComputed
		}
	}
}

// bestRank returns the rank on which a candidate changes the cost least, or none. It computes a
// pair anew, except if its change cannot have become the least (leastNow).
func (p *evenkeel) bestRank(candidate int32, pairs []pair, peakRise int64) (best int, least int64) {
	l := &p.loads
	tokens, rankCount := p.candidates.all[candidate].tokens, int64(len(l.load))
	best = none
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if !p.ranks.fits(g, tokens) {
			continue
		}
		known := &pairs[g]
		if known.computedAtRise != peakRise {
			if known.computedAtRise != notComputed && best != none && known.leastNow(rankCount, peakRise) > least {
				continue
			}
			*known = pair{change: costChangeOf(p, candidate, g), computedAtRise: peakRise}
		}
		if best == none || known.change < least || known.change == least && l.load[g] < l.load[best] {
			best, least = g, known.change
		}
	}
	return best, least
}

// leastNow returns the least value that the change can have now. If the peak has risen by x without
// the placement, the placement causes a rise that is smaller by at most x.
func (k *pair) leastNow(rankCount, peakRise int64) int64 {
	return k.change - rankCount*(peakRise-k.computedAtRise)
}

// costChangeOf returns by how much the cost changes if a candidate is placed on rank g now. The
// peak follows from its load on this rank, scaled by the rank's cost. The load that is subtracted
// is that on a rank of cost 1, so that no rank gains by being slow.
func costChangeOf(p *evenkeel, candidate int32, g int) int64 {
	l, c := &p.loads, &p.candidates.all[candidate]
	peakWith := max(l.peak(), l.load[g]+p.candidates.loadOn(l, candidate, g))
	return int64(len(l.load))*(peakWith-l.peak()) - c.load - c.waitCredit
}
