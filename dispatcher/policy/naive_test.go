package policy

import (
	"math"
	"math/bits"
	"slices"

	"evenkeel/dispatcher/subset"
)

// naiveBR0 is the round of algorithm 4.2 and 4.3 for BR-0 as the text has it:
// scans instead of indices, every subset instead of two probes.
func naiveBR0(p *greedy, s *Snapshot) []Assignment {
	type rank struct {
		w                *Worker
		load, free, room int64
	}
	n := int64(len(s.Workers))
	ranks := make([]rank, n)
	var top, open int64
	for g := range s.Workers {
		w := &s.Workers[g]
		r := rank{w: w, load: subset.Scaled(w.KVTokens(), float64(w.Cost)), room: math.MaxInt64}
		if w.Up {
			r.free = int64(max(0, w.Free))
		}
		if w.Capacity > 0 {
			r.room = int64(float64(w.Capacity)*(1-p.watermark)) - w.KVTokens()
		}
		ranks[g] = r
		top, open = max(top, r.load), open+r.free
	}
	score := func(r *rank, size int64) int64 { return subset.F0(size, top-r.load, int(n)) }
	size := func(r *rank, e Entry) int64 { return subset.Scaled(int64(e.Prompt), float64(r.w.Cost)) }

	line := slices.Clone(s.Pool)
	if p.longest {
		slices.SortStableFunc(line, func(a, b Entry) int { return int(b.Prompt) - int(a.Prompt) })
	}
	var out []Assignment
	leave := func(id uint64) { line = slices.DeleteFunc(line, func(e Entry) bool { return e.ID == id }) }
	admit := func(r *rank, e Entry, f int64, stage uint8) {
		out = append(out, Assignment{Entry: e.ID, Worker: r.w.ID, Score: float64(f), Stage: stage})
		r.load += size(r, e)
		top = max(top, r.load)
		r.free--
		open--
		if r.w.Capacity > 0 {
			r.room -= int64(e.Prompt)
		}
		leave(e.ID)
	}
	shut := func(r *rank) { open, r.free = open-r.free, 0 }

	if p.guard {
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
				if best == nil || score(r, size(r, e)) > score(best, size(best, e)) ||
					score(r, size(r, e)) == score(best, size(best, e)) && r.load < best.load {
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
			byMargin, bySlots := best == nil || r.load < best.load, best == nil || r.free > best.free
			if best == nil || p.capacity && (bySlots || r.free == best.free && byMargin) || !p.capacity && (byMargin || r.load == best.load && bySlots) {
				best = r
			}
		}
		return best
	}
	single := func(r *rank, from []Entry) (best Entry, f int64, ok bool) {
		for _, e := range from {
			if int64(e.Prompt) > r.room {
				continue
			}
			if x := score(r, size(r, e)); !ok || x > f {
				best, f, ok = e, x, true
			}
		}
		return best, f, ok
	}
	theta := p.theta
	if theta == groupSize {
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
		best, bestF, bestSum := 0, int64(0), int64(0)
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
			if best == 0 || f > bestF || f == bestF && (sum < bestSum || sum == bestSum && bits.OnesCount(uint(mask)) > bits.OnesCount(uint(best))) {
				best, bestF, bestSum = mask, f, sum
			}
		}
		if bestF <= 0 {
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
