package policy

import (
	"math"
	"slices"
)

// rows is the scratch of rounds in which the rank with most requests makes a step longer whatever its KV: two maxima, of ranks that
// may differ.
type rows struct{ of []int32 } // requests of each rank

// arrange places the entries of the round and improves that. Where requests count for themselves it also tries to keep ranks from more
// requests than others have, and takes what makes the step shortest.
func arrange(p *evenkeel, s *Snapshot) {
	spread(p, s)
	if s.RowTokens <= 0 || !p.set.requests {
		return
	}
	best, placed, at, last := predicted(p, s), len(p.placed), int32(0), int32(0)
	for _, last = range limitsOfRows(p, s) {
		limitRows(p, s, last)
		spread(p, s)
		if load := predicted(p, s); len(p.placed) >= placed && load < best {
			best, at = load, last
		}
	}
	if at != last {
		limitRows(p, s, at)
		spread(p, s)
	}
}

func spread(p *evenkeel, s *Snapshot) {
	p.place(s)
	p.improve(p.budget(s))
}

// limitRows begins the round anew, with no more than so many requests on a rank that has not more already; 0: as many as there are slots.
func limitRows(p *evenkeel, s *Snapshot, most int32) {
	p.placed = p.placed[:0]
	p.loads.build(s, p.loads.request)
	p.ranks.load(s, p.loads.held, p.set.watermark, 0)
	if most == 0 {
		return
	}
	for g := range s.Workers {
		over := int32(len(s.Workers[g].Running)) + p.ranks.free[g] - most
		if less := min(over, p.ranks.free[g]); less > 0 {
			p.ranks.free[g] -= less
			p.ranks.open -= int64(less)
		}
	}
}

// limitsOfRows are the numbers of requests that are tried: as if all ranks had as many, and the middle between that and what came out.
func limitsOfRows(p *evenkeel, s *Snapshot) [2]int32 {
	sum, most := 0, 0
	for g := range s.Workers {
		n := len(s.Workers[g].Running)
		sum, most = sum+n, max(most, n)
	}
	sum += len(p.placed)
	level := max(most, (sum+len(s.Workers)-1)/len(s.Workers))
	now := most
	for _, n := range counts(p, s) {
		now = max(now, int(n))
	}
	return [2]int32{int32(level), int32((level + now) / 2)}
}

// counts are the requests of each rank with those that are placed.
func counts(p *evenkeel, s *Snapshot) []int32 {
	p.rows.of = sized(p.rows.of, len(s.Workers))
	for g := range s.Workers {
		p.rows.of[g] = int32(len(s.Workers[g].Running))
	}
	for _, a := range p.placed {
		p.rows.of[a.rank]++
	}
	return p.rows.of
}

// predicted is what the loads and the rows make of a step, in KV tokens.
func predicted(p *evenkeel, s *Snapshot) float64 {
	peak := math.Ldexp(float64(p.loads.peak()), -fixedBits)
	return peak + float64(s.RowTokens)*float64(slices.Max(counts(p, s)))
}
