package policy

// pair is by how much one candidate on one rank changes the cost. It was computed when the
// peak had risen by rise.
type pair struct {
	change int64
	rise   int64 // rise of the peak since the start; never: the change is not computed
}

const never = -1

// bestPair places the candidates of [from, to), each time the candidate and the rank by which the
// cost changes least. In a tie, a candidate goes to the rank with the smallest load, because a rank that is filled
// while others are empty will grow to be the next fullest.
func (p *evenkeel) bestPair(_ *Snapshot, from, to int, _ bool) {
	ranks := len(p.loads.x)
	pairs := sized(p.start.pairs, (to-from)*ranks)
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].rise = never
	}
	var rise int64 // rise of the peak since the start
	for len(p.placed) < p.wanted {
		who, rank, least := none, none, int64(0)
		for i := from; i < to; i++ {
			if p.pick.all[i].placed {
				continue
			}
			g, change := p.bestRank(int32(i), pairs[(i-from)*ranks:][:ranks], rise)
			if g != none && (who == none || change < least) {
				who, rank, least = i, g, change
			}
		}
		if who == none {
			return
		}
		before := p.loads.peak()
		p.add(int32(who), rank)
		rise += p.loads.peak() - before
		for at := rank; at < len(pairs); at += ranks {
			pairs[at].rise = never
		}
	}
}

// bestRank finds the rank on which a candidate changes the cost least. It computes a pair
// anew only if that could be the best: since it was computed, the change can have fallen by at most the rise
// of the peak times the number of ranks.
func (p *evenkeel) bestRank(who int32, pairs []pair, rise int64) (best int, least int64) {
	l := &p.loads
	c, group := &p.pick.all[who], int64(len(l.x))
	best = none
	for _, rank := range p.ranks.some {
		g := int(rank)
		if !p.ranks.fits(g, c.tokens) {
			continue
		}
		x := &pairs[g]
		if x.rise != rise {
			if bound := x.change - group*(rise-x.rise); x.rise != never && best != none && bound > least {
				continue
			}
			x.change = group*(max(l.peak(), l.x[g]+p.pick.on(l, who, g))-l.peak()) - c.load - c.age
			x.rise = rise
		}
		if best == none || x.change < least || x.change == least && l.x[g] < l.x[best] {
			best, least = g, x.change
		}
	}
	return best, least
}
