package policy

import (
	"math"
	"slices"

	"evenkeel/dispatcher/subset"
)

// A Weigher is a policy that can tell what it thinks of the ranks it did not
// choose. Decide does without it; who explains a round asks afterwards.
type Weigher interface {
	// Weigh writes into dst, for every worker, what an admission would be worth
	// there while all others of the round stay where they were put; NaN for a
	// worker that could not have it. It is asked about the i-th assignment of the
	// last Decide, of so many KV tokens, with the snapshot of that. less: smaller
	// is better; ok is false where nothing is compared.
	Weigh(s *Snapshot, i int, a Assignment, tokens int64, dst []float64) (less, ok bool)
}

// Weigh tells how many tokens of cost the entry would save on each rank, as the
// score of an assignment does.
func (p *evenkeel) Weigh(s *Snapshot, i int, _ Assignment, tokens int64, dst []float64) (less, ok bool) {
	if i >= len(p.placed) {
		return false, false
	}
	unknown(dst)
	p.without(i)
	l, m, who := &p.loads, &p.climb, p.placed[i].who
	group := int64(len(s.Workers))
	without := max(m.rest.most, m.base)
	for _, rank := range p.ranks.some {
		g := int(rank)
		peak := l.peak()
		if g != m.g {
			if !p.ranks.fits(g, tokens) {
				continue
			}
			peak = max(m.rest.but(g), m.base, l.x[g]+p.pick.on(l, who, g))
		}
		dst[g] = math.Ldexp(float64(p.pick.all[who].load-group*(peak-without)), -fixedBits)
	}
	return false, true
}

// Weigh tells F of the entry alone on each rank.
func (p *greedy) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (less, ok bool) {
	at, ok := s.index(a.Worker)
	if !ok {
		return false, false
	}
	unknown(dst)
	size := p.scaled(s, at, tokens)
	p.env.remove(at, size)
	for _, rank := range p.ranks.some {
		if g := int(rank); g == at || p.ranks.fits(g, tokens) {
			dst[g] = p.scoreOf(s, g, tokens)
		}
	}
	p.env.add(at, size)
	return false, true
}

// Weigh tells what the rule compares: requests or KV tokens of each rank without
// the entry, or F. Chance and turns compare nothing.
func (p *firstCome) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (less, ok bool) {
	at, ok := s.index(a.Worker)
	if !ok || p.rule == ruleRandom || p.rule == ruleRR {
		return false, false
	}
	unknown(dst)
	size := subset.Scaled(tokens, float64(s.Workers[at].Cost))
	p.env.remove(at, size)
	for g := range s.Workers {
		if g != at && !p.ranks.fits(g, tokens) {
			continue
		}
		switch p.rule {
		case ruleJSQKV:
			dst[g] = float64(p.env.held[g])
			if g == at {
				dst[g] -= float64(tokens)
			}
		case ruleLeastF:
			dst[g] = float64(subset.F0(subset.Scaled(tokens, float64(s.Workers[g].Cost)), p.env.marginOf(g), len(s.Workers)))
		default:
			dst[g] = float64(p.requests[g])
			if g == at {
				dst[g]--
			}
		}
	}
	p.env.add(at, size)
	return p.rule != ruleLeastF, true
}

func unknown(dst []float64) {
	for g := range dst {
		dst[g] = math.NaN()
	}
}

// index finds a worker.
func (s *Snapshot) index(worker int32) (g int, ok bool) {
	return slices.BinarySearchFunc(s.Workers, worker, func(w Worker, id int32) int { return int(w.ID) - int(id) })
}

// remove takes a scaled size off rank g at every step, and the envelope down to
// what stands without it. add puts it back.
func (e *envelope) remove(g int, size int64) {
	row := e.row(g)
	for h := range row {
		row[h] -= size
	}
	clear(e.top)
	for g := range e.leastAt {
		for h, x := range e.row(g) {
			e.top[h] = max(e.top[h], x)
		}
		e.leastAt[g] = none
	}
}
