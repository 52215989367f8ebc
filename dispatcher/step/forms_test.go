package step

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// vLLM's list for 512 begins like this and ends with steps of 16.
func TestSizesOfGraphs(t *testing.T) {
	sizes := Captured(512)
	require.Equal(t, []int{1, 2, 4, 8, 16, 24, 32}, sizes[:7])
	require.Equal(t, []int{248, 256, 272, 288}, sizes[33:37])
	require.Equal(t, 512, sizes[len(sizes)-1])
	require.Equal(t, []int{1, 2}, Captured(3))
	require.Empty(t, Captured(0))
}

// Two ranks, by hand: 10 and 60 requests of 1,000 and 100 tokens each; graphs for 16 and 64.
func TestWhoPaysInAStep(t *testing.T) {
	ranks := []Rank{{Requests: 10, KV: 10_000}, {Requests: 60, KV: 6000}}
	law := Law{Model: Model{C0Ms: 20, C1Ms: 1e-3, RequestMs: 0.1, OwnPromptMs: 0.01, SharedPromptMs: 0.02, PrefillMs: 3}, MostRowsMs: 0.2,
		MeanRowsMs: 0.3, Sizes: []int{16, 64}}
	for form, want := range map[Form]float64{
		Eager:      20 + (6 + 6) + 12 + 10.5,     // the second rank's KV and requests, the most requests, the mean of 35
		Unmasked:   20 + 10 + 6.4 + 12.8 + 19.2,  // the first rank's KV, and 64 rows of everything
		Masked:     20 + 10 + 6.4 + 12.8 + 10.5,  // experts compute 35 rows in the mean
		OwnBuckets: 20 + (6 + 6.4) + 12.8 + 10.5, // 16 and 64 rows
	} {
		law.Form = form
		require.InDelta(t, want, law.Ms(ranks), 1e-9, form)
	}
	for form, want := range map[Form][]float64{
		Eager:      {9, 1, 0}, // behind the 9 that stood there: 11 and 12 ms of their own
		Unmasked:   {9, 0, 4}, // both run 64 rows
		Masked:     {9, 0, 4},
		OwnBuckets: {9, 0.8, 0}, // 11.6 and 12.4
	} {
		law.Form = form
		require.InDeltaSlice(t, want, law.AppendWaits([]float64{9}, ranks), 1e-9, form)
	}
	law.Form = Masked
	ranks[0].Prompt = 1000 // more rows than the largest graph has: all ranks run as they are
	require.InDelta(t, 20+(10+1+10)+12+10.5+10+3, law.Ms(ranks), 1e-9)
	ranks[0].Prompt = 40 // within the graphs, as if 50 requests decoded there
	require.InDelta(t, 20+10+6.4+12.8+16.5, law.Ms(ranks), 1e-9)
}

// Where ranks are level, what policies take for true lacks nothing of the law but the part that
// placing cannot change: experts that the mean of the ranks pays.
func TestWhatPoliciesTakeForTrue(t *testing.T) {
	law := Law{Model: Model{C0Ms: 10, C1Ms: 1e-3, RequestMs: 0.1}, MostRowsMs: 0.2, MeanRowsMs: 0.3, Sizes: Captured(64)}
	level := []Rank{{Requests: 16, KV: 5000}, {Requests: 16, KV: 5000}}
	for form, lacks := range map[Form]float64{Eager: 0.3, OwnBuckets: 0.3, Masked: 0.3, Unmasked: 0} {
		law.Form = form
		load, use := law.Assumed()
		assumed := load.C0Ms + load.C1Ms*(level[0].KV+16*(use.Request+use.Row))
		require.InDelta(t, law.Ms(level)-16*lacks, assumed, 1e-9, form)
	}
}

// Ranks that are level and fill a graph take the same in every form, and that is what the level
// Model says. Whatever the ranks, who pads takes no less than who does not.
func TestFormsAgreeOnLevelRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ms := func(name string) float64 { return rapid.Float64Range(0, 1).Draw(t, name) }
		law := Law{Model: Model{C0Ms: 10, C1Ms: ms("c1") / 1000, RequestMs: ms("own")}, MostRowsMs: ms("most"), MeanRowsMs: ms("mean"),
			Sizes: Captured(512)}
		n, kv := float64(rapid.SampledFrom(law.Sizes).Draw(t, "requests")), float64(rapid.IntRange(0, 1_000_000).Draw(t, "tokens"))
		level := make([]Rank, rapid.IntRange(1, 8).Draw(t, "ranks"))
		uneven := make([]Rank, len(level))
		for i := range level {
			level[i] = Rank{Requests: n, KV: kv}
			uneven[i] = Rank{Requests: float64(rapid.IntRange(0, 512).Draw(t, "requests")),
				KV: float64(rapid.IntRange(0, 1_000_000).Draw(t, "tokens"))}
		}
		want := law.Level()
		of := map[Form]float64{}
		for form := range Forms {
			law.Form = Form(form)
			require.InEpsilon(t, want.Ms(level), law.Ms(level), 1e-9)
			of[law.Form] = law.Ms(uneven)
		}
		const rounding = 1e-9
		require.LessOrEqual(t, of[Masked], of[Unmasked]+rounding)
		require.LessOrEqual(t, of[OwnBuckets], of[Masked]+rounding)
		require.LessOrEqual(t, of[Eager], of[OwnBuckets]+rounding)
	})
}
