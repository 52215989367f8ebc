package policy

// pair says by how much it changes the cost to place one candidate on one rank.
type pair struct {
	change   int64
	peakRise int64 // rise of the largest load since bestPair began, when change was computed; notComputed: change has no value yet
}

const notComputed = -1

// bestPair places the candidates with the indices from `from` to `to`-1. Each time, it takes the candidate and the rank that change the
// cost least. In a tie, it takes the rank with the smallest load: a rank that is filled while others are empty would soon grow to be the
// fullest. It has the signature of workerFirst and longestFirst, because place calls one of the three.
func (p *evenkeel) bestPair(_ *Snapshot, from, to int, _ bool) {
	ranks := len(p.loads.load)
	pairs := sized(p.start.pairs, (to-from)*ranks)
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].peakRise = notComputed
	}
	var peakRise int64 // rise of the largest load since bestPair began
	for len(p.placed) < p.wanted {
		who, rank, least := none, none, int64(0)
		for i := from; i < to; i++ {
			if p.candidates.all[i].placed {
				continue
			}
			g, change := p.bestRank(int32(i), pairs[(i-from)*ranks:][:ranks], peakRise)
			if g != none && (who == none || change < least) {
				who, rank, least = i, g, change
			}
		}
		if who == none {
			return
		}
		before := p.loads.peak()
		p.placeOn(int32(who), rank)
		peakRise += p.loads.peak() - before
		for i := rank; i < len(pairs); i += ranks { // all pairs with this rank
			pairs[i].peakRise = notComputed
		}
	}
}

// bestRank returns the rank on which a candidate (who is its index) changes the cost least, and this change. pairs has the pair of the
// candidate with each rank, and peakRise is the rise of the largest load (the peak) since bestPair began. A pair is computed anew only if
// it could be the best: since it was computed, its change can have fallen by at most the rise of the peak times the number of ranks.
func (p *evenkeel) bestRank(who int32, pairs []pair, peakRise int64) (best int, least int64) {
	l := &p.loads
	c, rankCount := &p.candidates.all[who], int64(len(l.load))
	best = none
	for _, rank := range p.ranks.withSlots {
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
			known.change = rankCount*(max(l.peak(), l.load[g]+p.candidates.loadOn(l, who, g))-l.peak()) - c.load - c.waitCredit
			known.peakRise = peakRise
		}
		if best == none || known.change < least || known.change == least && l.load[g] < l.load[best] {
			best, least = g, known.change
		}
	}
	return best, least
}
