package policy

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestEvenkeelKeepsTheRulesWhateverItSees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawMeasured(t), drawEvenkeel(t)
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

// A rank of many requests grows faster than one of few that holds as much.
func TestARequestCountsForItsGrowthToo(t *testing.T) {
	many := Worker{ID: 0, Up: true, Free: 1}
	for i := range 10 {
		many.Running = append(many.Running, Request{ID: uint64(i), Prompt: 90, Generated: 1, Age: 1})
	}
	few := Worker{ID: 1, Up: true, Free: 1, Running: []Request{{ID: 90, Prompt: 1000, Generated: 1, Age: 1}}}
	s := &Snapshot{Workers: []Worker{many, few}, Pool: []Entry{{ID: 100, Prompt: 50}}}
	require.Equal(t, [][2]int{{100, 0}}, pairs(decide(t, "evenkeel", s)))
	s.MeanOutput = 400
	require.Equal(t, [][2]int{{100, 1}}, pairs(decide(t, "evenkeel", s)), "100 tokens each")
}

func TestARequestWeighsKVTokens(t *testing.T) {
	many := make([]Request, 8)
	for i := range many {
		many[i] = Request{Prompt: 1000, Generated: 1}
	}
	s := &Snapshot{
		Workers: []Worker{{ID: 0, Free: 1, Up: true, Running: many},
			{ID: 1, Free: 1, Up: true, Running: []Request{{Prompt: 12_000, Generated: 1}}}},
		Pool: []Entry{{ID: 1, Prompt: 1000}}, C0Ms: 10, C1Ms: 1e-3, RequestTokens: 2000,
	}
	for _, c := range []struct {
		name, spec string
		set        func(*Snapshot)
		rank       int
	}{
		{"the rank with fewer requests takes less time", "evenkeel", func(*Snapshot) {}, 1},
		{"nobody knows what a request takes", "evenkeel", func(s *Snapshot) { s.RequestTokens = 0 }, 0},
		{"ranks would run out of KV room before slots, but nothing fills them", "evenkeel", func(s *Snapshot) {
			for g := range s.Workers {
				s.Workers[g].Capacity, s.Workers[g].Free = 14_000, 4
			}
		}, 1},
		{"it is left out", "evenkeel:requests=false", func(*Snapshot) {}, 0},
		{"a policy of a paper levels KV tokens", "br0", func(*Snapshot) {}, 0},
		{"another one, too", "pjsq-kv", func(*Snapshot) {}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := clone(s)
			c.set(s)
			require.Equal(t, [][2]int{{1, c.rank}}, pairs(decide(t, c.spec, s)))
		})
	}
}

// Both ranks hold the same KV. What each holds once its room is full depends on how long the
// prompts are that fill it.
func TestWhereKVRoomIsShortTheRankWithManyRequestsGetsLongPrompts(t *testing.T) {
	many, few := make([]Request, 8), make([]Request, 2)
	for i := range many {
		many[i] = Request{Prompt: 1000, Generated: 1}
	}
	for i := range few {
		few[i] = Request{Prompt: 4000, Generated: 1}
	}
	s := &Snapshot{
		Workers: []Worker{{ID: 0, Free: 30, Up: true, Capacity: 14_000, Running: many},
			{ID: 1, Free: 30, Up: true, Capacity: 14_000, Running: few}},
		C0Ms: 10, C1Ms: 1e-3, RequestTokens: 2000,
	}
	for i, tokens := range []int32{4000, 500, 3000, 500, 500, 4000} {
		s.Pool = append(s.Pool, Entry{ID: uint64(i + 1), Prompt: tokens})
	}
	require.Equal(t, [][2]int{{1, 0}, {2, 1}, {3, 1}, {4, 1}, {5, 1}}, pairs(decide(t, "evenkeel", s)),
		"3 finds no room on 0, and 6 none at all")
	s.Pool[2].WaitMs, s.MaxAgeMs = 2000, 1000
	require.Equal(t, [][2]int{{3, 0}, {1, 1}, {2, 1}, {4, 1}, {5, 0}}, pairs(decide(t, "evenkeel", s)),
		"who is overdue comes first, and 1 finds no room on 0 then")
	s.Pool[2].Prompt = 12_000
	require.Equal(t, [][2]int{{1, 0}, {2, 0}, {4, 0}}, pairs(decide(t, "evenkeel", s)), "1 is kept for it")

	s.Pool = s.Pool[:1]
	require.Equal(t, [][2]int{{1, 1}}, pairs(decide(t, "evenkeel", s)),
		"what waits does not fill the room, so that the ranks are levelled as they are")
	for i := range 4000 {
		s.Pool = append(s.Pool, Entry{ID: uint64(i + 2), Prompt: 10})
	}
	s.Pool[0].Prompt = 15
	require.Len(t, decide(t, "evenkeel", s), 60, "slots are what is short")
}

