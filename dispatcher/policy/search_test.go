package policy

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawMeasured makes a snapshot as drawSnapshot does, with all that evenkeel
// reads: a mean output, ids and slots, a step model.
func drawMeasured(t *rapid.T) *Snapshot {
	s := drawSnapshot(t)
	s.MeanOutput = rapid.SampledFrom([]float64{0, 1, 60}).Draw(t, "mean output")
	s.StepMs = rapid.SampledFrom([]float32{0, 50}).Draw(t, "step")
	s.C0Ms, s.C1Ms = 20, rapid.SampledFrom([]float32{0, 1e-3, 0.1}).Draw(t, "c1")
	s.Budget = rapid.SampledFrom([]int32{0, 0, 100, 1000}).Draw(t, "budget")
	n := int32(0)
	for g := range s.Workers {
		for i := range s.Workers[g].Running {
			q := &s.Workers[g].Running[i]
			q.ID, q.Slot = uint64(1000+n), n
			q.Age = q.Generated + rapid.SampledFrom([]int32{0, 0, 30}).Draw(t, "carried age")
			n++
		}
	}
	for i := range s.Pool {
		s.Pool[i].Age = rapid.SampledFrom([]int32{0, 0, 12}).Draw(t, "age")
	}
	return s
}

// drawEvenkeel makes a policy with settings that matter to small fleets.
func drawEvenkeel(t *rapid.T) *evenkeel {
	v := evenkeelDefaults
	v.extraCandidates = rapid.SampledFrom([]int{0, 2, 32}).Draw(t, "candidates")
	v.bestPairMax = rapid.SampledFrom([]int{0, 24}).Draw(t, "pairs")
	v.workerFirstMax = rapid.SampledFrom([]int{0, 200}).Draw(t, "refill")
	v.ageWeight = rapid.SampledFrom([]float64{0, 100}).Draw(t, "age weight")
	v.kappa = rapid.SampledFrom([]float64{0, 0, 0, 0.3}).Draw(t, "kappa")
	return newEvenkeel("evenkeel", &v).(*evenkeel)
}

// aim is what the search lowers: cost less what ages take off.
func (p *evenkeel) aim() int64 {
	return p.worth(&p.loads, p.placed)
}

// worth is the aim of placements that a board's loads have.
func (p *evenkeel) worth(l *loads, placed []placement) int64 {
	aim := int64(len(l.load)) * l.smoothed.value(l.peak(), l.smoothed.powerMeanTerm)
	for _, a := range placed {
		aim -= p.candidates.all[a.candidate].load + p.candidates.all[a.candidate].waitCredit
	}
	return aim
}

// rebuilt is the loads of the snapshot with the placements added, from scratch.
func (p *evenkeel) rebuilt(s *Snapshot, placed []placement) *loads {
	var l loads
	l.build(s, 0)
	for _, a := range placed {
		l.load[a.rank] += p.candidates.loadOn(&l, a.candidate, int(a.rank))
	}
	l.rescan()
	return &l
}

// checkLoads: what was kept up to date is what a fresh look finds, and the
// slots and room that are left are those of the placements.
func (p *evenkeel) checkLoads(t *rapid.T, s *Snapshot, when string) {
	want, got := p.rebuilt(s, p.placed), &p.loads
	require.Equal(t, want.load, got.load, when)
	for i := range want.top {
		require.Equal(t, want.top[i].load, got.top[i].load, when)
	}

	var r ranks
	r.load(s, got.heldTokens, p.set.watermark, 0)
	if p.ranks.reserved != none {
		r.closeRank(p.ranks.reserved)
	}
	for _, a := range p.placed {
		c := &p.candidates.all[a.candidate]
		r.changeRoom(int(a.rank), 0, c.tokens)
		if int(a.rank) != p.ranks.reserved {
			r.free[a.rank]--
			r.openSlots--
		}
		require.True(t, c.placed, when)
	}
	require.Equal(t, r.room, p.ranks.room, when)
	require.Equal(t, r.free, p.ranks.free, when)
	require.Equal(t, r.openSlots, p.ranks.openSlots, when)
	for g, room := range r.room {
		if slices.ContainsFunc(p.placed, func(a placement) bool { return int(a.rank) == g }) {
			require.GreaterOrEqual(t, room, int64(0), when)
		}
		require.GreaterOrEqual(t, r.free[g], int32(0), when)
	}
}

