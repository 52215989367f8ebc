package policy

import (
	"cmp"
	"fmt"
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
	v.mix = rapid.IntRange(0, 3).Draw(t, "objective") == 0
	v.hold = rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "hold")
	return newEvenkeel("evenkeel", &v).(*evenkeel)
}

// aim is what the search lowers: cost less what ages take off.
func (p *evenkeel) aim() int64 {
	aim := p.cols.total()
	for _, a := range p.placed {
		aim -= p.pick.all[a.who].age
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
			t.sum += x
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
	require.Equal(t, want.sum, got.sum, when)
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
			aim := p.rebuilt(s, placed).total()
			for _, a := range placed {
				c := &p.pick.all[a.who]
				if int(a.rank) == p.ranks.reserved || !r.takes(int(a.rank), c.tokens) {
					return
				}
				r.charge(int(a.rank), c.tokens)
				aim -= c.age
			}
			require.Greater(t, aim, least-worthwhile, what)
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

// naiveAhead is what a request contributes to each column, by the words of
// algorithm 6.1.
func naiveAhead(p *evenkeel, o Outlook, id uint64, held int64, age int32) []float64 {
	var row []float64
	grid := Grid(p.look.horizon)
	switch p.look.mode {
	case modeNow:
		return []float64{float64(held)}
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
					add(g, naiveAhead(p, s.Outlook, q.ID, int64(q.Prompt)+int64(q.Generated), q.Age))
				}
			}
			for _, a := range p.placed {
				e := s.Pool[p.pick.all[a.who].entry]
				add(int(a.rank), naiveAhead(p, s.Outlook, e.ID, int64(e.Prompt), e.Age))
			}
			want := Cost(loads, all)
			require.InDelta(t, want, math.Ldexp(float64(p.cols.total()), -fixedBits), 1e-4*max(1, want)+1)
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
				if free[who] || !r.takes(g, c.tokens) || turn != none && g != turn {
					continue
				}
				a := placement{int32(who), int32(g)}
				change := p.rebuilt(s, append(slices.Clone(placed), a)).total() - c.age
				tie := change == least && best.who == a.who && p.look.mode == modeNow && t.level[g] < t.level[best.rank]
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
			require.True(t, r.takes(int(a.rank), c.tokens))
			for g := range r.free {
				if r.takes(g, c.tokens) && g != int(a.rank) {
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

func TestEvenkeelKeepsTheRulesWhateverItSees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		before := clone(s)
		got := p.Decide(s, nil)
		require.Equal(t, before, s, "the snapshot is the board's")
		checkRules(t, p, s, got)
		again := newEvenkeel("", &p.set).(*evenkeel)
		require.Equal(t, got, again.Decide(s, nil), "a fresh policy decides the same")
		assigned, left := Explain(p, s)
		require.Equal(t, got, assigned)
		require.Len(t, left, len(s.Pool)-len(got))
	})
}

func TestADecisionDependsOnTheSnapshotAlone(t *testing.T) {
	used := newClosedLoop(6, 8, 40)
	p, err := Parse("evenkeel")
	require.NoError(t, err)
	for round := range 200 {
		got := p.Decide(&used.s, nil)
		fresh, err := Parse("evenkeel")
		require.NoError(t, err)
		require.Equal(t, fresh.Decide(&used.s, nil), got, "round %d", round)
		used.apply(got)
		used.step()
	}
}

func TestUntilItCanLookAheadItLevelsNow(t *testing.T) {
	l := newClosedLoop(12, 20, 80)
	for range 8 {
		l.step()
	}
	now := decide(t, "evenkeel:mode=now", &l.s)
	ahead := decide(t, "evenkeel", &l.s)
	require.NotEqual(t, pairs(now), pairs(ahead))
	require.Equal(t, now, decide(t, "evenkeel:predictor=none", &l.s))
	require.Equal(t, now, decide(t, "evenkeel:mode=oracle", &l.s), "nobody knows the ends here")

	s := l.s
	s.Budget = fewEvaluations
	require.Equal(t, pairs(ahead), pairs(decide(t, "evenkeel", &s)))
	s.Budget--
	require.Equal(t, pairs(decide(t, "evenkeel:mode=now,budget=499", &s)), pairs(decide(t, "evenkeel", &s)), "ticks are too dear")
	s.Budget = 0
	s.Outlook = nil
	require.Equal(t, now, decide(t, "evenkeel", &s), "too few outputs were seen")
}

// known is a table with the true ends.
type known struct {
	*predictor.Survival
	output map[uint64]int32
}

func (k known) Left(id uint64, age int) int { return int(k.output[id]) - age }

func TestTheOraclePlacesForTheTrueEnds(t *testing.T) {
	output := map[uint64]int32{1: 2, 2: 500, 7: 500}
	s := &Snapshot{
		Outlook: known{predictor.NewSurvival([]int32{100}), output},
		Workers: []Worker{
			{ID: 0, Up: true, Free: 1, Running: []Request{{ID: 1, Prompt: 3000, Generated: 1, Age: 1, Slot: 0}}}, // gone after this step
			{ID: 1, Up: true, Free: 1, Running: []Request{{ID: 2, Prompt: 2900, Generated: 1, Age: 1, Slot: 1}}},
		},
		Pool: []Entry{{ID: 7, Prompt: 2500}},
	}
	require.Equal(t, [][2]int{{7, 1}}, pairs(decide(t, "evenkeel:mode=now", s)))
	require.Equal(t, [][2]int{{7, 0}}, pairs(decide(t, "evenkeel:mode=oracle", s)))
}

func TestAnAdmissionThatCostsMoreThanItGivesWaits(t *testing.T) {
	s := &Snapshot{
		C0Ms: 50, C1Ms: 1e-3, StepMs: 60,
		Workers: level(4, 10_000, 1),
		Pool:    []Entry{{ID: 1, Prompt: 90_000, WaitMs: 60}, {ID: 2, Prompt: 300}},
	}
	for g := range s.Workers {
		s.Workers[g].Running[0].Generated = 1
	}
	p, err := Parse("evenkeel")
	require.NoError(t, err)
	got, left := Explain(p, s)
	require.Equal(t, [][2]int{{2, 0}}, pairs(got))
	require.Equal(t, []Left{{1, "held back: it would lengthen every step by 89.7 ms for 6.03 ms of use"}}, left)
	require.Equal(t, 1, Held(p), "so that the dispatcher ticks once a step")
	require.True(t, NeedsOf(p, nil).Holds)

	for _, c := range []struct {
		name string
		set  func(*Snapshot)
		spec string
	}{
		{"but not for ever", func(s *Snapshot) { s.Pool[0].WaitMs = 20 * 60 }, "evenkeel"},
		{"but not when it is urgent", func(s *Snapshot) { s.Pool[0].Urgent = true }, "evenkeel"},
		{"nor when nobody knows what a token costs", func(s *Snapshot) { s.C1Ms = 0 }, "evenkeel"},
		{"nor when holding back is off", func(*Snapshot) {}, "evenkeel:hold=0"},
		{"nor when there is too little to lose", func(*Snapshot) {}, "evenkeel:hold=8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := clone(s)
			c.set(s)
			require.Len(t, decide(t, c.spec, s), 2)
		})
	}
	_, left = Explain(p, &Snapshot{Workers: s.Workers, Pool: nil})
	require.Empty(t, left)
	require.Zero(t, Held(p))
}

