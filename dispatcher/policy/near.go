package policy

import (
	"math"
	"slices"
)

// residents has the placements of each rank, as linked lists.
type residents struct {
	first []int32 // by rank: its first placement, or none
	next  []int32 // by placement: the next one of the same rank, or none
}

func (r *residents) list(placed []placement, ranks int) {
	r.first, r.next = sized(r.first, ranks), sized(r.next, len(placed))
	for g := range r.first {
		r.first[g] = none
	}
	for i := len(placed) - 1; i >= 0; i-- {
		r.enter(int32(i), placed[i].rank)
	}
}

func (r *residents) enter(i, rank int32) { r.first[rank], r.next[i] = i, r.first[rank] }

// move takes placement i from one rank's list to another's.
func (r *residents) move(i, from, to int32) {
	at := &r.first[from]
	for *at != i {
		at = &r.next[*at]
	}
	*at = r.next[i]
	r.enter(i, to)
}

// nearLooks bounds how many hits and placements stayNear looks at in a round.
const nearLooks = 1024

// stayNear moves placements to ranks that hold more of their prompts, so that less KV must be pulled. It does so only if the
// fullest rank does not become fuller. The ranks below it may become less level: if all of a prompt is spared, by at most the share `near`
// of a step, and by less if a part is spared.
func (p *evenkeel) stayNear(s *Snapshot) {
	if p.set.near == 0 || len(s.Waits) == 0 || p.ranks.open == 0 {
		return
	}
	l := &p.loads
	found := nearest{evenkeel: p, s: s, peak: l.peak(), ceiling: float64(l.mix.ceiling(l.peak(), l.mix.smooth))}
	found.spends = found.ceiling
	if s.C1Ms > 0 {
		found.spends += math.Ldexp(float64(s.C0Ms)/float64(s.C1Ms), fixedBits)
	}
	found.spends *= p.set.near
	p.climb.left = nearLooks
	p.near.list(p.placed, len(s.Workers))
	for a := 0; a < len(p.placed) && p.climb.left > 0; a++ {
		if int(p.placed[a].rank) != p.ranks.reserved && len(found.hits(p.placed[a].who)) > 0 {
			found.approach(a)
		}
	}
}

// nearest has the loads that the search has reached, and how much worse stayNear may make them.
type nearest struct {
	*evenkeel
	s       *Snapshot
	peak    int64
	ceiling float64
	spends  float64 // by how much the ceiling may rise for a move that spares all of a prompt
}

// hits returns what ranks hold of a candidate's prompt.
func (p *nearest) hits(who int32) []Hit { return p.s.Waits[p.pick.all[who].entry].Hits }

// holds returns how many tokens of a candidate's prompt rank g holds.
func (p *nearest) holds(who int32, g int) int {
	hits := p.hits(who)
	if at, ok := slices.BinarySearchFunc(hits, p.s.Workers[g].ID, func(h Hit, id int32) int { return int(h.Worker) - int(id) }); ok {
		return hits[at].Tokens
	}
	return 0
}

// approach moves placement a to the rank that spares most tokens of its prompt: to a free slot, or else in exchange with another
// placement.
func (p *nearest) approach(a int) {
	who := p.placed[a].who
	here := p.holds(who, int(p.placed[a].rank))
	spares, rank, with := 0, none, none
	p.without(a)
	for _, h := range p.hits(who) {
		if p.climb.left--; p.climb.left < 0 {
			break
		}
		g, ok := p.s.index(h.Worker)
		if !ok || g == p.climb.g || g == p.ranks.reserved || h.Tokens-here <= spares {
			continue
		}
		if p.ranks.fits(g, p.pick.all[who].tokens) && p.affords(0, g, p.pick.on(&p.loads, who, g), h.Tokens-here, who) {
			spares, rank, with = h.Tokens-here, g, none
			continue
		}
		for b := p.near.first[g]; b != none && p.climb.left > 0; b = p.near.next[b] {
			p.climb.left--
			if more := h.Tokens - here + p.sparesFor(int(b), g); more > spares && p.canSwap(a, int(b), g, more) {
				spares, rank, with = more, g, int(b)
			}
		}
	}
	switch {
	case rank == none:
	case with != none:
		p.exchange(a, with)
	default:
		p.near.move(int32(a), p.placed[a].rank, int32(rank))
		p.relocate(a, rank)
	}
}

// affords says whether the loads may change for the sake of spared prompt tokens of candidate who: the load of climb's rank to
// base + in, and that of rank g by `by`.
func (p *nearest) affords(in int64, g int, by int64, spared int, who int32) bool {
	l, m := &p.loads, &p.climb
	if max(m.rest.but(g), m.base+in, l.x[g]+by) > p.peak {
		return false
	}
	share := min(1, float64(spared)/float64(max(1, p.pick.all[who].tokens)))
	return float64(p.ceilingWithTwo(in, g, by))-p.ceiling <= p.spends*share
}

// sparesFor returns how many prompt tokens placement b spares if it moves from rank g to climb's rank; below 0 if rank g holds more of it.
func (p *nearest) sparesFor(b, g int) int {
	who := p.placed[b].who
	return p.holds(who, p.climb.g) - p.holds(who, g)
}

// canSwap says whether placements a and b may exchange their ranks, of which b's is g.
func (p *nearest) canSwap(a, b, g, spared int) bool {
	whoA, whoB := p.placed[a].who, p.placed[b].who
	x, y := &p.pick.all[whoA], &p.pick.all[whoB]
	if y.tokens-x.tokens > p.ranks.room[p.climb.g] || x.tokens-y.tokens > p.ranks.room[g] {
		return false
	}
	l := &p.loads
	return p.affords(p.pick.on(l, whoB, p.climb.g), g, p.pick.on(l, whoA, g)-p.pick.on(l, whoB, g), spared, whoA)
}
