package policy

import (
	"math"
	"math/bits"
	"slices"

	"evenkeel/dispatcher/subset"
)

// naiveGreedy is the greedy round in its plainest form: scans
// instead of indices, every subset instead of two probes, every step instead of
// sorted margins, nothing kept from one decision to the next.
func naiveGreedy(p *greedy, s *Snapshot) []Assignment {
	type rank struct {
		w          *Worker
		load       []int64
		free, room int64
	}
	n, horizon := int64(len(s.Workers)), 0
	alpha, beta, gamma := 1.0, float64(n), 1.0
	equal := func(x, y float64) bool { return x == y }
	if a := p.lookahead; a != nil {
		horizon, alpha, beta, gamma, equal = a.horizon, a.alpha, a.beta, a.gamma, subset.Equal
	}
	ranks := make([]rank, n)
	top := make([]int64, horizon+1)
	var open int64
	for g := range s.Workers {
		w := &s.Workers[g]
		r := rank{w: w, load: make([]int64, horizon+1), room: math.MaxInt64}
		for h := range r.load {
			for _, q := range w.Running {
				if float32(h) < q.Rhat || q.Rhat >= float32(horizon) || q.Rhat == 0 {
					r.load[h] += int64(q.Prompt) + int64(q.Generated) - int64(q.KVElsewhere) + int64(h)
				}
			}
			r.load[h] = subset.Scaled(r.load[h], float64(w.Cost))
			top[h] = max(top[h], r.load[h])
		}
		if w.Up {
			r.free = int64(max(0, w.Free))
		}
		if w.Capacity > 0 {
			r.room = int64(float64(w.Capacity)*(1-p.watermark)) - w.KVTokens()
		}
		ranks[g] = r
		open += r.free
	}
	score := func(r *rank, size int64) (f float64) {
		discount := 1.0
		for h, x := range r.load {
			f += discount * (alpha*float64(size) - beta*float64(max(0, size-(top[h]-x))))
			discount *= gamma
		}
		return f
	}
	margin := func(r *rank) int64 {
		least := int64(math.MaxInt64)
		for h, x := range r.load {
			least = min(least, top[h]-x)
		}
		return least
	}
	size := func(r *rank, e Entry) int64 { return subset.Scaled(int64(e.Prompt), float64(r.w.Cost)) }

	line := slices.Clone(s.Pool)
	if p.longestFirst {
		slices.SortStableFunc(line, func(a, b Entry) int { return int(b.Prompt) - int(a.Prompt) })
	}
	var out []Assignment
	leave := func(id uint64) { line = slices.DeleteFunc(line, func(e Entry) bool { return e.ID == id }) }
	admit := func(r *rank, e Entry, f float64, stage uint8) {
		out = append(out, Assignment{Entry: e.ID, Worker: r.w.ID, Score: f, Stage: stage})
		for h := range r.load {
			r.load[h] += size(r, e)
			top[h] = max(top[h], r.load[h])
		}
		r.free--
		open--
		if r.w.Capacity > 0 {
			r.room -= int64(e.Prompt)
		}
		leave(e.ID)
	}
	shut := func(r *rank) { open, r.free = open-r.free, 0 }

	if p.overdueFirst {
		var late []Entry
		for _, e := range s.Pool {
			if e.Urgent || s.MaxAgeMs > 0 && e.WaitMs >= s.MaxAgeMs {
				late = append(late, e)
			}
		}
		slices.SortStableFunc(late, func(a, b Entry) int {
			if a.WaitMs > b.WaitMs {
				return -1
			} else if a.WaitMs < b.WaitMs {
				return 1
			}
			return 0
		})
		reserved := false
		for _, e := range late {
			if open == 0 {
				break
			}
			var best *rank
			for g := range ranks {
				r := &ranks[g]
				if r.free == 0 || int64(e.Prompt) > r.room {
					continue
				}
				if best == nil {
					best = r
					continue
				}
				x, y := score(r, size(r, e)), score(best, size(best, e))
				if tie := equal(x, y); !tie && x > y || tie && margin(r) > margin(best) {
					best = r
				}
			}
			if best != nil {
				admit(best, e, score(best, size(best, e)), 0)
				continue
			}
			leave(e.ID)
			if !reserved {
				var most *rank
				for g := range ranks {
					if r := &ranks[g]; r.w.Up && (most == nil || r.room > most.room) {
						most = r
					}
				}
				shut(most)
				reserved = true
			}
		}
	}
	head := func() *rank {
		var best *rank
		for g := range ranks {
			r := &ranks[g]
			if r.free == 0 {
				continue
			}
			if best == nil {
				best = r
				continue
			}
			margins, slots := margin(r)-margin(best), r.free-best.free
			if p.slotsFirst {
				margins, slots = slots, margins
			}
			if margins > 0 || margins == 0 && slots > 0 {
				best = r
			}
		}
		return best
	}
	single := func(r *rank, from []Entry) (best Entry, f float64, ok bool) {
		for _, e := range from {
			if x := score(r, size(r, e)); int64(e.Prompt) <= r.room && (!ok || x > f) {
				f, ok = x, true
			}
		}
		for _, e := range from {
			if int64(e.Prompt) <= r.room && equal(score(r, size(r, e)), f) {
				return e, f, ok
			}
		}
		return best, f, ok
	}
	theta := p.theta
	if theta == thetaIsRankCount {
		theta = n
	}
	for open > theta && len(line) > 0 {
		r := head()
		if e, f, ok := single(r, line); ok {
			admit(r, e, f, 1)
		} else {
			shut(r)
		}
	}
	for open > 0 && len(line) > 0 {
		r := head()
		var c []Entry
		for _, e := range line {
			if int64(e.Prompt) <= r.room && len(c) < p.window {
				c = append(c, e)
			}
		}
		if len(c) == 0 {
			shut(r)
			continue
		}
		best, bestF, bestSum := 0, 0.0, int64(0)
		for mask := 1; mask < 1<<len(c); mask++ {
			var sum, tokens int64
			for i, e := range c {
				if mask>>i&1 == 1 {
					sum, tokens = sum+size(r, e), tokens+int64(e.Prompt)
				}
			}
			if int64(bits.OnesCount(uint(mask))) > r.free || tokens > r.room {
				continue
			}
			f := score(r, sum)
			if tie := equal(f, bestF); best == 0 || !tie && f > bestF || tie &&
				(sum < bestSum || sum == bestSum && bits.OnesCount(uint(mask)) > bits.OnesCount(uint(best))) {
				best, bestF, bestSum = mask, f, sum
			}
		}
		if bestF <= 0 || equal(bestF, 0) {
			e, f, _ := single(r, c)
			admit(r, e, f, 2)
			continue
		}
		for i, e := range c {
			if best>>i&1 == 1 {
				admit(r, e, bestF, 2)
			}
		}
	}
	return out
}
