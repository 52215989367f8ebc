package policy

import "slices"

// rows is the memory of rounds in which each request of the rank with most requests makes a step longer (Snapshot.RowTokens). The length of
// such a step depends on two ranks, which may differ: the rank with the largest load and the rank with most requests. In a step, a decoding
// request is one row of the matrices that the engine multiplies.
type rows struct {
	requests    []int32 // by rank: number of its requests
	closedSlots []int32 // by rank: free slots that may not be used, because the search limits the requests per rank
}

// searchCount is how many searches share the evaluations of a round: one without a limit of requests per rank, two with a limit, and a
// repeat of the best of these three.
const searchCount = 4

const noRequestLimit = 0 // as a limit of requests per rank: a rank may get as many as it has slots

// searchResult says how good the placements of one search are.
type searchResult struct {
	placed        int     // number of entries that were placed
	overduePlaced int     // overdue entries that were placed; placed counts them, too
	stepTokens    float64 // step length in KV tokens: the largest load, plus RowTokens per request of the rank with most requests
}

// arrange places the entries of the round, and improves the placements by a search. Entries for which the search has made room fill the
// slots that are left (fillUp). RowTokens is the cost, in KV tokens, of one more request on the rank with most requests. If it is set,
// fewer requests on this rank make steps shorter, so arrange also searches with limits of requests per rank.
func arrange(p *evenkeel, s *Snapshot) {
	budget := p.budget(s)
	limitsMayHelp := s.RowTokens > 0 && p.set.countRequests // otherwise the largest number of requests costs nothing or is not to count
	if limitsMayHelp {
		budget = max(1, budget/searchCount) // up to searchCount searches share the evaluations of the round
	}
	placeAndImprove(p, s, budget)
	p.fillUp(s)
	if limitsMayHelp {
		tryRequestLimits(p, s, budget)
	}
}

// tryRequestLimits searches with two limits of requests per rank, and keeps the placements that make the step shortest (stepTokens): those
// of a limit, or those that arrange has made without one. A result with a limit counts only if it places no fewer entries, and no fewer
// overdue entries, than the best result so far. Each search drops the placements of the one before. So if the best are not those of the
// last search, tryRequestLimits repeats the search that made them.
func tryRequestLimits(p *evenkeel, s *Snapshot, budget int) {
	best, bestLimit := resultOf(p, s), int32(noRequestLimit)
	presentLimit := bestLimit // limit under which the present placements were made
	for _, limit := range requestLimits(p, s) {
		if limit == presentLimit {
			continue // the present placements were made under this limit already
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

// placeAndImprove makes the first placements of the round, and improves them with at most budget evaluations.
func placeAndImprove(p *evenkeel, s *Snapshot, budget int) {
	p.place(s)
	p.improve(budget)
}

// arrangeWithLimit begins the round anew, and searches with at most limit requests on each rank, or noRequestLimit. A rank that already
// runs more gets no entry under the limit. The search may try budget changes of placements. During the search, the slots beyond the limit
// are closed. They are opened again after it, and filled while entries fit, so that the limit keeps no slot free.
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

// closeSlotsBeyond closes the free slots that would take a rank beyond limit requests, until reopenSlots opens them again. With
// noRequestLimit, it closes none.
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

// reopenSlots opens the slots again that closeSlotsBeyond has closed, except those of the reserved rank, which gets no more entries in this
// round.
func reopenSlots(p *evenkeel) {
	for g, closed := range p.rows.closedSlots {
		if g != p.ranks.reserved {
			p.ranks.free[g] += closed
			p.ranks.openSlots += int64(closed)
		}
	}
}

// requestLimits returns the two limits of requests per rank that tryRequestLimits tries. The first makes the largest number of requests on
// a rank as small as it can be: it gives all ranks equally many requests or, if a rank already runs more, is the number of that rank. Such
// a strict limit may leave the loads far from level. So the second limit is halfway between the first and the largest number of requests on
// a rank when entries are placed without a limit.
func requestLimits(p *evenkeel, s *Snapshot) [2]int32 {
	sum, most := 0, 0
	for g := range s.Workers {
		running := len(s.Workers[g].Running)
		sum, most = sum+running, max(most, running)
	}
	sum += len(p.placed)
	// level is the mean number of requests per rank, rounded up, but at least the number that the rank with most requests already runs.
	level := max(most, (sum+len(s.Workers)-1)/len(s.Workers))
	mostWithPlaced := most
	for _, requests := range requestsByRank(p, s) {
		mostWithPlaced = max(mostWithPlaced, int(requests))
	}
	return [2]int32{int32(level), int32((level + mostWithPlaced) / 2)}
}

// requestsByRank returns the number of requests on each rank, including those placed in this round.
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

// resultOf rates the present placements: how many entries they place, and how long they make a step. A step waits for the largest load.
// Beyond that, each request of the rank with most requests costs RowTokens KV tokens, because some engines pad the batches of all ranks to
// the largest batch.
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
