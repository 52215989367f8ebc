package live

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway"
	"evenkeel/gateway/timeline"
)

// alike are ranks whose engines say much the same.
func alike(n int) []Rank {
	rng := rand.New(rand.NewPCG(5, 5))
	all := make([]Rank, n)
	for i := range all {
		all[i] = Rank{ID: int32(i), Name: "d:" + string(rune('0'+i)), State: RankUp, Steps: true, gauges: &gateway.Gauges{
			Running: 12 + float64(rng.IntN(6)), Waiting: float64(rng.IntN(2)), KVShare: 0.4 + 0.1*rng.Float64(), Preempted: 0, Computed: float64(rng.IntN(300)),
		}}
	}
	return all
}

func TestRanksThatHaveMoreToDoThanTheOthers(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(ranks []Rank)
		want   []string // rank and gauge
	}{
		{"none", func([]Rank) {}, nil},
		{"many more requests", func(r []Rank) { r[5].gauges.Running = 61 }, []string{"d:5 running"}},
		{"fewer requests make no step longer", func(r []Rank) { r[5].gauges.Running = 0 }, nil},
		{"a queue of its own", func(r []Rank) { r[2].gauges.Waiting = 9 }, []string{"d:2 waiting"}},
		{"the farthest stands first", func(r []Rank) { r[2].gauges.KVShare, r[3].gauges.Preempted = 0.95, 40 }, []string{"d:3 preempted", "d:2 kv_share"}},
		{"prompts that it computes", func(r []Rank) { r[7].gauges.Computed = 40_000 }, []string{"d:7 computed_tokens"}},
		{"ranks that are far apart anyway", func(r []Rank) {
			for i := range r {
				r[i].gauges.Running = float64(10 * i)
			}
		}, nil},
		{"a rank that does not step", func(r []Rank) { r[5].gauges.Running, r[5].Steps = 61, false }, nil},
		{"a gauge that is not told", func(r []Rank) {
			for i := range r {
				r[i].gauges.Running = -1
			}
			r[5].gauges.Running = 61
		}, nil},
		{"nothing is known", func(r []Rank) {
			for i := range r {
				r[i].gauges = nil
			}
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ranks := alike(8)
			tt.change(ranks)
			var got []string
			for _, d := range differing(ranks) {
				got = append(got, d.Rank+" "+d.Gauge)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// The incident of slow steps says where to look first.
func TestSlowStepsNameTheRanksThatDiffer(t *testing.T) {
	const slow = "Steps of group main, all on host d, take 215 ms, and took 43 ms at such a load before"
	ranks := alike(8)
	f := ranksOf(t, 8, true)
	f.said = func(i int) *gateway.Gauges { return ranks[i].gauges }
	f.pass(600, nil)
	ranks[5].gauges.Running = 61
	_, d := f.pass(1, nil)
	require.Empty(t, d.Models[0].Groups[0].Differ, "while steps are as usual")
	f.stepMs *= 5
	_, d = f.pass(30, nil)
	require.Equal(t, slow+". Rank d:5 says that it runs 61 requests, and the middle one of the group 16", findingsOf(&d, timeline.Ended{})[0].What)
	ranks[5].gauges.Running = 14
	_, d = f.pass(1, nil)
	require.Contains(t, findingsOf(&d, timeline.Ended{})[0].What, ". The metrics of the engines name none of the 8 ranks that has much more to do than the others")
	f.said = nil
	_, d = f.pass(1, nil)
	require.NotContains(t, findingsOf(&d, timeline.Ended{})[0].What, ".", "nothing is known")
}

func TestOnlyRanksBehindABarrierAreAskedForTheirGauges(t *testing.T) {
	d := &Document{Models: []Model{{Groups: []Group{
		{GroupLoads: board.GroupLoads{Barrier: true}, Ranks: []Rank{{ID: 1}, {ID: 2}}},
		{GroupLoads: board.GroupLoads{Barrier: true}, Rounds: &Rounds{}, Ranks: []Rank{{ID: 3}}}, // prompts make its steps longer
		{Ranks: []Rank{{ID: 4}}},
	}}}}
	asked := []int32{}
	readGauges(d, func(rank int32) (gateway.Gauges, bool) {
		asked = append(asked, rank)
		return gateway.Gauges{Running: 7}, rank == 1
	})
	require.Equal(t, []int32{1, 2}, asked)
	require.Equal(t, 7., d.Models[0].Groups[0].Ranks[0].gauges.Running)
	require.Nil(t, d.Models[0].Groups[0].Ranks[1].gauges, "its engine said nothing lately")
}