func TestAnOverdueEntryIsPlacedAndStays(t *testing.T) {
	s := &Snapshot{
		Workers: level(2, 10_000, 1), MaxAgeMs: 1000, StepMs: 50,
		Pool: []Entry{{ID: 1, Prompt: 100}, {ID: 2, Prompt: 100}, {ID: 3, Prompt: 90_000, WaitMs: 2000}},
	}
	got := decide(t, "evenkeel", s)
	require.Contains(t, pairs(got), [2]int{3, 0})
	require.Len(t, got, 2)
	for _, a := range got {
		require.Equal(t, a.Entry == 3, a.Stage == stageGuard)
	}
}

func TestARankIsReservedForAnOverdueEntryThatFitsNowhere(t *testing.T) {
	s := &Snapshot{
		Workers: []Worker{
			{ID: 0, Free: 2, Up: true, Capacity: 1000, Running: []Request{{Prompt: 500}}},
			{ID: 1, Free: 2, Up: true, Capacity: 1000, Running: []Request{{Prompt: 700}}},
		},
		MaxAgeMs: 1000,
		Pool:     []Entry{{ID: 1, Prompt: 800, WaitMs: 2000}, {ID: 2, Prompt: 400}, {ID: 3, Prompt: 300}},
	}
	p, err := Parse("evenkeel:watermark=0")
	require.NoError(t, err)
	got, left := Explain(p, s)
	require.Equal(t, [][2]int{{3, 1}}, pairs(got))
	require.Equal(t, []Left{
		{1, "overdue, but fits no rank with a free slot; worker 0 is reserved for it"},
		{2, "worker 0 is reserved for an overdue entry, 1"},
	}, left)
}

