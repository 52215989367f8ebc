package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// fixedBits: loads are in units of 2^-20 KV tokens, so that costs are exact and compare as whole
// numbers. Good for 2^31 tokens a rank in a group of 1024.
const fixedBits = 20

// Cost is the J of the loads of a group: how many tokens all ranks together lack to the fullest one.
func Cost(loads []float64) float64 {
	var most, sum float64
	for _, x := range loads {
		most = max(most, x)
		sum += x
	}
	return float64(len(loads))*most - sum
}

// growthShare of a mean answer is counted as a request's growth.
const growthShare = 0.25

// loads are those of every rank in a round, with what the cost of a change needs: the three
// largest, so that the largest of all ranks but two is at hand.
type loads struct {
	x    []int64 // of each rank, in fixed point and in what tokens cost there
	top  [3]end  // the largest first
	cost []float32
	held []int64 // KV tokens of each rank, unscaled, as the round began
	now  []int64 // the same in what tokens and requests cost

	// So many KV tokens are counted for a request beyond those it holds: a rank with many short
	// requests grows faster than one with a few long ones.
	growth  int64
	request int64 // of these, those that it weighs as much as now

	mix mix
}

// end is one of the largest loads, and whose it is.
type end struct {
	load int64
	rank int32
}

// build takes the loads of a snapshot; a request weighs as much as so many KV tokens beside its own.
func (l *loads) build(s *Snapshot, request int64) {
	n := len(s.Workers)
	l.x, l.cost, l.held, l.now = sized(l.x, n), sized(l.cost, n), sized(l.held, n), sized(l.now, n)
	l.request, l.growth = request, int64(s.MeanOutput*growthShare)+request
	l.mix = mix{}
	for g := range s.Workers {
		w := &s.Workers[g]
		l.cost[g] = w.Cost
		if w.Cost == 0 {
			l.cost[g] = 1
		}
		l.held[g] = w.KVTokens()
		l.now[g] = l.scaled(g, l.held[g]+l.request*int64(len(w.Running)))
		l.x[g] = l.scaled(g, (l.held[g]+l.growth*int64(len(w.Running)))<<fixedBits)
	}
	l.rescan()
}

func (l *loads) scaled(g int, tokens int64) int64 { return subset.Scaled(tokens, float64(l.cost[g])) }

// rescan finds the three largest anew.
func (l *loads) rescan() {
	l.top = [3]end{{0, none}, {0, none}, {0, none}}
	for g, x := range l.x {
		l.rise(end{x, int32(g)})
	}
}

// rise takes a load that is not among the largest into account.
func (l *loads) rise(e end) {
	for i := range l.top {
		if e.load > l.top[i].load {
			l.top[i], e = e, l.top[i]
		}
	}
}

// shift changes the load of rank g.
func (l *loads) shift(g int, by int64) {
	was := l.x[g]
	l.x[g] += by
	l.mix.smooth += l.mix.rise(was, l.x[g])
	e := end{l.x[g], int32(g)}
	for i := range l.top {
		switch {
		case l.top[i].rank != e.rank:
			continue
		case by < 0: // it may have fallen below one that was not kept
			l.rescan()
			return
		}
		copy(l.top[i:], l.top[i+1:])
		l.top[len(l.top)-1] = end{0, none}
	}
	l.rise(e)
}

// peak is the largest load.
func (l *loads) peak() int64 { return l.top[0].load }

// fullest is the load that sets the length of a step.
func (l *loads) fullest() (most int64) {
	for _, x := range l.now {
		most = max(most, x)
	}
	return most
}

// rest is what stands of the largest loads when one rank, and perhaps another,
// are to change: the largest but the one's, whose that is, and the next.
type rest struct {
	most, next int64
	owner      int32
}

func (l *loads) without(g int) rest {
	first, second, third := l.top[0], l.top[1], l.top[2]
	switch int32(g) {
	case first.rank:
		return rest{second.load, third.load, second.rank}
	case second.rank:
		return rest{first.load, third.load, first.rank}
	}
	return rest{first.load, second.load, first.rank}
}

// but is the largest load when rank b is to change, too.
func (r *rest) but(b int) int64 {
	if r.owner == int32(b) {
		return r.next
	}
	return r.most
}

// mix is the ceiling that the search lowers: the largest load and, as its share kappa, a mean that
// heavy ranks dominate: the eighth root of the mean eighth power. It levels the ranks below the
// fullest too. The root is replaced by its tangent where the search begins, so that what a move
// changes is a sum over the ranks that it touches.
type mix struct {
	kappa  float64
	slope  float64 // by how much the share rises with the power of a load
	smooth float64 // what the share makes of all loads
}

// startMix lays the tangent at the loads as they are.
func (l *loads) startMix(kappa float64) {
	l.mix = mix{kappa: kappa}
	power := 0.0
	for _, x := range l.x {
		power += eighth(x)
	}
	if power > 0 {
		l.mix.smooth = kappa * math.Sqrt(math.Sqrt(math.Sqrt(power/float64(len(l.x)))))
		l.mix.slope = l.mix.smooth / (8 * power)
	}
}

// ceiling is what the mix makes of the largest load. A tangent that was laid at loads of a few tokens is
// beyond all numbers at large ones, so it is cut where a group of 1024 can still multiply it.
func (m *mix) ceiling(peak int64, smooth float64) int64 {
	return int64(math.Round(min((1-m.kappa)*float64(peak)+smooth, 1<<52)))
}

// rise is by how much the share rises when the load of a rank becomes another.
func (m *mix) rise(from, to int64) float64 { return m.slope * (eighth(to) - eighth(from)) }

func eighth(x int64) float64 {
	f := float64(x)
	f *= f
	f *= f
	return f * f
}
