package predictor

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func repeat(v int32, n int) []int32 { return slices.Repeat([]int32{v}, n) }

func TestExactTakesTheNarrowestBucketItBelieves(t *testing.T) {
	fit := &Fit{
		Version: FitVersion, Kind: KindExact,
		Outputs:         NewRuns(append(repeat(10, 60), repeat(500, 60)...)),
		PromptQuantiles: []int32{100, 200, 300, 400, 500, 600, 700},
		Buckets: []Bucket{
			{lengthName(0), NewRuns(repeat(20, MinLengthOutputs))},
			{lengthName(1), NewRuns(repeat(30, MinLengthOutputs-1))},
			{keyName(7), NewRuns(repeat(40, MinKeyOutputs))},
			{keyName(8), NewRuns(repeat(50, MinKeyOutputs-1))},
		},
	}
	built, _, err := fit.Build()
	require.NoError(t, err)
	online, err := NewOnline(OnlineConfig{Kind: KindExact, Fit: fit})
	require.NoError(t, err)
	seeded, _ := online.Build()
	for _, row := range []struct {
		name string
		q    Query
		want Prediction
	}{
		{"a key seen five times speaks for itself", Query{Prompt: 150, Key: 7}, Prediction{1, 40}},
		{"four times are too few: prompts as long", Query{Prompt: 100, Key: 8}, Prediction{1, 20}},
		{"no key: prompts as long", Query{Prompt: 1}, Prediction{1, 20}},
		{"49 of them are too few: all", Query{Prompt: 101}, Prediction{0.5, 10}},
		{"a length nobody had: all", Query{Prompt: 5000}, Prediction{0.5, 10}},
		{"a key past its history runs on", Query{Prompt: 1, Key: 7, Age: 40}, Prediction{0, 80}},
	} {
		t.Run(row.name, func(t *testing.T) {
			require.Equal(t, row.want, ask(built, 80, row.q), "as fitted")
			require.Equal(t, row.want, ask(seeded, 80, row.q), "on line")
		})
	}
}

func TestLengthBucketsHoldAsMany(t *testing.T) {
	prompts := make([]int32, 8000)
	for i := range prompts {
		prompts[i] = int32(i * 7919 % 8009)
	}
	edges := quantileBounds(prompts, LengthBuckets)
	require.Len(t, edges, LengthBuckets-1)
	var sizes [LengthBuckets]int
	for _, p := range prompts {
		sizes[lengthBucket(edges, p)]++
	}
	for k, n := range sizes {
		require.InDelta(t, 1000, n, 1, "bucket %d", k)
	}
	require.Equal(t, 0, lengthBucket(edges, edges[0]), "an edge belongs to the bucket below")
}

func TestRunsKeepEveryLength(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lengths := rapid.SliceOf(rapid.Int32Range(1, 50)).Draw(t, "lengths")
		sorted := slices.Clone(lengths)
		slices.Sort(sorted)
		runs := NewRuns(lengths)
		require.Equal(t, len(lengths), runs.Len())
		require.Equal(t, sorted, append([]int32{}, runs.Lengths()...)[:len(sorted):len(sorted)])

		all := runs.sampleEvenly(len(lengths))
		slices.Sort(all)
		require.True(t, slices.Equal(sorted, all), "with room for all, all are there: %v", all)
		most := rapid.IntRange(0, 40).Draw(t, "most")
		require.Len(t, runs.sampleEvenly(most), min(most, len(lengths)))
	})
}

func TestSpreadForgetsEvenly(t *testing.T) {
	var lengths []int32
	for v := range int32(20_000) {
		lengths = append(lengths, v+1)
	}
	drawn := NewRuns(lengths).sampleEvenly(OutputsMost)
	require.Len(t, drawn, OutputsMost)
	for _, stretch := range [][]int32{drawn, drawn[:500], drawn[1000:1300], drawn[4000:]} {
		sum := 0.0
		for _, v := range stretch {
			sum += float64(v)
		}
		require.InDelta(t, 10_000, sum/float64(len(stretch)), 500, "%d of them", len(stretch))
	}
}
