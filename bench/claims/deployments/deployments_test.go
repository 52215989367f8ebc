package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/internal/race"
)

// named is a load of a test.
type named int

func (n named) String() string { return fmt.Sprintf("load %d", int(n)) }

// Gains are means of loads, and each row tells on which load there is the least.
func TestTheTablesOfSomeLoads(t *testing.T) {
	e, err := laws.Find("DeepSeek-V3,sglang,H200,32")
	require.NoError(t, err)
	j := judged{row: row{both: true}, law: e}
	for i, x := range []float64{0.9, 1.1, 1.3} {
		j.pairs = append(j.pairs, pair{
			load: named(i), theirs: report.Sample{report.TokensPerS: 100, report.TTFTMean: 50, report.TPOTP95: 0},
			ours: report.Sample{report.TokensPerS: 100 * x, report.TTFTMean: 50 / x, report.TPOTP95: 0},
		})
	}
	j.pairs[0].theirs[report.TPOTP95], j.pairs[0].ours[report.TPOTP95] = 10, 8 // the answers of the others have one token
	j.again, j.changed = j.pairs[1], "twice as long"
	text := tables([]judged{j}, 7)
	require.Contains(t, text, "Seed 7, 3 loads for each deployment. A level step has 32 requests with 64000 KV tokens in all on each rank.")
	level := e.C0Ms + 64000*e.C1Ms + 32*(e.OwnMs+e.MostMs+e.MeanMs)
	require.Contains(t, text, fmt.Sprintf("| DeepSeek-V3, SGLang, 32 H200 | %.1f | +8.8 (-10.0 to +30.0) | +10.0 | 1 | -8.1 (-23.1 to +11.1) "+
		"| -9 | 0 | -20.0 (-20.0 to -20.0) | prefill and decode | own buckets |", level))
	require.Contains(t, text, "| DeepSeek-V3, SGLang, 32 H200 | -10.0 | +10.0 | twice as long | prefill and decode | load 0 |")
	require.Contains(t, short([]judged{j}),
		"| DeepSeek-V3, SGLang, 32 H200 | +8.8 (-10.0 to +30.0) | -9 | 0 of 3 | -20.0 (-20.0 to -20.0) | prefill and decode |")
	j.pairs[0].ours[report.TTFTMean] = 61
	require.Equal(t, "1", j.longer())
}

// Both kinds of ranks play the same load twice, and get the same.
func TestALoadOfEachKind(t *testing.T) {
	race.Alone(t)
	e, err := laws.Find("gpt-oss-120b,vllm,B200,4")
	require.NoError(t, err)
	for _, play := range []func() (pair, error){
		func() (pair, error) { return decodes(t.Context(), 1, 7, e, ours) },
		func() (pair, error) { return prefillsToo(t.Context(), 1, 3, e, 1) },
	} {
		a, err := play()
		require.NoError(t, err)
		b, err := play()
		require.NoError(t, err)
		for _, m := range []report.Metric{report.TokensPerS, report.TTFTMean, report.TPOTP95} {
			require.Positive(t, a.ours[m])
			require.Equal(t, a.ours[m], b.ours[m])
			require.Equal(t, a.theirs[m], b.theirs[m])
		}
	}
}

// A row of the table names a law that there is, with what it needs.
func TestRowsHaveLaws(t *testing.T) {
	require.LessOrEqual(t, len(rows), 8, "the table is on README's first screen")
	for _, r := range rows {
		e, err := laws.Find(r.law)
		require.NoError(t, err)
		require.Positive(t, e.Prompt.Fit.Steps)
		require.True(t, e.Graphs)
		require.True(t, r.both || e.Engine == "vllm", "%s: pairs of SGLang need the rank before the prefill", r.law)
	}
}
