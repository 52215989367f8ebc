package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// tight is the memory of rounds in which KV room, and not the number of slots, limits how many entries can be placed. All ranks will soon
// hold as much KV as they may, and then the rank with most requests will be the slowest. By its present load, this rank would get the
// shortest prompts, because these add least to its load, and so even more requests. Therefore such rounds compare the loads that the ranks
// will have when their room is full.
type tight struct {
	loadWhenFull []float64 // by rank: load when its room is full, in KV tokens scaled by its cost per token
	meanPrompt   float64   // mean prompt tokens of an entry in the pool
}

// maxTightWork bounds the work of a round in which room is short: the number of placed entries times the number of ranks, because
// placeByRoom looks at each rank for each entry.
const maxTightWork = 1 << 16

// roomIsScarce says whether the waiting entries would fill the KV room of the ranks before they fill the slots. It also returns false if a
// rank's room is unlimited, or if so many entries find room that placeByRoom would take too long (maxTightWork). meanPrompt is the mean
// prompt length of an entry, in tokens.
func (p *evenkeel) roomIsScarce(s *Snapshot) (meanPrompt float64, scarce bool) {
	room, slots, waitingTokens := 0.0, 0.0, 0.0
	for _, g := range p.ranks.withSlots {
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
	work := placeableEntries * float64(len(p.ranks.withSlots))
	// The entries need at least all the room, and entries of mean length fill it before they fill the slots.
	roomGoesFirst := room <= waitingTokens && room <= slots*meanPrompt
	return meanPrompt, roomGoesFirst && work <= maxTightWork
}

// placeByRoom places the overdue entries and then the oldest of the others, while they find room. It compares the loads that the ranks will
// have when their room is full (projectFullLoads), because then the rank with most requests will be the slowest. For the first overdue
// entry that finds no room, it reserves a rank. It looks at each rank for each entry, so it places at most maxTightWork entries divided by
// the number of ranks, and leaves the rest to the next round. meanPrompt is the mean prompt length of the pool, in tokens.
func (p *evenkeel) placeByRoom(s *Snapshot, meanPrompt float64) {
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	const isOverdue, noAgeWeight, noStepMs = true, 0, 0 // waits do not count, because entries are taken in order of their waits
	p.candidates.reset(s, p.loads.expectedGrowth, noAgeWeight, noStepMs)
	p.tight.meanPrompt = meanPrompt
	p.projectFullLoads(s)
	maxPlaced := maxTightWork / len(p.ranks.withSlots)
	room := p.ranks.largestRoom()
	roomAtFirst := room
	for _, w := range p.overdueEntries {
		tokens := int64(s.Pool[w.entry].Prompt)
		// If no slot is open any more, an entry that would have fitted at first waits only for a slot, and a reservation would not help it.
		waitsForSlotOnly := p.ranks.openSlots <= 0 && tokens <= roomAtFirst
		waitsForRoom := tokens > room && !waitsForSlotOnly
		switch {
		case tokens <= room && len(p.placed) < maxPlaced:
			p.placeEvenly(s, int(w.entry), isOverdue)
			room = p.ranks.largestRoom()
		case waitsForRoom && p.ranks.reserved == none:
			p.ranks.reserve(s, int(w.entry))
			room = p.ranks.largestRoom() // the reserved rank takes no other entries
		}
	}
	for i := 0; i < len(s.Pool) && p.ranks.openSlots > 0 && len(p.placed) < maxPlaced; i++ {
		if int64(s.Pool[i].Prompt) <= room && !p.candidates.taken[i] {
			p.placeEvenly(s, i, !isOverdue)
			room = p.ranks.largestRoom()
		}
	}
}

// projectFullLoads computes the load that each rank will have when entries of mean length have filled its room: its present load, the
// tokens that fill the room, and the expected growth of as many entries as fit in there.
func (p *evenkeel) projectFullLoads(s *Snapshot) {
	t := &p.tight
	t.loadWhenFull = sized(t.loadWhenFull, len(s.Workers))
	for _, g := range p.ranks.withSlots {
		more := max(0, float64(p.ranks.room[g])) * (1 + float64(p.loads.expectedGrowth)/t.meanPrompt)
		t.loadWhenFull[g] = math.Ldexp(float64(p.loads.load[g]), -fixedBits) + more*float64(p.loads.cost[g])
	}
}

// placeEvenly places an entry on the rank where it makes the loads of the full ranks most equal. The entry must fit some rank. isOverdue
// says that the starvation guard takes it.
func (p *evenkeel) placeEvenly(s *Snapshot, entry int, isOverdue bool) {
	t := &p.tight
	tokens := int64(s.Pool[entry].Prompt)
	g := rankForEvenLoads(p, tokens)
	p.candidates.add(s, entry, isOverdue)
	p.placeOn(int32(len(p.candidates.all)-1), g)
	// For the room that the entry takes, loadWhenFull counts the growth of tokens/meanPrompt entries, as many as would fill it. But
	// this one entry takes the room, and grows by expectedGrowth.
	growthNotCounted := float64(p.loads.expectedGrowth) * (1 - float64(tokens)/t.meanPrompt) // below 0 for an entry longer than the mean
	t.loadWhenFull[g] += growthNotCounted * float64(p.loads.cost[g])
}

// rankForEvenLoads returns the rank for an entry of so many tokens that makes the loads of the full ranks most equal; none: the entry fits
// no rank. The shorter the prompts on a full rank are, the more requests it holds, and the larger is its load. Therefore an entry that is
// not longer than the mean goes to the rank with the smallest load when full, and a longer entry to the rank with the largest.
func rankForEvenLoads(p *evenkeel, tokens int64) (best int) {
	loadWhenFull, isShort := p.tight.loadWhenFull, float64(tokens) <= p.tight.meanPrompt
	best = none
	for _, rank := range p.ranks.withSlots {
		g := int(rank)
		if !p.ranks.fits(g, tokens) {
			continue
		}
		load := loadWhenFull[g]
		isBetter := best == none || isShort && load < loadWhenFull[best] || !isShort && load > loadWhenFull[best]
		if isBetter {
			best = g
		}
	}
	return best
}
