package policy

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/predictor"
)

// drawOutlook makes a snapshot as drawSnapshot does, with all that evenkeel
// reads: a table of outputs, ids and slots, a step model.
func drawOutlook(t *rapid.T) *Snapshot {
	s := drawSnapshot(t)
	s.Outlook = predictor.NewSurvival(rapid.SliceOfN(rapid.Int32Range(1, 60), 1, 30).Draw(t, "outputs"))
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
	v := joint
	v.mode = mode(rapid.IntRange(0, int(modeNow)).Draw(t, "mode"))
	v.samples = rapid.SampledFrom([]int{1, 3, 4}).Draw(t, "samples")
	v.horizon = rapid.SampledFrom([]int{0, 5, 64, auto}).Draw(t, "horizon")
	v.gamma = rapid.SampledFrom([]float64{auto, 0.5, 1}).Draw(t, "gamma")
	v.candidates = rapid.SampledFrom([]int{0, 2, 32}).Draw(t, "candidates")
	v.pairs = rapid.SampledFrom([]int{0, 24}).Draw(t, "pairs")
	v.refill = rapid.SampledFrom([]int{0, 200}).Draw(t, "refill")
	v.ageWeight = rapid.SampledFrom([]float64{0, 100}).Draw(t, "age weight")
	v.mix, v.kappa = rapid.IntRange(0, 3).Draw(t, "objective") == 0, 0.3
	v.hold = rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "hold")
	return newEvenkeel("evenkeel", &v).(*evenkeel)
}

// aim is what the search lowers: cost less what ages take off.
func (p *evenkeel) aim() int64 {
	return p.worth(&p.cols, p.placed)
}

// worth is the aim of placements that a board's columns have.
func (p *evenkeel) worth(t *columns, placed []placement) int64 {
	aim := int64(t.ranks) * t.ceiling()
	for _, a := range placed {
		aim -= p.pick.all[a.who].sum + p.pick.all[a.who].age
	}
	return aim
}

// rebuilt is the columns of the snapshot with the placements added, from scratch.
func (p *evenkeel) rebuilt(s *Snapshot, placed []placement) *columns {
	var t columns
	t.build(s, &p.look)
	for _, a := range placed {
		u, _ := p.pick.on(&t, a.who, int(a.rank), make([]int64, t.n))
		for c, x := range u {
			t.x[int(a.rank)*t.n+c] += x
			t.level[a.rank] += x
		}
	}
	for c := range t.n {
		t.rescan(c)
	}
	t.leads()
	return &t
}

// checkColumns: what was kept up to date is what a fresh look finds, and the
// slots and room that are left are those of the placements.
func (p *evenkeel) checkColumns(t *rapid.T, s *Snapshot, when string) {
	want, got := p.rebuilt(s, p.placed), &p.cols
	require.Equal(t, want.x, got.x, when)
	require.Equal(t, want.level, got.level, when)
	require.Equal(t, want.first.value, got.first.value, when)
	require.Equal(t, want.second.value, got.second.value, when)
	require.Equal(t, want.third.value, got.third.value, when)
	require.Equal(t, want.peak, got.peak, when)
	require.Equal(t, want.lead, got.lead, when)

	var r ranks
	r.load(s, got.held, p.set.watermark, 0)
	if p.ranks.reserved != none {
		r.close(p.ranks.reserved)
	}
	for _, a := range p.placed {
		c := &p.pick.all[a.who]
		r.exchange(int(a.rank), 0, c.tokens)
		if int(a.rank) != p.ranks.reserved {
			r.free[a.rank]--
			r.open--
		}
		require.True(t, c.placed, when)
	}
	require.Equal(t, r.room, p.ranks.room, when)
	require.Equal(t, r.free, p.ranks.free, when)
	require.Equal(t, r.open, p.ranks.open, when)
	for g, room := range r.room {
		if slices.ContainsFunc(p.placed, func(a placement) bool { return int(a.rank) == g }) {
			require.GreaterOrEqual(t, room, int64(0), when)
		}
		require.GreaterOrEqual(t, r.free[g], int32(0), when)
	}
}

