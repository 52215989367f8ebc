package policy

import "evenkeel/dispatcher/subset"

// tight is the memory of rounds in which KV room, and not the number of slots, limits how many
// entries can be placed. All ranks will soon be full, and then the rank with most requests will be
// the slowest. By its present load, it would get the shortest prompts, and so even more requests.
// Therefore such rounds compare the loads that the ranks will have when their room is full.
type tight struct {
	fullLoad   []float64 // by rank: load when its room is full, in KV tokens scaled by its cost per token
	meanPrompt float64   // mean prompt tokens of an entry in the pool
}

// maxTightWork bounds the number of placed entries times the number of ranks, because
// placeForFullRanks looks at each rank for each entry.
const maxTightWork = 1 << 16

// roomIsScarce says whether the waiting entries would fill the KV room before they fill the slots.
// It is false if a rank's room is unlimited, or if placeForFullRanks would take too long
// (maxTightWork).
func (p *evenkeel) roomIsScarce(s *Snapshot) (meanPrompt float64, scarce bool) {
	room, slots, waitingTokens := 0.0, 0.0, 0.0
	for _, g := range p.ranks.hadSlots {
		if p.ranks.room[g] == subset.Unlimited {
			return 0, false
		}
		room += max(0, float64(p.ranks.room[g]))
		slots += float64(p.ranks.free[g])
	}
	for i := range s.Pool {
		waitingTokens += float64(s.Pool[i].Prompt)
	}
	meanPrompt = max(1, waitingTokens/float64(len(s.Pool)))
	placeableEntries := room / meanPrompt
	work := placeableEntries * float64(len(p.ranks.hadSlots))
	// The entries need at least all the room, and entries of mean length fill it before they fill the
	// slots.
	roomGoesFirst := room <= waitingTokens && room <= slots*meanPrompt
	return meanPrompt, roomGoesFirst && work <= maxTightWork
}

// placeForFullRanks places the overdue entries and then the oldest of the others, so that the loads
// of the full ranks stay level. What maxTightWork does not allow is left to the next round.
func (p *evenkeel) placeForFullRanks(s *Snapshot, meanPrompt float64) {
	const noAgeWeight, noStepMs = 0, 0 // waits do not count, because entries are taken in their order
	p.candidates.reset(s, p.loads.extraPerRequest, noAgeWeight, noStepMs)
	p.tight.meanPrompt = meanPrompt
	p.projectFullLoads(s)
	rankCount := len(p.ranks.hadSlots)
	maxPlaced := maxTightWork / rankCount
	placeOverdueForFullRanks(p, s, maxPlaced)
	room := p.ranks.largestRoom()
	for i := 0; i < len(s.Pool) && p.ranks.openSlots > 0 && len(p.placed) < maxPlaced; i++ {
		if int64(s.Pool[i].Prompt) <= room && !p.candidates.taken[i] {
			const isOverdue = false
			p.placeEvenly(s, i, isOverdue)
			room = p.ranks.largestRoom()
		}
	}
}

// placeOverdueForFullRanks places the overdue entries, the longest wait first, and reserves a rank
// for the first one that lacks room. An entry that lacks only a slot gets no reservation, because
// that would not help it.
func placeOverdueForFullRanks(p *evenkeel, s *Snapshot, maxPlaced int) {
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	room := p.ranks.largestRoom() // of the ranks with a free slot; no entry fits it if no slot is free
	roomAtFirst := room
	for _, w := range p.overdueEntries {
		tokens := int64(s.Pool[w.entry].Prompt)
		lacksOnlySlot := p.ranks.openSlots <= 0 && tokens <= roomAtFirst // it had room before other entries took all slots
		lacksRoom := tokens > room && !lacksOnlySlot
		switch {
		case tokens <= room && len(p.placed) < maxPlaced:
			const isOverdue = true
			p.placeEvenly(s, int(w.entry), isOverdue)
			room = p.ranks.largestRoom()
		case lacksRoom && p.ranks.reserved == none:
			p.ranks.reserveOnce(s, int(w.entry))
			room = p.ranks.largestRoom() // the reserved rank takes no other entries
		}
	}
}

// projectFullLoads computes the present load, plus the tokens that fill the room, plus
// extraPerRequest of each entry of mean length that fits in there.
func (p *evenkeel) projectFullLoads(s *Snapshot) {
	t := &p.tight
	t.fullLoad = sized(t.fullLoad, len(s.Workers))
	for _, g := range p.ranks.hadSlots {
		room := max(0, float64(p.ranks.room[g])) // below 0: the rank holds more than its budget
		extraPerToken := float64(p.loads.extraPerRequest) / t.meanPrompt
		presentLoad := inTokens(p.loads.load[g]) // scaled by the rank's cost already
		t.fullLoad[g] = presentLoad + room*(1+extraPerToken)*float64(p.loads.cost[g])
	}
}

// placeEvenly places an entry, which must fit some rank, where it makes the loads of the full ranks
// most equal.
func (p *evenkeel) placeEvenly(s *Snapshot, entry int, isOverdue bool) {
	tokens := int64(s.Pool[entry].Prompt)
	g := rankForEvenLoads(p, tokens)
	p.candidates.add(s, entry, isOverdue)
	p.placeOn(int32(len(p.candidates.all)-1), g)
	// For the room that the entry takes, projectFullLoads has counted extraPerRequest for
	// tokens/meanPrompt entries, but it is one entry.
	extraNotCounted := float64(p.loads.extraPerRequest) * (1 - float64(tokens)/p.tight.meanPrompt) // below 0 for a long entry
	p.tight.fullLoad[g] += extraNotCounted * float64(p.loads.cost[g])
}

// rankForEvenLoads returns the rank that makes the loads of the full ranks most equal, or none. The
// shorter the prompts on a full rank are, the more requests it holds, and the larger is its load.
// Therefore an entry that is not longer than the mean goes to the smallest load, and a longer one
// to the largest.
func rankForEvenLoads(p *evenkeel, tokens int64) (best int) {
	fullLoad, isShort := p.tight.fullLoad, float64(tokens) <= p.tight.meanPrompt
	best = none
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if !p.ranks.fits(g, tokens) {
			continue
		}
		load := fullLoad[g]
		isBetter := best == none || isShort && load < fullLoad[best] || !isShort && load > fullLoad[best]
		if isBetter {
			best = g
		}
	}
	return best
}