func TestTheCostIsKeptUpToDate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
		if !p.beginRound(s) {
			return
		}
		p.checkLoads(t, s, "before")
		p.place(s)
		p.checkLoads(t, s, "after the start")
		p.loads.startSmoothing(p.set.kappa)
		if len(p.placed) > 0 && p.ranks.reserved == none && rapid.IntRange(0, 4).Draw(t, "reserve") == 0 {
			p.ranks.reserved = int(p.placed[len(p.placed)-1].rank)
			p.ranks.closeRank(p.ranks.reserved)
		}
		before, kept := p.aim(), int64(0)
		if p.ranks.reserved != none {
			kept = p.ranks.room[p.ranks.reserved]
		}
		p.improve(p.budget(s))
		p.checkLoads(t, s, "after improving")
		if p.ranks.reserved != none {
			require.Equal(t, kept, p.ranks.room[p.ranks.reserved], "a reserved rank's room is to grow")
		}
		p.loads.startSmoothing(p.set.kappa)
		require.LessOrEqual(t, p.aim(), before, "improving never makes it worse")
		p.fillUp(s)
		p.checkLoads(t, s, "after filling up")
	})
}

func TestThereIsNoBetterMoveAtTheEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
		s.Budget, p.set.budget, p.set.kappa = 0, math.MaxInt32, 0
		if !p.beginRound(s) {
			return
		}
		p.place(s)
		p.improve(p.budget(s))
		least := p.aim()
		try := func(placed []placement, what string) {
			var r ranks
			r.load(s, p.loads.heldTokens, p.set.watermark, 0)
			for _, a := range placed {
				c := &p.candidates.all[a.candidate]
				if int(a.rank) == p.ranks.reserved || !r.fits(int(a.rank), c.tokens) {
					return
				}
				r.charge(int(a.rank), c.tokens)
			}
			require.Greater(t, p.worth(p.rebuilt(s, placed), placed), least-minImprovement, what)
		}
		for i, a := range p.placed {
			other := slices.Clone(p.placed)
			for _, who := range p.unplaced {
				if !p.candidates.all[a.candidate].overdue {
					other[i].candidate = who
					try(other, "another candidate in its place")
				}
			}
			other[i].candidate = a.candidate
			for j := i + 1; j < len(other); j++ {
				other[i].rank, other[j].rank = other[j].rank, other[i].rank
				try(other, "a swap")
				other[i].rank, other[j].rank = other[j].rank, other[i].rank
			}
			for g := range s.Workers {
				other[i].rank = int32(g)
				try(other, "another rank")
			}
		}
	})
}

func TestLoadsAreThoseOfTheText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
		if !p.beginRound(s) {
			return
		}
		p.place(s)
		growth := math.Trunc(s.MeanOutput / 4)
		loads := make([]float64, len(s.Workers))
		for g, w := range s.Workers {
			loads[g] = float64(w.Others)
			for _, q := range w.Running {
				loads[g] += float64(q.Prompt) + float64(q.Generated) - float64(q.KVElsewhere) + growth
			}
		}
		for _, a := range p.placed {
			loads[a.rank] += float64(s.Pool[p.candidates.all[a.candidate].entry].Prompt) + growth
		}
		sum := int64(0)
		for g, x := range p.loads.load {
			if cost := s.Workers[g].Cost; cost > 0 {
				loads[g] *= float64(cost)
			}
			sum += x
		}
		want := Cost(loads)
		require.InDelta(t, want, math.Ldexp(float64(int64(len(loads))*p.loads.peak()-sum), -fixedBits), 1e-4*max(1, want)+1)
	})
}

