package detect

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// alike are ranks whose engines say much the same.
func alike(n int) *Group {
	rng := rand.New(rand.NewPCG(5, 5))
	g := &Group{}
	for i := range n {
		g.Ranks = append(g.Ranks, Rank{ID: int32(i), Name: "d:" + string(rune('0'+i)), State: RankUp, InSteps: true})
		g.Gauges = append(g.Gauges, &Gauges{
			Running: 12 + float64(rng.IntN(6)), Waiting: float64(rng.IntN(2)), KVShare: 0.4 + 0.1*rng.Float64(), Preempted: 0,
			Computed: float64(rng.IntN(300)),
		})
	}
	return g
}

func TestRanksThatHaveMoreToDoThanTheOthers(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(g *Group)
		want   []string // rank and gauge
	}{
		{"none", func(*Group) {}, nil},
		{"many more requests", func(g *Group) { g.Gauges[5].Running = 61 }, []string{"d:5 running"}},
		{"fewer requests make no step longer", func(g *Group) { g.Gauges[5].Running = 0 }, nil},
		{"a queue of its own", func(g *Group) { g.Gauges[2].Waiting = 9 }, []string{"d:2 waiting"}},
		{"the farthest stands first", func(g *Group) { g.Gauges[2].KVShare, g.Gauges[3].Preempted = 0.95, 40 }, []string{"d:3 preempted", "d:2 kv_share"}},
		{"prompts that it computes", func(g *Group) { g.Gauges[7].Computed = 40_000 }, []string{"d:7 computed_tokens"}},
		{"ranks that are far apart anyway", func(g *Group) {
			for i := range g.Gauges {
				g.Gauges[i].Running = float64(10 * i)
			}
		}, nil},
		{"a rank that does not step", func(g *Group) { g.Gauges[5].Running, g.Ranks[5].InSteps = 61, false }, nil},
		{"a gauge that is not told", func(g *Group) {
			for i := range g.Gauges {
				g.Gauges[i].Running = -1
			}
			g.Gauges[5].Running = 61
		}, nil},
		{"nothing is known", func(g *Group) {
			for i := range g.Gauges {
				g.Gauges[i] = nil
			}
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := alike(8)
			tt.change(g)
			var got []string
			for _, d := range gaugesFarAboveOthers(g) {
				got = append(got, d.Rank+" "+d.Gauge)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// The incident of slow steps says where to look first.
func TestSlowStepsNameTheRanksThatDiffer(t *testing.T) {
	const slow = "Steps of group main, all on host d, take 215 ms, and took 43 ms at such a load before"
	g := alike(8)
	f := ranksOf(t, 8, true)
	f.said = func(i int) *Gauges { return g.Gauges[i] }
	f.pass(600, nil)
	g.Gauges[5].Running = 61
	_, d := f.pass(1, nil)
	require.Empty(t, d.Models[0].Groups[0].Differing, "while steps are as usual")
	f.stepMs *= 5
	_, d = f.pass(30, nil)
	require.Equal(t, slow+". Rank d:5 says that it runs 61 requests, and the middle one of the group 16", Find(&d, Ended{})[0].What)
	g.Gauges[5].Running = 14
	_, d = f.pass(1, nil)
	require.Contains(t, Find(&d, Ended{})[0].What,
		". The metrics of the engines name none of the 8 ranks that has much more to do than the others")
	f.said = nil
	_, d = f.pass(1, nil)
	require.NotContains(t, Find(&d, Ended{})[0].What, ".", "nothing is known")
}
