package policy

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawSnapshot makes small fleets of every kind: unlimited and limited ranks,
// unequal ones, full, overfull and down ones; few distinct lengths make ties.
func drawSnapshot(t *rapid.T) *Snapshot {
	s := &Snapshot{MaxAgeMs: rapid.SampledFrom([]float32{0, 500, 3000}).Draw(t, "max age")}
	longest := rapid.SampledFrom([]int32{4, 60, 9000}).Draw(t, "longest")
	limited, unequal := rapid.Bool().Draw(t, "limited"), rapid.Bool().Draw(t, "unequal")
	id := int32(0)
	for range rapid.IntRange(1, 6).Draw(t, "workers") {
		id += rapid.Int32Range(1, 3).Draw(t, "id step")
		w := Worker{ID: id, Free: rapid.Int32Range(-2, 7).Draw(t, "free"), Up: rapid.IntRange(0, 9).Draw(t, "up") > 0}
		if limited {
			w.Capacity = rapid.Int64Range(1, int64(longest)*8).Draw(t, "capacity")
		}
		if unequal {
			w.Cost = rapid.SampledFrom([]float32{0, 0.5, 1, 1.25}).Draw(t, "cost")
		}
		for range rapid.IntRange(0, 4).Draw(t, "running") {
			w.Running = append(w.Running, Request{
				Prompt:    rapid.Int32Range(0, longest).Draw(t, "prompt"),
				Generated: rapid.Int32Range(0, 20).Draw(t, "generated"),
			})
			if q := &w.Running[len(w.Running)-1]; rapid.IntRange(0, 3).Draw(t, "strays") == 0 {
				q.KVElsewhere = rapid.Int32Range(0, q.Prompt+q.Generated).Draw(t, "away")
			}
		}
		s.Workers = append(s.Workers, w)
	}
	for i := range rapid.IntRange(0, 14).Draw(t, "pool") {
		s.Pool = append(s.Pool, Entry{
			ID: uint64(100 + i), Prompt: rapid.Int32Range(1, longest).Draw(t, "prompt"),
			WaitMs: rapid.SampledFrom([]float32{0, 400, 600, 3000, 5000}).Draw(t, "wait"),
			Urgent: rapid.IntRange(0, 9).Draw(t, "urgent") == 0,
		})
	}
	return s
}

func clone(s *Snapshot) *Snapshot {
	c := *s
	c.Workers = append([]Worker(nil), s.Workers...)
	for i := range c.Workers {
		c.Workers[i].Running = append([]Request(nil), s.Workers[i].Running...)
	}
	c.Pool = append([]Entry(nil), s.Pool...)
	return &c
}

// drawGreedy sets what a user may set; the value keeps its scratch, for that of
// one round must not reach the next.
func drawGreedy(t *rapid.T, p *greedy) {
	p.window = rapid.IntRange(1, 12).Draw(t, "window")
	p.theta = rapid.SampledFrom([]int64{0, 1, 4, 1000, thetaIsRankCount}).Draw(t, "theta")
	p.slotsFirst = rapid.Bool().Draw(t, "queue=capacity")
	p.longestFirst = rapid.Bool().Draw(t, "order=desc")
	p.overdueFirst = rapid.IntRange(0, 4).Draw(t, "guard") > 0
	p.watermark = rapid.SampledFrom([]float64{0, 0.05, 0.1}).Draw(t, "watermark")
}

func TestBR0IsTheRoundOfTheText(t *testing.T) {
	reused := newBR0("", &commonDefaults).(*greedy)
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		drawGreedy(t, reused)
		require.Equal(t, naiveGreedy(reused, s), reused.Decide(s, nil))
	})
}