// naiveStart places one after the other what changes the cost least, by
// rebuilding everything for every pair; worker says which rank's turn it is.
func naiveStart(p *evenkeel, s *Snapshot, worker func(l *loads, r *ranks) int) (placed []placement) {
	var r ranks
	r.load(s, p.loads.heldTokens, p.set.watermark, 0)
	free := make([]bool, len(p.candidates.all))
	for len(placed) < p.wanted {
		l := p.rebuilt(s, placed)
		turn := worker(l, &r)
		best, least := placement{candidate: none}, int64(0)
		for who := range p.candidates.all {
			for g := range s.Workers {
				c := &p.candidates.all[who]
				if free[who] || !r.fits(g, c.tokens) || turn != none && g != turn {
					continue
				}
				a := placement{int32(who), int32(g)}
				with := append(slices.Clone(placed), a)
				change := p.worth(p.rebuilt(s, with), with)
				tie := change == least && best.candidate == a.candidate && l.load[g] < l.load[best.rank]
				if best.candidate == none || change < least || tie {
					best, least = a, change
				}
			}
		}
		if best.candidate == none {
			if turn == none {
				return placed
			}
			r.closeRank(turn)
			if r.openSlots == 0 {
				return placed
			}
			continue
		}
		free[best.candidate] = true
		r.charge(int(best.rank), p.candidates.all[best.candidate].tokens)
		placed = append(placed, best)
	}
	return placed
}

func TestStartsAreThoseOfTheText(t *testing.T) {
	lowest := func(l *loads, r *ranks) int {
		best := none
		for g := range r.free {
			if r.free[g] > 0 && (best == none || l.load[g] < l.load[best]) {
				best = g
			}
		}
		return best
	}
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
		s.MaxAgeMs = 0
		for i := range s.Pool {
			s.Pool[i].Urgent = false
		}
		p.set.extraCandidates, p.set.workerFirstMax, p.set.bestPairMax = 100, 200, 200
		if !p.beginRound(s) {
			return
		}
		scarce := p.ranks.openSlots <= int64(len(s.Pool))
		p.place(s)
		turn := func(*loads, *ranks) int { return none }
		if scarce {
			turn = lowest
		}
		require.Equal(t, naiveStart(p, s, turn), slices.Clone(p.placed))
	})
}

func TestLongestFirstLevelsWhatIsHeldNow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
		s.MaxAgeMs = 0
		for i := range s.Pool {
			s.Pool[i].Urgent = false
		}
		if rapid.Bool().Draw(t, "many ranks") { // enough for a heap of some depth
			room := rapid.SliceOfN(rapid.Int64Range(100, 1000), 14, 14).Draw(t, "capacities")
			s.Workers, s.Pool = s.Workers[:0], s.Pool[:0]
			for g, capacity := range room {
				load := rapid.Int32Range(0, 400).Draw(t, "load")
				s.Workers = append(s.Workers,
					Worker{ID: int32(g), Up: true, Free: 1, Capacity: capacity, Running: []Request{{ID: uint64(g), Prompt: load}}})
				s.Pool = append(s.Pool, Entry{ID: uint64(100 + g), Prompt: rapid.Int32Range(1, 600).Draw(t, "prompt")})
			}
		}
		p.set.workerFirstMax, p.set.bestPairMax = 0, 0
		if !p.beginRound(s) {
			return
		}
		p.place(s)
		oldest := slices.Clone(s.Pool[:p.wanted])
		slices.SortStableFunc(oldest, func(a, b Entry) int { return cmp.Compare(b.Prompt, a.Prompt) })
		var r ranks
		r.load(s, p.loads.heldTokens, p.set.watermark, 0)
		loads := p.rebuilt(s, nil)
		for i, a := range p.placed {
			c := &p.candidates.all[a.candidate]
			if s.Workers[0].Capacity == 0 { // else what fits nowhere is passed by
				require.Equal(t, oldest[i].ID, s.Pool[c.entry].ID)
			}
			require.True(t, r.fits(int(a.rank), c.tokens))
			for g := range r.free {
				if r.fits(g, c.tokens) && g != int(a.rank) {
					x, y := loads.load[g], loads.load[a.rank]
					require.True(t, y < x || y == x && int(a.rank) < g, "rank %d holds less than rank %d", g, a.rank)
				}
			}
			r.charge(int(a.rank), c.tokens)
			loads.changeLoad(int(a.rank), p.candidates.loadOn(loads, a.candidate, int(a.rank)))
		}
	})
}
