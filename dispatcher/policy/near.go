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
		g := placed[i].rank
		r.first[g], r.next[i] = int32(i), r.first[g]
	}
}

// nearEvaluations bounds how many moves a round looks at to leave prompts on ranks that hold them.
const nearEvaluations = 512

// stayNear puts placements on the ranks that hold most of their prompts, which then pull less KV, where that costs next to
// nothing: the longest step may become longer by the share near, and by less where less of a prompt is spared.
func (p *evenkeel) stayNear(s *Snapshot) {
	if p.set.near == 0 || len(s.Waits) == 0 || p.ranks.open == 0 {
		return
	}
	l := &p.loads
	found := float64(l.mix.ceiling(l.peak(), l.mix.smooth))
	most := found
	if s.C1Ms > 0 {
		most += math.Ldexp(float64(s.C0Ms)/float64(s.C1Ms), fixedBits)
	}
	p.climb.left = nearEvaluations
	p.near.list(p.placed, len(s.Workers))
	for a := 0; a < len(p.placed) && p.climb.left > 0; a++ {
		if int(p.placed[a].rank) != p.ranks.reserved && len(p.hits(s, p.placed[a].who)) > 0 {
			p.approach(s, a, found, p.set.near*most)
		}
	}
}

// hits are what ranks hold of a candidate's prompt.
func (p *evenkeel) hits(s *Snapshot, who int32) []Hit { return s.Waits[p.pick.all[who].entry].Hits }

// holds is how much of a candidate's prompt rank g holds.
func (p *evenkeel) holds(s *Snapshot, who int32, g int) int {
	hits := p.hits(s, who)
	if at, ok := slices.BinarySearchFunc(hits, s.Workers[g].ID, func(h Hit, id int32) int { return int(h.Worker) - int(id) }); ok {
		return hits[at].Tokens
	}
	return 0
}

// approach moves placement a to a rank that holds more of its prompt, in the place of another placement where no slot is free.
// spends is what the ceiling may rise by where all of a prompt is spared.
func (p *evenkeel) approach(s *Snapshot, a int, found, spends float64) {
	who := p.placed[a].who
	here := p.holds(s, who, int(p.placed[a].rank))
	spares, rank, with := 0, none, none
	p.without(a)
	for _, h := range p.hits(s, who) {
		g, ok := s.index(h.Worker)
		if !ok || g == p.climb.g || g == p.ranks.reserved || h.Tokens-here <= spares {
			continue
		}
		if p.ranks.fits(g, p.pick.all[who].tokens) && p.affords(p.ceilingWithTwo(0, g, p.pick.on(&p.loads, who, g)), found, spends, h.Tokens-here, who) {
			spares, rank, with = h.Tokens-here, g, none
			continue
		}
		for b := p.near.first[g]; b != none; b = p.near.next[b] {
			if more := h.Tokens - here + p.sparesFor(s, int(b), g); more > spares && p.canSwap(a, int(b), g, found, spends, more) {
				spares, rank, with = more, g, int(b)
			}
		}
	}
	switch {
	case rank == none:
	case with != none:
		p.exchange(a, with)
	default:
		p.relocate(a, rank)
		p.near.list(p.placed, len(s.Workers))
	}
}

// affords spends an evaluation: whether a ceiling is worth so many tokens of a prompt that need not be pulled.
func (p *evenkeel) affords(ceiling int64, found, spends float64, spared int, who int32) bool {
	p.climb.left--
	return p.climb.left >= 0 && float64(ceiling)-found <= spends*min(1, float64(spared)/float64(max(1, p.pick.all[who].tokens)))
}

// sparesFor is what b spares in the place of the one that is looked at: below 0 if rank g, where it is, holds more of it.
func (p *evenkeel) sparesFor(s *Snapshot, b, g int) int {
	who := p.placed[b].who
	return p.holds(s, who, p.climb.g) - p.holds(s, who, g)
}

// canSwap says whether a and b, which is on rank g, may change places.
func (p *evenkeel) canSwap(a, b, g int, found, spends float64, spared int) bool {
	whoA, whoB := p.placed[a].who, p.placed[b].who
	x, y := &p.pick.all[whoA], &p.pick.all[whoB]
	if y.tokens-x.tokens > p.ranks.room[p.climb.g] || x.tokens-y.tokens > p.ranks.room[g] {
		return false
	}
	l := &p.loads
	in, by := p.pick.on(l, whoB, p.climb.g), p.pick.on(l, whoA, g)-p.pick.on(l, whoB, g)
	return p.affords(p.ceilingWithTwo(in, g, by), found, spends, spared, whoA)
}