func TestTheCostIsKeptUpToDate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		if !p.measure(s) {
			return
		}
		p.checkColumns(t, s, "before")
		p.place(s)
		p.checkColumns(t, s, "after the start")
		if p.set.mix {
			p.cols.startMix(p.set.kappa)
		}
		if len(p.placed) > 0 && p.ranks.reserved == none && rapid.IntRange(0, 4).Draw(t, "reserve") == 0 {
			p.ranks.reserved = int(p.placed[len(p.placed)-1].rank)
			p.ranks.close(p.ranks.reserved)
		}
		before, kept := p.aim(), int64(0)
		if p.ranks.reserved != none {
			kept = p.ranks.room[p.ranks.reserved]
		}
		p.improve(p.budget(s))
		p.checkColumns(t, s, "after improving")
		if p.ranks.reserved != none {
			require.Equal(t, kept, p.ranks.room[p.ranks.reserved], "a reserved rank's room is to grow")
		}
		if p.set.mix {
			p.cols.startMix(p.set.kappa)
		}
		require.LessOrEqual(t, p.aim(), before, "improving never makes it worse")
		p.cols.endMix()
		p.fillUp(s)
		p.checkColumns(t, s, "after filling up")
	})
}

func TestThereIsNoBetterMoveAtTheEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		s.Budget, p.set.budget, p.set.mix = 0, math.MaxInt32, false
		if !p.measure(s) {
			return
		}
		p.place(s)
		p.improve(p.budget(s))
		least := p.aim()
		try := func(placed []placement, what string) {
			var r ranks
			r.load(s, p.cols.held, p.set.watermark, 0)
			for _, a := range placed {
				c := &p.pick.all[a.who]
				if int(a.rank) == p.ranks.reserved || !r.fits(int(a.rank), c.tokens) {
					return
				}
				r.charge(int(a.rank), c.tokens)
			}
			require.Greater(t, p.worth(p.rebuilt(s, placed), placed), least-worthwhile, what)
		}
		for i, a := range p.placed {
			other := slices.Clone(p.placed)
			for _, who := range p.spare {
				if !p.pick.all[a.who].late {
					other[i].who = who
					try(other, "another candidate in its place")
				}
			}
			other[i].who = a.who
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

// naiveAhead is what a request contributes to each column, in the
// plainest form.
func naiveAhead(p *evenkeel, o Outlook, id uint64, held int64, age int32) []float64 {
	var row []float64
	grid := Grid(p.look.horizon)
	switch p.look.mode {
	case modeNow:
		return []float64{float64(held + p.look.growth)}
	case modeMean:
		for _, h := range grid {
			row = append(row, Expected(o, held, int(age), h))
		}
		return row
	}
	n := p.look.scenarios
	ends := make([]float64, n)
	for at := age - age%redrawEvery; ; {
		soonest := math.Inf(1)
		for z := range ends {
			u := phaseOf(id) + float64(z)*(1/float64(n))
			if u >= 1 {
				u--
			}
			ends[z] = float64(at) + o.Resid(int(at), u)
			soonest = min(soonest, ends[z])
		}
		if float64(age) < soonest {
			break
		}
		at = int32(soonest)
	}
	for _, end := range ends {
		for _, h := range grid {
			x := 0.0
			if float64(h) < end-float64(age) {
				x = float64(held + int64(h))
			}
			row = append(row, x)
		}
	}
	return row
}

func TestColumnsAreThoseOfTheText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		for range 3 { // the cache of one round serves the next
			if !p.measure(s) {
				return
			}
			p.place(s)
			weights := Weights(p.look.horizon, p.look.gamma)
			var all []float64 // of each column
			for range p.look.scenarios {
				for _, w := range weights {
					all = append(all, w/float64(p.look.scenarios))
				}
			}
			loads := make([][]float64, len(s.Workers))
			add := func(g int, row []float64) {
				for c, x := range row {
					loads[g][c] += x * float64(p.cols.cost[g])
				}
			}
			for g, w := range s.Workers {
				loads[g] = make([]float64, len(all))
				for _, q := range w.Running {
					add(g, naiveAhead(p, s.Outlook, q.ID, int64(q.Prompt)+int64(q.Generated)-int64(q.Away), q.Age))
				}
			}
			for _, a := range p.placed {
				e := s.Pool[p.pick.all[a.who].entry]
				add(int(a.rank), naiveAhead(p, s.Outlook, e.ID, int64(e.Prompt), e.Age))
			}
			want, sum := Cost(loads, all), int64(0)
			for _, level := range p.cols.level {
				sum += level
			}
			require.InDelta(t, want, math.Ldexp(float64(int64(p.cols.ranks)*p.cols.peak-sum), -fixedBits), 1e-4*max(1, want)+1)
			for g := range s.Workers {
				for i := range s.Workers[g].Running {
					s.Workers[g].Running[i].Age++
					s.Workers[g].Running[i].Generated++
				}
			}
		}
	})
}