func TestBRHIsTheRoundOfTheText(t *testing.T) {
	reused := newBRH("", &brhDefaults).(*greedy)
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		drawGreedy(t, reused)
		a := reused.lookahead
		a.horizon = rapid.IntRange(0, 12).Draw(t, "horizon")
		a.alpha = rapid.SampledFrom([]float64{0.5, 1, 2}).Draw(t, "alpha")
		a.beta = rapid.SampledFrom([]float64{0, 0.5, 1, 4, 48}).Draw(t, "beta")
		a.gamma = rapid.SampledFrom([]float64{0, 0.5, 0.9, 1}).Draw(t, "gamma")
		for g := range s.Workers {
			for i := range s.Workers[g].Running {
				s.Workers[g].Running[i].Rhat = rapid.SampledFrom([]float32{0, 1, 1.5, 3, 3.2, 7, 12}).Draw(t, "rhat")
			}
		}
		want, got := naiveGreedy(reused, s), reused.Decide(s, nil)
		require.Equal(t, pairs(want), pairs(got))
		for i := range got {
			require.Equal(t, want[i].Stage, got[i].Stage)
			require.InDelta(t, want[i].Score, got[i].Score, 1e-9*max(1, math.Abs(want[i].Score)))
		}
	})
}

func TestBRHWithoutHorizonIsBR0(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		br0, err := Parse("br0")
		require.NoError(t, err)
		brh, err := Parse(fmt.Sprintf("brh:horizon=0,beta=%d", len(s.Workers)))
		require.NoError(t, err)
		require.Equal(t, br0.Decide(s, nil), brh.Decide(s, nil))
	})
}

// level returns workers of equal load, each with so many free slots.
func level(n int, tokens int32, free int32) []Worker {
	w := make([]Worker, n)
	for i := range w {
		w[i] = Worker{ID: int32(i), Free: free, Up: true, Running: []Request{{Prompt: tokens}}}
	}
	return w
}

func decide(t *testing.T, spec string, s *Snapshot) []Assignment {
	t.Helper()
	p, err := Parse(spec)
	require.NoError(t, err)
	return p.Decide(s, nil)
}

func pairs(as []Assignment) (got [][2]int) {
	for _, a := range as {
		got = append(got, [2]int{int(a.Entry), int(a.Worker)})
	}
	return got
}

func TestRoundOfBR0(t *testing.T) {
	half := level(2, 1000, 1)
	half[0].Running[0].Prompt = 400 // margin 600
	for _, c := range []struct {
		name string
		spec string
		s    Snapshot
		want [][2]int
	}{
		{
			"the prompt that fills the margin goes to the emptier rank", "br0:theta=0",
			Snapshot{Workers: half, Pool: []Entry{{ID: 1, Prompt: 100}, {ID: 2, Prompt: 600}}},
			[][2]int{{2, 0}, {1, 1}},
		},
		{
			"a group of one is first come, first served", "br0",
			Snapshot{Workers: level(1, 500, 2), Pool: []Entry{{ID: 1, Prompt: 900}, {ID: 2, Prompt: 10}, {ID: 3, Prompt: 20}}},
			[][2]int{{1, 0}, {2, 0}},
		},
		{
			"a group of one is first come, first served, also in the stage of singles", "br0:theta=0",
			Snapshot{Workers: level(1, 500, 2), Pool: []Entry{{ID: 1, Prompt: 900}, {ID: 2, Prompt: 10}, {ID: 3, Prompt: 20}}},
			[][2]int{{1, 0}, {2, 0}},
		},
		{
			"no slot idles while anyone waits, even where every score is negative", "br0",
			Snapshot{Workers: level(2, 500, 1), Pool: []Entry{{ID: 1, Prompt: 9000}}},
			[][2]int{{1, 0}},
		},
		{
			"a rank that is down takes nothing", "br0",
			Snapshot{Workers: []Worker{{ID: 0, Free: 4}, {ID: 1, Free: 1, Up: true}}, Pool: []Entry{{ID: 1, Prompt: 5}, {ID: 2, Prompt: 5}}},
			[][2]int{{1, 1}},
		},
		{
			"the watermark keeps a share of the KV capacity empty", "br0:watermark=0.1",
			Snapshot{Workers: []Worker{{ID: 0, Free: 4, Up: true, Capacity: 1000}}, Pool: []Entry{{ID: 1, Prompt: 901}, {ID: 2, Prompt: 900}}},
			[][2]int{{2, 0}},
		},
		{
			"an overdue entry goes first", "br0",
			Snapshot{Workers: level(1, 500, 1), MaxAgeMs: 1000, Pool: []Entry{{ID: 1, Prompt: 5, WaitMs: 900}, {ID: 2, Prompt: 5000, WaitMs: 1000}}},
			[][2]int{{2, 0}},
		},
		{
			"an urgent entry is overdue with the guard off", "br0",
			Snapshot{Workers: level(1, 500, 1), Pool: []Entry{{ID: 1, Prompt: 5}, {ID: 2, Prompt: 5000, Urgent: true}}},
			[][2]int{{2, 0}},
		},
		{
			"the paper knows no guard", "br0:paper",
			Snapshot{Workers: level(2, 500, 1), MaxAgeMs: 1,
				Pool: []Entry{{ID: 1, Prompt: 5, WaitMs: 900}, {ID: 2, Prompt: 5}, {ID: 3, Prompt: 5000, Urgent: true}}},
			[][2]int{{1, 0}, {2, 1}},
		},
		{
			"a rank is reserved for an overdue entry that fits nowhere", "br0:watermark=0",
			Snapshot{
				Workers: []Worker{
					{ID: 0, Free: 2, Up: true, Capacity: 1000, Running: []Request{{Prompt: 500}}},
					{ID: 1, Free: 2, Up: true, Capacity: 1000, Running: []Request{{Prompt: 700}}},
				},
				MaxAgeMs: 1000,
				Pool:     []Entry{{ID: 1, Prompt: 800, WaitMs: 2000}, {ID: 2, Prompt: 400}, {ID: 3, Prompt: 300}},
			},
			[][2]int{{3, 1}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, pairs(decide(t, c.spec, &c.s)))
		})
	}
}

