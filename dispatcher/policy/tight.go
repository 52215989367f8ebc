package policy

import "evenkeel/dispatcher/subset"

// tight is the memory of rounds in which KV room, and not the number of slots, limits how many entries can be placed. All ranks will soon
// hold as much KV as they may, and then the rank with most requests will be the slowest. By its present load, this rank would get the
// shortest prompts, because these add least to its load, and so even more requests. Therefore such rounds compare the loads that the ranks
// will have when their room is full.
type tight struct {
	fullLoad   []float64 // by rank: load when its room is full, in KV tokens scaled by its cost per token
	meanPrompt float64   // mean prompt tokens of an entry in the pool
}

// maxTightWork bounds the work of a round in which room is short: the number of placed entries times the number of ranks, because
// placeForFullRanks looks at each rank for each entry.
const maxTightWork = 1 << 16

// roomIsScarce says whether the waiting entries would fill the KV room of the ranks before they fill the slots. It also returns false if a
// rank's room is unlimited, or if so many entries find room that placeForFullRanks would take too long (maxTightWork). meanPrompt is the
// mean prompt length of an entry, in tokens.
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
	// The entries need at least all the room, and entries of mean length fill it before they fill the slots.
	roomGoesFirst := room <= waitingTokens && room <= slots*meanPrompt
	return meanPrompt, roomGoesFirst && work <= maxTightWork
}

// placeForFullRanks places the overdue entries and then the oldest of the others, while they find room. It compares the loads that the
// ranks will have when their room is full (projectFullLoads), because then the rank with most requests will be the slowest, and keeps these
// loads level. It looks at each rank for each entry, so it places at most maxTightWork entries divided by the number of ranks, and leaves
// the rest to the next round. meanPrompt is the mean prompt length of the pool, in tokens.
func (p *evenkeel) placeForFullRanks(s *Snapshot, meanPrompt float64) {
	const noAgeWeight, noStepMs = 0, 0 // waits do not count, because entries are taken in order of their waits
	p.candidates.reset(s, p.loads.extraPerRequest, noAgeWeight, noStepMs)
	p.tight.meanPrompt = meanPrompt // read by projectFullLoads and placeEvenly
	p.projectFullLoads(s)
	rankCount := len(p.ranks.hadSlots) // only ranks that had a free slot are looked at
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

// placeOverdueForFullRanks places the overdue entries, the longest wait first, while they find room, until maxPlaced entries are placed.
// For the first one that lacks room, it reserves a rank, on which requests end but none begins. An entry that had room at first, but lacks
// a slot now, gets no reservation, because that would not help it.
func placeOverdueForFullRanks(p *evenkeel, s *Snapshot, maxPlaced int) {
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	room := p.ranks.largestRoom() // of the ranks with a free slot, in tokens; no entry fits it if no slot is free
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

// projectFullLoads computes the load that each rank will have when entries of mean length have filled its room, in KV tokens times the
// rank's cost per token. It is the present load, plus the tokens that fill the room, plus what each entry that fits in there counts for
// beyond its prompt (extraPerRequest).
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

// placeEvenly places an entry on the rank where it makes the loads of the full ranks most equal. The entry must fit some rank. isOverdue
// says that the starvation guard takes it.
func (p *evenkeel) placeEvenly(s *Snapshot, entry int, isOverdue bool) {
	tokens := int64(s.Pool[entry].Prompt)
	g := rankForEvenLoads(p, tokens)
	p.candidates.add(s, entry, isOverdue)
	p.placeOn(int32(len(p.candidates.all)-1), g)
	// For the room that the entry takes, projectFullLoads has counted extraPerRequest for tokens/meanPrompt entries of mean length. But
	// it is one entry, so extraPerRequest must count once.
	extraNotCounted := float64(p.loads.extraPerRequest) * (1 - float64(tokens)/p.tight.meanPrompt) // below 0 for a long entry
	p.tight.fullLoad[g] += extraNotCounted * float64(p.loads.cost[g])
}

// rankForEvenLoads returns the rank for an entry of so many tokens that makes the loads of the full ranks most equal; none: the entry fits
// no rank. The shorter the prompts on a full rank are, the more requests it holds, and the larger is its load. Therefore an entry that is
// not longer than the mean goes to the rank with the smallest load when full, and a longer entry to the rank with the largest.
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
