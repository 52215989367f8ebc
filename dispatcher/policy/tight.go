package policy

import "math"

// tight is the scratch for groups that run out of KV room before they run out of slots. All their ranks hold about as much
// KV, and the one with most requests is the slowest. If each rank got the entry that suits it best now, that one
// would get the shortest prompts, for they add least; its room would be filled with more of them than elsewhere, and so on. So a
// rank counts as it will be once its room is full.
type tight struct {
	full  []float64 // loads of the ranks then
	mean  float64   // KV tokens of an entry
	share float64   // of the room that what waits can fill
}

// shortOfRoom says whether most ranks run out of KV room before they run out of slots.
func shortOfRoom(s *Snapshot) bool {
	held, running, n := int64(0), int64(0), 0
	for g := range s.Workers {
		held += s.Workers[g].KVTokens()
		running += int64(len(s.Workers[g].Running))
	}
	for g := range s.Workers {
		if w := &s.Workers[g]; w.Capacity > 0 && running > 0 && w.Capacity-w.KVTokens() < int64(w.Free)*(held/running) {
			n++
		}
	}
	return 2*n > len(s.Workers)
}

// placeTight places entries in the order in which they came, those that are overdue first. An overdue entry that fits
// nowhere keeps a rank closed.
func (p *evenkeel) placeTight(s *Snapshot) {
	p.late = overdue(s, p.late[:0])
	p.pick.reset(s, p.loads.growth, 0, 0)
	p.foresee(s)
	passed := 0
	for _, w := range p.late {
		if passed < mostPassed && !p.settle(s, int(w.entry), true) {
			p.ranks.reserve(s, int(w.entry))
			passed++
		}
	}
	for i := 0; i < len(s.Pool) && p.ranks.open > 0 && passed < mostPassed; i++ {
		if !p.pick.taken[i] && !p.settle(s, i, false) {
			passed++
		}
	}
}

// mostPassed entries that fit nowhere are passed by before the round ends.
const mostPassed = 256

// foresee takes the loads that the ranks have once their room is full.
func (p *evenkeel) foresee(s *Snapshot) {
	t := &p.tight
	t.full = sized(t.full, len(s.Workers))
	sum := int64(0)
	for i := range s.Pool {
		sum += int64(s.Pool[i].Prompt)
	}
	t.mean = max(1, float64(sum)/float64(len(s.Pool)))
	all := 0.0
	for g := range t.full {
		t.full[g] = min(float64(p.ranks.free[g]), max(0, float64(p.ranks.room[g]))/t.mean)
		all += t.full[g]
	}
	t.share = min(1, float64(len(s.Pool))/max(1, all))
	for g := range t.full {
		more := t.full[g] * t.share * (t.mean + float64(p.loads.growth))
		t.full[g] = math.Ldexp(float64(p.loads.x[g]), -fixedBits) + more*float64(p.loads.cost[g])
	}
}

// settle gives an entry the rank that it makes most even, and says whether there was one. An entry takes the room that
// others could have had: a rank has more requests in the end if a short one comes, and fewer if a long one does.
func (p *evenkeel) settle(s *Snapshot, entry int, late bool) bool {
	t := &p.tight
	tokens := float64(s.Pool[entry].Prompt)
	request := float64(p.loads.growth)
	more := request + tokens - t.share*tokens/t.mean*(request+t.mean)
	best := none
	for _, rank := range p.ranks.some {
		if g := int(rank); p.ranks.fits(g, int64(s.Pool[entry].Prompt)) && (best == none || more > 0 && t.full[g] < t.full[best] || more < 0 && t.full[g] > t.full[best]) {
			best = g
		}
	}
	if best == none {
		return false
	}
	p.pick.add(s, entry, late)
	p.add(int32(len(p.pick.all)-1), best)
	t.full[best] += more * float64(p.loads.cost[best])
	return true
}