func TestProjectIsTheSumOfTheText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		horizon := rapid.IntRange(0, 20).Draw(t, "horizon")
		running := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Request {
			prompt := rapid.Int32Range(0, 1<<20).Draw(t, "prompt")
			return Request{
				Prompt: prompt, Generated: rapid.Int32Range(0, 1000).Draw(t, "generated"),
				Rhat: rapid.Float32Range(1, float32(max(1, horizon))).Draw(t, "rhat"), KVElsewhere: rapid.Int32Range(0, prompt).Draw(t, "away"),
			}
		}), 0, 12).Draw(t, "running")
		got := make([]int64, horizon+1)
		Project(got, running)
		for h := range got {
			var want int64
			for _, r := range running {
				if float32(h) < r.Rhat || r.Rhat >= float32(horizon) {
					want += int64(r.Prompt) + int64(r.Generated) - int64(r.KVElsewhere) + int64(h)
				}
			}
			require.Equal(t, want, got[h], "step %d", h)
		}
	})
}

func TestMarginsAreFreshAfterEveryAdmission(t *testing.T) {
	var e envelope
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		for g := range s.Workers {
			for i := range s.Workers[g].Running {
				s.Workers[g].Running[i].Rhat = rapid.Float32Range(1, 5).Draw(t, "rhat")
			}
		}
		horizon := rapid.IntRange(0, 5).Draw(t, "horizon")
		e.build(s, horizon)
		added := make([]int64, len(s.Workers))
		for range rapid.IntRange(0, 5).Draw(t, "admissions") {
			g := rapid.IntRange(0, len(s.Workers)-1).Draw(t, "rank")
			size := rapid.Int64Range(0, 10_000).Draw(t, "size")
			e.addLoad(g, size)
			added[g] += size
			e.minMargin(rapid.IntRange(0, len(s.Workers)-1).Draw(t, "asked between"))
		}
		var start envelope
		start.build(s, horizon)
		for g := range s.Workers {
			least := int64(1) << 62
			for h := range horizon + 1 {
				var top int64
				for o := range s.Workers {
					top = max(top, start.loadsOf(o)[h]+added[o])
				}
				least = min(least, top-start.loadsOf(g)[h]-added[g])
			}
			require.Equal(t, least, e.minMargin(g), "rank %d", g)
		}
	})
}
