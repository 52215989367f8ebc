package policy

// pair is what one candidate on one rank changes the cost by, as of when the
// envelope had risen so much.
type pair struct {
	change int64
	rise   int64 // never before: not known
}

const never = -1

// bestPair places, one after the other, the candidate of [from, to) on the rank where the
// cost changes least. An entry's ties go to the rank that holds least: a rank that is filled
// while others are empty grows into the next fullest one.
func (p *evenkeel) bestPair(_ *Snapshot, from, to int, _ bool) {
	ranks := len(p.loads.x)
	pairs := sized(p.start.pairs, (to-from)*ranks)
	p.start.pairs = pairs
	for i := range pairs {
		pairs[i].rise = never
	}
	var rise int64 // of the peak since the start
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

// bestRank finds where a candidate changes the cost least. A pair is computed
// anew only where it could matter: the envelope's rise since it was is the most
// that it can have fallen by.
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