func TestTheMostOverdueReservesBeforeOthersTakeItsRoom(t *testing.T) {
	s := &Snapshot{
		Workers: []Worker{
			{ID: 0, Free: 1, Up: true, Capacity: 1000, Running: []Request{{Prompt: 500}}},
			{ID: 1, Free: 1, Up: true, Capacity: 1000, Running: []Request{{Prompt: 600}}},
		},
		MaxAgeMs: 1000,
		Pool:     []Entry{{ID: 1, Prompt: 800, WaitMs: 3000}, {ID: 2, Prompt: 450, WaitMs: 2000}, {ID: 3, Prompt: 100}},
	}
	require.Equal(t, [][2]int{{3, 1}}, pairs(decide(t, "evenkeel:watermark=0", s)))
}

func TestWhatImprovingMakesRoomForIsPlaced(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &Snapshot{Outlook: predictor.NewSurvival([]int32{3, 30, 300})}
		for g := range rapid.IntRange(2, 3).Draw(t, "ranks") {
			s.Workers = append(s.Workers, Worker{
				ID: int32(g), Up: true, Free: rapid.Int32Range(1, 3).Draw(t, "free"), Capacity: 100,
				Running: []Request{{ID: uint64(900 + g), Prompt: rapid.Int32Range(0, 60).Draw(t, "load")}},
			})
		}
		for i := range rapid.IntRange(3, 9).Draw(t, "pool") {
			s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: rapid.Int32Range(5, 70).Draw(t, "prompt")})
		}
		got := decideRapid(t, "evenkeel:watermark=0,hold=0", s)
		after := s.after(got)
		for _, e := range s.Pool {
			if slices.ContainsFunc(got, func(a Assignment) bool { return a.Entry == e.ID }) {
				continue
			}
			for id, r := range after {
				require.False(t, r.free > 0 && r.held+int64(e.Prompt) <= 100, "entry %d waits, worker %d idles", e.ID, id)
			}
		}
	})
}

func decideRapid(t *rapid.T, spec string, s *Snapshot) []Assignment {
	p, err := Parse(spec)
	require.NoError(t, err)
	return p.Decide(s, nil)
}

func TestEntriesFurtherBackTakeSlotsThatNoCandidateFits(t *testing.T) {
	s := &Snapshot{Workers: []Worker{{ID: 0, Free: 3, Up: true, Capacity: 1000, Running: []Request{{Prompt: 100}}}}}
	for i := range 10 {
		s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: 500})
	}
	s.Pool = append(s.Pool, Entry{ID: 10, Prompt: 90}, Entry{ID: 11, Prompt: 80})
	for _, spec := range []string{"evenkeel:candidates=2,watermark=0", "evenkeel:candidates=2,refill=0,watermark=0"} {
		require.ElementsMatch(t, [][2]int{{0, 0}, {10, 0}, {11, 0}}, pairs(decide(t, spec, s)), spec)
	}
}

func TestLookingAheadDoesNotAllocate(t *testing.T) {
	for _, spec := range []string{"brh", "brh:paper", "evenkeel", "evenkeel:mode=mean", "evenkeel:mode=now", "evenkeel:objective=mix", "evenkeel:pairs=0", "evenkeel:refill=0"} {
		t.Run(spec, func(t *testing.T) {
			l := newClosedLoop(24, 16, 200)
			p, err := Parse(spec)
			require.NoError(t, err)
			dst := make([]Assignment, 0, 1000)
			for range 200 { // scratch has seen its largest round
				l.apply(p.Decide(&l.s, dst[:0]))
				l.step()
			}
			require.Zero(t, testing.AllocsPerRun(50, func() {
				for g := range l.s.Workers {
					for i := range l.s.Workers[g].Running {
						l.s.Workers[g].Running[i].Age++
					}
				}
				dst = p.Decide(&l.s, dst[:0])
			}))
			require.NotEmpty(t, dst)
		})
	}
}

func TestItLevelsBetterThanOneRankAtATime(t *testing.T) {
	idle := map[string]float64{}
	for _, spec := range []string{"pjsq-kv", "br0", "evenkeel:mode=now", "evenkeel:mode=mean", "evenkeel"} {
		l := newClosedLoop(16, 16, 64)
		p, err := Parse(spec)
		require.NoError(t, err)
		for i := range 1200 {
			l.apply(p.Decide(&l.s, nil))
			if i >= 400 {
				idle[spec] += l.idle()
			}
			l.step()
		}
	}
	report := fmt.Sprint(idle)
	require.Less(t, idle["br0"], idle["pjsq-kv"], report)
	require.Less(t, idle["evenkeel"], 0.9*idle["br0"], report)
	t.Log(report)
}