func TestWhereKVRoomIsShortWhatFindsNoneStopsNoOther(t *testing.T) {
	s := &Snapshot{MaxAgeMs: 1000}
	for g := range 8 {
		s.Workers = append(s.Workers,
			Worker{ID: int32(g), Free: 90, Up: true, Capacity: 100_000, Running: []Request{{Prompt: 80_000, Generated: 1}}})
	}
	for i := range 400 {
		s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: 30_000, WaitMs: float32(i % 2 * 2000)})
	}
	for i := range 100 {
		s.Pool = append(s.Pool, Entry{ID: uint64(1000 + i), Prompt: 500})
	}
	require.Len(t, decide(t, "evenkeel", s), 100)
	for g := 4; g < 8; g++ {
		s.Workers[g].Up = false
	}
	require.Len(t, decide(t, "evenkeel", s), 3*29, "a rank is kept for who is overdue")
}

// Long prompts that find no room make a round look small. What it places is bounded all the same,
// and the next one goes on.
func TestWhereKVRoomIsShortARoundIsBounded(t *testing.T) {
	const ranks = 256
	s := &Snapshot{}
	for g := range ranks {
		s.Workers = append(s.Workers, Worker{ID: int32(g), Free: 500, Up: true, Capacity: 10_000, Running: []Request{{Prompt: 1000}}})
	}
	for i := range 2000 {
		s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: 20_000}, Entry{ID: uint64(10_000 + i), Prompt: 10})
	}
	require.Len(t, decide(t, "evenkeel", s), maxTightWork/ranks)
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
	require.Equal(t, []Unplaced{
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
		s := &Snapshot{MeanOutput: 111}
		for g := range rapid.IntRange(2, 3).Draw(t, "ranks") {
			s.Workers = append(s.Workers, Worker{
				ID: int32(g), Up: true, Free: rapid.Int32Range(1, 3).Draw(t, "free"), Capacity: 100,
				Running: []Request{{ID: uint64(900 + g), Prompt: rapid.Int32Range(0, 60).Draw(t, "load")}},
			})
		}
		for i := range rapid.IntRange(3, 9).Draw(t, "pool") {
			s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: rapid.Int32Range(5, 70).Draw(t, "prompt")})
		}
		got := decideRapid(t, "evenkeel:watermark=0", s)
		after := s.ranksAfter(got)
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
	for _, refill := range []int{0, 200} {
		v := evenkeelDefaults
		v.extraCandidates, v.watermark, v.workerFirstMax = 2, 0, refill
		require.ElementsMatch(t, [][2]int{{0, 0}, {10, 0}, {11, 0}}, pairs(newEvenkeel("", &v).Decide(s, nil)), "refill %d", refill)
	}
}

func TestDecidingWithAMeanDoesNotAllocate(t *testing.T) {
	for _, spec := range []string{"brh", "brh:paper", "evenkeel", "evenkeel:kappa=0"} {
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

func TestDecidingWhereKVRoomIsShortDoesNotAllocate(t *testing.T) {
	l := newClosedLoop(24, 16, 200)
	p, err := Parse("evenkeel")
	require.NoError(t, err)
	dst := make([]Assignment, 0, 1000)
	short := 0
	for i := range 400 {
		if i == 200 {
			for g := range l.s.Workers {
				l.s.Workers[g].Capacity = l.s.Workers[g].KVTokens() * 3 / 4
			}
		}
		l.apply(p.Decide(&l.s, dst[:0]))
		l.step()
		if q := p.(*evenkeel); q.beginRound(&l.s) {
			if _, is := q.roomIsScarce(&l.s); is {
				short++
			}
		}
	}
	require.Greater(t, short, 100)
	require.Zero(t, testing.AllocsPerRun(50, func() { dst = p.Decide(&l.s, dst[:0]) }))
}

func TestItLevelsBetterThanOneRankAtATime(t *testing.T) {
	idle := map[string]float64{}
	for _, spec := range []string{"pjsq-kv", "br0", "evenkeel"} {
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

func TestFewerAreLookedAtWhereManyArePlaced(t *testing.T) {
	for _, tc := range []struct{ allowed, placed, want int }{
		{128, 0, 128}, {128, 1, 128}, {128, 32, 128}, {128, 64, 64}, {128, 1000, leastExtra},
		{8, 1000, 8}, // never more than the settings allow
	} {
		v := evenkeelDefaults
		v.extraCandidates = tc.allowed
		require.Equal(t, tc.want, (&evenkeel{set: v}).extraCandidates(tc.placed), "%+v", tc)
	}
}