// naiveStart places one after the other what changes the cost least, by
// rebuilding everything for every pair; worker says which rank's turn it is.
func naiveStart(p *evenkeel, s *Snapshot, worker func(t *columns, r *ranks) int) (placed []placement) {
	var r ranks
	r.load(s, p.cols.held, p.set.watermark, 0)
	free := make([]bool, len(p.pick.all))
	for len(placed) < p.wanted {
		t := p.rebuilt(s, placed)
		turn := worker(t, &r)
		best, least := placement{who: none}, int64(0)
		for who := range p.pick.all {
			for g := range s.Workers {
				c := &p.pick.all[who]
				if free[who] || !r.fits(g, c.tokens) || turn != none && g != turn {
					continue
				}
				a := placement{int32(who), int32(g)}
				with := append(slices.Clone(placed), a)
				change := p.worth(p.rebuilt(s, with), with)
				tie := change == least && best.who == a.who && t.level[g] < t.level[best.rank]
				if best.who == none || change < least || tie {
					best, least = a, change
				}
			}
		}
		if best.who == none {
			if turn == none {
				return placed
			}
			r.close(turn)
			if r.open == 0 {
				return placed
			}
			continue
		}
		free[best.who] = true
		r.charge(int(best.rank), p.pick.all[best.who].tokens)
		placed = append(placed, best)
	}
	return placed
}

func TestStartsAreThoseOfTheText(t *testing.T) {
	lowest := func(t *columns, r *ranks) int {
		best := none
		for g := range r.free {
			if r.free[g] > 0 && (best == none || t.level[g] < t.level[best]) {
				best = g
			}
		}
		return best
	}
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		s.MaxAgeMs = 0
		for i := range s.Pool {
			s.Pool[i].Urgent = false
		}
		p.set.candidates, p.set.refill, p.set.pairs = 100, 200, 200
		if !p.measure(s) {
			return
		}
		scarce := p.ranks.open <= int64(len(s.Pool))
		p.place(s)
		turn := func(*columns, *ranks) int { return none }
		if scarce {
			turn = lowest
		}
		require.Equal(t, naiveStart(p, s, turn), slices.Clone(p.placed))
	})
}

func TestLongestFirstLevelsWhatIsHeldNow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		s.MaxAgeMs = 0
		for i := range s.Pool {
			s.Pool[i].Urgent = false
		}
		if rapid.Bool().Draw(t, "many ranks") { // enough for a heap of some depth
			room := rapid.SliceOfN(rapid.Int64Range(100, 1000), 14, 14).Draw(t, "capacities")
			s.Workers, s.Pool = s.Workers[:0], s.Pool[:0]
			for g, capacity := range room {
				load := rapid.Int32Range(0, 400).Draw(t, "load")
				s.Workers = append(s.Workers, Worker{ID: int32(g), Up: true, Free: 1, Capacity: capacity, Running: []Request{{ID: uint64(g), Prompt: load}}})
				s.Pool = append(s.Pool, Entry{ID: uint64(100 + g), Prompt: rapid.Int32Range(1, 600).Draw(t, "prompt")})
			}
		}
		p.set.refill, p.set.pairs = 0, 0
		if !p.measure(s) {
			return
		}
		p.place(s)
		oldest := slices.Clone(s.Pool[:p.wanted])
		slices.SortStableFunc(oldest, func(a, b Entry) int { return cmp.Compare(b.Prompt, a.Prompt) })
		var r ranks
		r.load(s, p.cols.held, p.set.watermark, 0)
		cols := p.rebuilt(s, nil)
		for i, a := range p.placed {
			c := &p.pick.all[a.who]
			if s.Workers[0].Capacity == 0 { // else what fits nowhere is passed by
				require.Equal(t, oldest[i].ID, s.Pool[c.entry].ID)
			}
			require.True(t, r.fits(int(a.rank), c.tokens))
			for g := range r.free {
				if r.fits(g, c.tokens) && g != int(a.rank) {
					x, y := cols.row(g)[0], cols.row(int(a.rank))[0]
					require.True(t, y < x || y == x && int(a.rank) < g, "rank %d holds less than rank %d", g, a.rank)
				}
			}
			u, sum := p.pick.on(cols, a.who, int(a.rank), make([]int64, cols.n))
			r.charge(int(a.rank), c.tokens)
			cols.shift(int(a.rank), u, p.pick.nothing, sum)
		}
	})
}
