package main

import (
	"context"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/draw"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheTablesOfALoad(t *testing.T) {
	small := draw.Judged(1, 41) // answers of 34 tokens
	small.Ranks, small.Slots, small.Tokens = 4, 8, 0
	tr := &trials{known: map[share][]float64{}, seed: 1, policies: slices.Concat(set, beside), shifts: begunElsewhere,
		loads: []*draw.Load{small}}
	require.NoError(t, tr.try(context.Background(), io.Discard))
	text := tr.tables()
	for _, p := range set {
		require.LessOrEqual(t, 3, strings.Count(text, "| `"+p+"` |"), p)
	}
	require.Contains(t, text, "tokens/s, geometric mean")
	require.Contains(t, text, "the best of the others, on each load")
	require.Contains(t, text, "| all | 1 | ")
	require.LessOrEqual(t, tr.bestBut(0, throughput, theDefault), tr.best(0, throughput))
	for _, f := range []figure{throughput, first, pace} {
		best := 0
		for p := range set {
			s := tr.shares(p, f)[0]
			require.False(t, f.more && s > 1 || !f.more && s < 1, "%s beats the best in %s", set[p], f.name)
			if s == 1 {
				best++
			}
		}
		require.Positive(t, best)
	}
	require.Positive(t, tr.of[0][theDefault].of(report.Steps))

	dir := t.TempDir()
	out := filepath.Join(dir, "results", "regret.md")
	require.NoError(t, tr.write(out))
	require.FileExists(t, filepath.Join(dir, "img", "regret.svg"))
	require.NoError(t, tr.raw(out))
}

func TestShares(t *testing.T) {
	policies := []string{"a", "b"}
	defer func(old []string) { set = old }(set)
	set = policies
	of := func(tokens, ttft float64) outcome {
		return outcome{report.TokensPerS: {Mean: tokens}, report.TTFTP99: {Mean: ttft}}
	}
	tr := &trials{known: map[share][]float64{}, policies: policies, loads: []*draw.Load{{Number: 5}, {Number: 6}},
		of: [][]outcome{{of(90, 3), of(100, 2)}, {of(100, 2), of(50, 1)}}}
	require.Equal(t, []float64{0.9, 1}, tr.shares(0, throughput))
	require.Equal(t, []float64{1.5, 2}, tr.shares(0, first))
	at, share, _ := worst(tr.shares(1, throughput), true)
	require.Equal(t, 1, at)
	require.Equal(t, 0.5, share)
	at, share, _ = worst(tr.shares(0, first), false)
	require.Equal(t, 1, at)
	require.Equal(t, 2.0, share)
	require.InDelta(t, math.Sqrt(0.9), geomean(tr.shares(0, throughput), all(2)), 1e-12)
	require.True(t, met("0.997", "0.997", true) && met("1.19", "1.20", false) && !met("1.21", "1.20", false) && !met("0.996", "0.997", true))
	require.False(t, met("NaN", "1.15", false))
	_, err := parse([]string{"-loads", "0"})
	require.Error(t, err)
}

func TestTheLowestOfThreeRows(t *testing.T) {
	tr := &trials{policies: []string{"jsq", "evenkeel"}}
	for i, gain := range []float64{1.10, 1.20, 1.02} { // all have the same kind of prompts, as many ranks and the same share of KV
		l := draw.Judged(1, 41)
		l.Number = i
		tr.loads = append(tr.loads, l)
		tr.of = append(tr.of, []outcome{
			{report.TokensPerS: {Mean: 100}, report.KVShare: {Mean: 0.2}}, {report.TokensPerS: {Mean: 100 * gain}, report.KVShare: {Mean: 0.2}},
		})
	}
	told, really := tr.expected("jsq")
	require.InDeltaSlice(t, []float64{1.10, 1.20, 1.02}, really, 1e-9)
	require.InDeltaSlice(t, []float64{math.Sqrt(1.20 * 1.02), math.Sqrt(1.10 * 1.02), math.Sqrt(1.10 * 1.20)}, told, 1e-9,
		"a load does not count in its own rows")

	tr.of[1][0][report.KVShare] = report.Value{Mean: 0.05} // alone in its row of KV, which tells nothing of it
	told, _ = tr.expected("jsq")
	require.InDelta(t, 1.02, told[0], 1e-9, "the row of KV has only the last load besides")
	require.InDelta(t, math.Sqrt(1.10*1.02), told[1], 1e-9)
}
