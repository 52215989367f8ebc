package policy

import (
	"math"
	"slices"
)

// rows is the memory of rounds in which the rank with most requests makes a step longer, whatever its KV. Such a step depends on two
// ranks, which may differ: the rank with the largest load and the rank with most requests.
type rows struct {
	requests []int32 // requests of each rank
	closed   []int32 // slots of each rank that are closed for now
}

// arrangements is how many searches share the evaluations of a round: one without a limit of requests, two with a limit, and the best
// of these once more.
const arrangements = 4

// arrangement is the result of one search.
type arrangement struct {
	placed, late int     // entries that were placed, and the overdue ones among them
	load         float64 // length of a step by the largest load and the most requests, in KV tokens
}

// arrange places the entries of the round and improves the placements. If RowTokens is set, it also tries two limits of the requests on a
// rank. It takes the result with the shortest step that places no fewer entries, and no fewer overdue ones.
func arrange(p *evenkeel, s *Snapshot) {
	budget := p.budget(s)
	if s.RowTokens <= 0 || !p.set.requests {
		placeAndImprove(p, s, budget)
		p.fillUp(s)
		return
	}
	budget = max(1, budget/arrangements)
	placeAndImprove(p, s, budget)
	p.fillUp(s)
	best, bestLimit, lastLimit := resultOf(p, s), int32(0), int32(0)
	for _, limit := range limitsOfRows(p, s) {
		if limit == lastLimit {
			continue
		}
		lastLimit = limit
		withLimit(p, s, limit, budget)
		if a := resultOf(p, s); a.placed >= best.placed && a.late >= best.late && a.load < best.load {
			best, bestLimit = a, limit
		}
	}
	if bestLimit != lastLimit {
		withLimit(p, s, bestLimit, budget)
	}
}

// placeAndImprove makes the first placements of the round, and improves them with so many evaluations.
func placeAndImprove(p *evenkeel, s *Snapshot, budget int) {
	p.place(s)
	p.improve(budget)
}

// withLimit begins the round anew, with at most limit requests on a rank, if the rank does not run more already; 0: no limit. Entries
// that find no place under the limit may then be placed beyond it.
func withLimit(p *evenkeel, s *Snapshot, limit int32, budget int) {
	p.placed = p.placed[:0]
	p.loads.build(s, p.loads.requestWeight)
	p.ranks.load(s, p.loads.held, p.set.watermark, 0)
	wanted := int(min(p.ranks.openSlots, int64(len(s.Pool))))
	p.rows.closed = sized(p.rows.closed, len(s.Workers))
	clear(p.rows.closed)
	if limit > 0 {
		for g := range s.Workers {
			over := int32(len(s.Workers[g].Running)) + p.ranks.free[g] - limit
			p.rows.closed[g] = max(0, min(over, p.ranks.free[g]))
			p.ranks.free[g] -= p.rows.closed[g]
			p.ranks.openSlots -= int64(p.rows.closed[g])
		}
	}
	placeAndImprove(p, s, budget)
	for g, n := range p.rows.closed {
		if g != p.ranks.reserved {
			p.ranks.free[g] += n
			p.ranks.openSlots += int64(n)
		}
	}
	p.wanted = wanted
	p.fillUp(s)
}

// limitsOfRows returns the two limits of requests on a rank that arrange tries: the number that makes all ranks equal or, if a rank runs
// more, that rank's number; and the middle between that and the most requests in the placements without a limit.
func limitsOfRows(p *evenkeel, s *Snapshot) [2]int32 {
	sum, most := 0, 0
	for g := range s.Workers {
		n := len(s.Workers[g].Running)
		sum, most = sum+n, max(most, n)
	}
	sum += len(p.placed)
	level := max(most, (sum+len(s.Workers)-1)/len(s.Workers))
	mostWithPlaced := most
	for _, n := range requestsByRank(p, s) {
		mostWithPlaced = max(mostWithPlaced, int(n))
	}
	return [2]int32{int32(level), int32((level + mostWithPlaced) / 2)}
}

// requestsByRank returns the number of requests on each rank, with those that are placed in this round.
func requestsByRank(p *evenkeel, s *Snapshot) []int32 {
	p.rows.requests = sized(p.rows.requests, len(s.Workers))
	for g := range s.Workers {
		p.rows.requests[g] = int32(len(s.Workers[g].Running))
	}
	for _, a := range p.placed {
		p.rows.requests[a.rank]++
	}
	return p.rows.requests
}

// resultOf returns how good the present placements are.
func resultOf(p *evenkeel, s *Snapshot) (a arrangement) {
	a.placed = len(p.placed)
	for _, placement := range p.placed {
		if p.candidates.all[placement.candidate].overdue {
			a.late++
		}
	}
	peak := math.Ldexp(float64(p.loads.peak()), -fixedBits)
	a.load = peak + float64(s.RowTokens)*float64(slices.Max(requestsByRank(p, s)))
	return a
}
