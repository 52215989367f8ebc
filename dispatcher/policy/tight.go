package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// tight is the memory of rounds in which KV room, and not slots, limits what is placed. All ranks will soon hold as much KV as they may,
// and then the rank with most requests will be the slowest. If each rank got the entries that suit it best now, that rank would get the
// shortest prompts, because they add least to its load, and so even more requests. So each rank counts with the load that it will
// have once its room is full.
type tight struct {
	full []float64 // by rank: its load once its room is full, in scaled KV tokens
	mean float64   // mean KV tokens of an entry in the pool
}

// mostTight bounds the work of such a round: the number of entries that are placed, times the number of ranks.
const mostTight = 1 << 16

// shortOfRoom says whether KV room, and not slots, is short: the waiting entries would fill the room before they fill the slots. mean is
// the mean number of KV tokens of an entry.
func (p *evenkeel) shortOfRoom(s *Snapshot) (mean float64, short bool) {
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
	mean = max(1, waitingTokens/float64(len(s.Pool)))
	return mean, room <= waitingTokens && room <= slots*mean && room/mean*float64(len(p.ranks.withSlots)) <= mostTight
}

// placeTight places the overdue entries and then the oldest others that find room. For an overdue entry that finds none, a
// rank is reserved. It places at most mostTight/ranks entries and leaves the rest to the next round.
func (p *evenkeel) placeTight(s *Snapshot, mean float64) {
	p.late = overdue(s, p.late[:0])
	p.candidates.reset(s, p.loads.growth, 0, 0)
	p.tight.mean = mean
	p.projectFull(s)
	most := mostTight / len(p.ranks.withSlots)
	room := p.ranks.largestRoom()
	roomBefore := room
	for _, w := range p.late {
		switch tokens := int64(s.Pool[w.entry].Prompt); {
		case tokens <= room && len(p.placed) < most:
			p.placeLevel(s, int(w.entry), true)
			room = p.ranks.largestRoom()
		case tokens > room && p.ranks.reserved == none && (tokens > roomBefore || p.ranks.openSlots > 0):
			p.ranks.reserve(s, int(w.entry))
			room = p.ranks.largestRoom()
		}
	}
	for i := 0; i < len(s.Pool) && p.ranks.openSlots > 0 && len(p.placed) < most; i++ {
		if int64(s.Pool[i].Prompt) <= room && !p.candidates.taken[i] {
			p.placeLevel(s, i, false)
			room = p.ranks.largestRoom()
		}
	}
}

// projectFull computes the loads that the ranks will have once their room is full.
func (p *evenkeel) projectFull(s *Snapshot) {
	t := &p.tight
	t.full = sized(t.full, len(s.Workers))
	for _, g := range p.ranks.withSlots {
		more := max(0, float64(p.ranks.room[g])) * (1 + float64(p.loads.growth)/t.mean)
		t.full[g] = math.Ldexp(float64(p.loads.load[g]), -fixedBits) + more*float64(p.loads.cost[g])
	}
}

// placeLevel puts an entry that finds room on the rank where the group becomes most level. A full rank holds more requests in the end if
// its prompts are short. So a short entry goes to the rank with the smallest load once full, and a long entry to the one with the
// largest. late says that the entry is overdue.
func (p *evenkeel) placeLevel(s *Snapshot, entry int, late bool) {
	t := &p.tight
	tokens := int64(s.Pool[entry].Prompt)
	short := float64(tokens) <= t.mean
	best := none
	for _, rank := range p.ranks.withSlots {
		if g := int(rank); p.ranks.fits(g, tokens) && (best == none || t.full[g] != t.full[best] && short == (t.full[g] < t.full[best])) {
			best = g
		}
	}
	p.candidates.add(s, entry, late)
	p.add(int32(len(p.candidates.all)-1), best)
	t.full[best] += float64(p.loads.growth) * (1 - float64(tokens)/t.mean) * float64(p.loads.cost[best])
}
