package policy

import "slices"

// rows is the memory of rounds in which each request of the rank with most requests makes a step
// longer (Snapshot.RowTokens). The length of a step then depends on the rank with the largest load
// and on the rank with most requests.
type rows struct {
	requests    []int32 // number of requests, by rank
	closedSlots []int32 // by rank: free slots beyond the limit of requests per rank
}

// searchCount is how many searches share the evaluations of a round: one without a limit of
// requests per rank, two with a limit, and a repeat of the best.
const searchCount = 4

const noRequestLimit = 0 // as a limit of requests per rank: none

type searchResult struct {
	placed        int     // number of entries that were placed
	overduePlaced int     // overdue entries among them
	stepTokens    float64 // step length in KV tokens: the largest load, plus RowTokens per request of the rank with most requests
}

// arrange places the entries of the round by a search. With RowTokens, fewer requests on the rank
// with most requests make steps shorter, so it also searches with limits of requests per rank.
func arrange(p *evenkeel, s *Snapshot) {
	budget := p.budget(s)
	limitsMayHelp := s.RowTokens > 0 && p.set.countRequests
	if limitsMayHelp {
		budget = max(1, budget/searchCount)
	}
	placeAndImprove(p, s, budget)
	p.fillUp(s)
	if limitsMayHelp {
		tryRequestLimits(p, s, budget)
	}
}

// tryRequestLimits keeps the placements that make the step shortest, with a limit or without one. A
// result with a limit counts only if it places no fewer entries, and no fewer overdue entries. Each
// search drops the placements of the one before, so the search that made the best ones may have to
// be repeated.
func tryRequestLimits(p *evenkeel, s *Snapshot, budget int) {
	best, bestLimit := resultOf(p, s), int32(noRequestLimit)
	presentLimit := bestLimit // limit of the present placements
	for _, limit := range requestLimits(p, s) {
		if limit == presentLimit {
			continue
		}
		arrangeWithLimit(p, s, limit, budget)
		presentLimit = limit
		result := resultOf(p, s)
		placesNoFewer := result.placed >= best.placed && result.overduePlaced >= best.overduePlaced
		if placesNoFewer && result.stepTokens < best.stepTokens {
			best, bestLimit = result, limit
		}
	}
	if presentLimit != bestLimit {
		arrangeWithLimit(p, s, bestLimit, budget) // makes the best placements again
	}
}

func placeAndImprove(p *evenkeel, s *Snapshot, budget int) {
	p.place(s)
	p.improve(budget)
}

// arrangeWithLimit begins the round anew, and searches with at most limit requests on each rank.
// The slots beyond the limit are opened again after the search, and filled while entries fit, so
// that the limit keeps no slot free.
func arrangeWithLimit(p *evenkeel, s *Snapshot, limit int32, budget int) {
	p.placed = p.placed[:0]
	p.loads.build(s, p.loads.requestWeight)
	p.ranks.load(s, p.loads.heldTokens, p.set.watermark, noExtraSlots)
	wantedWithAllSlots := p.placeable(s) // before any slot is closed
	closeSlotsBeyond(p, s, limit)
	placeAndImprove(p, s, budget)
	reopenSlots(p)
	p.wanted = wantedWithAllSlots // place has set p.wanted without the slots that were closed
	p.fillUp(s)
}

func closeSlotsBeyond(p *evenkeel, s *Snapshot, limit int32) {
	p.rows.closedSlots = sized(p.rows.closedSlots, len(s.Workers))
	clear(p.rows.closedSlots)
	if limit == noRequestLimit {
		return
	}
	for g := range s.Workers {
		beyondLimit := int32(len(s.Workers[g].Running)) + p.ranks.free[g] - limit
		p.rows.closedSlots[g] = max(0, min(beyondLimit, p.ranks.free[g]))
		p.ranks.free[g] -= p.rows.closedSlots[g]
		p.ranks.openSlots -= int64(p.rows.closedSlots[g])
	}
}

// reopenSlots leaves out the reserved rank, which gets no more entries in this round.
func reopenSlots(p *evenkeel) {
	for g, closed := range p.rows.closedSlots {
		if g != p.ranks.reserved {
			p.ranks.free[g] += closed
			p.ranks.openSlots += int64(closed)
		}
	}
}

// requestLimits returns the limits to try. The first makes the largest number of requests on a rank
// as small as it can be. Such a strict limit may leave the loads far from level, so the second is
// halfway between the first and the largest number without a limit.
func requestLimits(p *evenkeel, s *Snapshot) [2]int32 {
	sum, most := 0, 0
	for g := range s.Workers {
		running := len(s.Workers[g].Running)
		sum, most = sum+running, max(most, running)
	}
	sum += len(p.placed)
	// The mean, rounded up, but at least what the rank with most requests already runs.
	level := max(most, (sum+len(s.Workers)-1)/len(s.Workers))
	mostWithPlaced := most
	for _, requests := range requestsByRank(p, s) {
		mostWithPlaced = max(mostWithPlaced, int(requests))
	}
	return [2]int32{int32(level), int32((level + mostWithPlaced) / 2)}
}

// requestsByRank includes the requests placed in this round.
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

func resultOf(p *evenkeel, s *Snapshot) (result searchResult) {
	result.placed = len(p.placed)
	for _, placement := range p.placed {
		if p.candidates.all[placement.candidate].overdue {
			result.overduePlaced++
		}
	}
	mostRequests := slices.Max(requestsByRank(p, s))
	result.stepTokens = inTokens(p.loads.peak()) + float64(s.RowTokens)*float64(mostRequests)
	return result
}
