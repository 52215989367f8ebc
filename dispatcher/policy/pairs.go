package policy

// pair is by how much one candidate on one rank changes the cost. It was computed when the
// peak had risen by rise.
type pair struct {
	change   int64
	peakRise int64 // rise of the peak since the start; never: the change is not computed
}

const never = -1

// bestPair places the candidates of [from, to), each time the candidate and the rank by which the
// cost changes least. In a tie, a candidate goes to the rank with the smallest load, because a rank that is filled
// while others are empty will grow to be the next fullest.
func (p *evenkeel) bestPair(_ *Snapshot, from, to int, _ bool) {
	ranks := len(p.loads.load)
	pairs := sized(p.start.pairs, (to-from)*ranks)
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].peakRise = never
	}
	var peakRise int64 // rise of the peak since the start
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
		p.add(int32(who), rank)
		peakRise += p.loads.peak() - before
		for at := rank; at < len(pairs); at += ranks {
			pairs[at].peakRise = never
		}
	}
}

// bestRank returns the rank on which candidate who (an index) changes the cost least, and that change. pairs has the pair of the
// candidate with each rank, and peakRise is the rise of the peak since the start. A pair is computed anew only if it could be the best:
// since it was computed, the change can have fallen by at most the rise of the peak times the number of ranks.
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
			if leastChange := known.change - rankCount*(peakRise-known.peakRise); known.peakRise != never &&
				best != none && leastChange > least {
				continue
			}
			known.change = rankCount*(max(l.peak(), l.load[g]+p.candidates.loadOn(l, who, g))-l.peak()) - c.load - c.age
			known.peakRise = peakRise
		}
		if best == none || known.change < least || known.change == least && l.load[g] < l.load[best] {
			best, least = g, known.change
		}
	}
	return best, least
}
