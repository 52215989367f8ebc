package policy

import (
	"math"
	"slices"
)

// residents are the placements of each rank, as lists.
type residents struct {
	first []int32 // by rank, none where it has none
	next  []int32 // by placement
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

// nearLooks bounds how many hits and placements a round looks at to leave prompts on ranks that hold them.
const nearLooks = 1024

// stayNear puts placements on the ranks that hold most of their prompts, which then pull less KV, where that costs nothing: the
// fullest rank becomes no fuller. The ranks below it may become less level, by the share near of a step, and by less where less of
// a prompt is spared.
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

// nearest is what the round found, and what may be given away of it.
type nearest struct {
	*evenkeel
	s       *Snapshot
	peak    int64
	ceiling float64
	spends  float64 // that the ceiling may rise by where all of a prompt is spared
}

// hits are what ranks hold of a candidate's prompt.
func (p *nearest) hits(who int32) []Hit { return p.s.Waits[p.pick.all[who].entry].Hits }

// holds is how much of a candidate's prompt rank g holds.
func (p *nearest) holds(who int32, g int) int {
	hits := p.hits(who)
	if at, ok := slices.BinarySearchFunc(hits, p.s.Workers[g].ID, func(h Hit, id int32) int { return int(h.Worker) - int(id) }); ok {
		return hits[at].Tokens
	}
	return 0
}

// approach moves placement a to a rank that holds more of its prompt, in the place of another placement where no slot is free.
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

// affords says whether so many tokens of a prompt that need not be pulled are worth what becomes of the loads when the rank of the
// one that is looked at gets in beside its base, and rank g by more.
func (p *nearest) affords(in int64, g int, by int64, spared int, who int32) bool {
	l, m := &p.loads, &p.climb
	if max(m.rest.but(g), m.base+in, l.x[g]+by) > p.peak {
		return false
	}
	share := min(1, float64(spared)/float64(max(1, p.pick.all[who].tokens)))
	return float64(p.ceilingWithTwo(in, g, by))-p.ceiling <= p.spends*share
}

// sparesFor is what b spares in the place of the one that is looked at: below 0 if rank g, where it is, holds more of it.
func (p *nearest) sparesFor(b, g int) int {
	who := p.placed[b].who
	return p.holds(who, p.climb.g) - p.holds(who, g)
}

// canSwap says whether a and b, which is on rank g, may change places.
func (p *nearest) canSwap(a, b, g, spared int) bool {
	whoA, whoB := p.placed[a].who, p.placed[b].who
	x, y := &p.pick.all[whoA], &p.pick.all[whoB]
	if y.tokens-x.tokens > p.ranks.room[p.climb.g] || x.tokens-y.tokens > p.ranks.room[g] {
		return false
	}
	l := &p.loads
	return p.affords(p.pick.on(l, whoB, p.climb.g), g, p.pick.on(l, whoA, g)-p.pick.on(l, whoB, g), spared, whoA)
}
