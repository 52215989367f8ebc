package main

import (
	"fmt"
	"math"
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
		j.pairs[started] = append(j.pairs[started], pair{
			load: named(i), theirs: report.Sample{report.TokensPerS: 100, report.TTFTMean: 50, report.TPOTP95: 0},
			ours: report.Sample{report.TokensPerS: 100 * x, report.TTFTMean: 50 / x, report.TPOTP95: 0},
		})
	}
	j.pairs[started][0].theirs[report.TPOTP95], j.pairs[started][0].ours[report.TPOTP95] = 10, 8 // the answers of the others have one token
	j.again, j.changed = j.pairs[started][1], "twice as long"
	for k := atTheirs; k <= small; k++ {
		j.pairs[k] = j.pairs[started]
	}
	delayed := side{setting{budget: 4096, every: 1, balance: byTokens, delay: passes}, false}
	slow, start := side{setting{budget: 8192, every: 2}, true}, side{asStarted(e), true}
	j.plan = plan{
		started: match{side{asStarted(e), false}, start}, atTheirs: match{delayed, slow}, atOurs: match{delayed, start},
		small: match{delayed, slow},
	}
	text := tables([]judged{j}, 7)
	require.Contains(t, text, "Seed 7, 3 loads for each deployment. A level step has 32 requests with 64000 KV tokens in all on each rank.")
	level := e.C0Ms + 64000*e.C1Ms + 32*(e.OwnMs+e.MostMs+e.MeanMs)
	require.Contains(t, text, fmt.Sprintf("| DeepSeek-V3, SGLang, 32 H200 | %.1f | +8.8 (-10.0 to +30.0) | +10.0 | 1 | -8.1 (-23.1 to +11.1) "+
		"| -9 | 0 | -20.0 (-20.0 to -20.0) | prefill and decode | own buckets |", level))
	require.Contains(t, text, "| DeepSeek-V3, SGLang, 32 H200 | -10.0 | +10.0 | twice as long | prefill and decode | load 0 |")
	require.Contains(t, text, "| most tokens/s of the engine, and TTFT as short | +8.8 (-10.0 to +30.0) | -8.1 (-23.1 to +11.1) | -9 | -20.0 (-20.0 to -20.0) | "+
		"DeepSeek-V3, SGLang, 32 H200 | `--chunked-prefill-size 131072 --load-balance-method total_tokens --enable-prefill-delayer` "+
		"| `--chunked-prefill-size 262144 --prefill-decode-interval 1` |")
	require.Contains(t, text, "| none | +8.8 (-10.0 to +30.0) ")
	require.Contains(t, short([]judged{j}), "| DeepSeek-V3, SGLang, 32 H200 | +8.8 (-10.0 to +30.0) | -9 | +8.8 (-10.0 to +30.0) | -9 "+
		"| prefill and decode | 4096, total_tokens, delayer; 8192, 1 of 2 steps | 4096, total_tokens, delayer; 256 |")
	j.pairs[started][0].ours[report.TTFTMean] = 61
	require.Equal(t, "1", j.longer())
}

// An engine's setting is the one with most tokens/s whose first tokens come early enough, or come
// first.
func TestTheBestSettingWithinALimit(t *testing.T) {
	all := []tried{{side{setting{budget: 1}, false}, 100, 50}, {side{setting{budget: 2}, false}, 120, 80}, {side{setting{budget: 3}, false}, 90, 40}}
	for limit, budget := range map[float64]int32{math.Inf(1): 2, 80: 2, 79: 1, 45: 3, 1: 3} {
		require.Equal(t, budget, best(all, limit).budget, "%v ms", limit)
	}
	e, err := laws.Find("gpt-oss-120b,vllm,B200,8")
	require.NoError(t, err)
	require.Equal(t, settings(e, true), settings(e, false), "vLLM has one way to balance, and no delayer")
	require.Contains(t, settings(e, true), asStarted(e))
	require.Equal(t, "none", asStarted(e).flags(e))
	require.Equal(t, "`--max-num-batched-tokens 2048 --prefill-schedule-interval 3`", setting{budget: 2048, every: 3}.flags(e))
}

// Both kinds of ranks play the same load twice, and get the same.
func TestALoadOfEachKind(t *testing.T) {
	race.Alone(t)
	e, err := laws.Find("gpt-oss-120b,vllm,B200,4")
	require.NoError(t, err)
	for _, play := range []func() (pair, error){
		func() (pair, error) { return decodes(t.Context(), 1, 7, e, ours) },
		func() (pair, error) {
			both, err := prefillsToo(t.Context(), 1, 3, e, 1, match{side{asStarted(e), false}, side{asStarted(e), true}})
			return both[0], err
		},
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
