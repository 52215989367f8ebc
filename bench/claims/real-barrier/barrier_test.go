package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
)

func TestTheLawIsFittedToSomeRowsAndHeldAgainstTheOthers(t *testing.T) {
	var rows []pinned
	seen := []byte{byAll, byAll, byAll, byNone, byNone, byCost}
	for i, kv := range []float64{2000, 10_000, 40_000, 20_000, 20_000, 2000} {
		all := kv * []float64{2, 1, 1.5, 2, 1, 2}[i]
		ms := 10 + kv/1000 + all/10_000
		rows = append(rows, pinned{placement: placement{name: "row", seen: seen[i]}, fullest: kv, all: all, most: 8, ms: []float64{ms, ms}})
	}
	rows[5].most = 2
	rows[5].ms = []float64{rows[0].ms[0] - 6*0.5, rows[0].ms[0] - 6*0.5} // half a millisecond for each of six requests
	rows[3].ms = []float64{37.4}                                         // 34 by the law
	l := fitLaw(rows)
	require.Equal(t, 6, l.line.N)
	for i, want := range []float64{10, 1, 0.1} {
		require.InDelta(t, want, l.both.Of[i], 1e-9)
	}
	require.InDelta(t, 0.5, l.cost.Of[2], 0.05)
	require.InDelta(t, 32, l.at(20_000, 20_000), 1e-9)
	require.InDelta(t, 1.1e-3, l.line.Slope, 1e-4)
	var out strings.Builder
	writeLaw(&out, rows, l)
	require.Contains(t, out.String(), "| 34.0 | +10.0 % |")
	require.Contains(t, out.String(), "| the third |")
	require.Contains(t, out.String(), "| 32.0 | ")
	require.Contains(t, out.String(), "10.0 % off the second and")
}

func TestGaugesOfBothPages(t *testing.T) {
	var l look
	l.read([]byte(`vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="202"} 1.0
vllm:cache_config_info{block_size="64",engine="1",num_gpu_blocks="202"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.1
vllm:num_requests_running{engine="0",model_name="tiny"} 8.0
vllm:num_requests_running{engine="1",model_name="tiny"} 7.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 2.0
`))
	require.Equal(t, look{kv: [ranks.Count]float64{3200, 640}, running: 15, waiting: 2, complete: true}, l)

	var m stepModel
	m.read([]byte("evenkeel_step_model_r2_ratio{group=\"main\"} 0.9\n"))
	require.Equal(t, stepModel{r2: .9}, m, "none is learned")
	m.read([]byte("evenkeel_step_model_c0_seconds{group=\"main\",source=\"learned\"} " +
		"0.01\nevenkeel_step_model_c1_seconds{group=\"main\",source=\"learned\"} 2e-06\n"))
	require.Equal(t, stepModel{known: true, c0: 10, c1: .002, r2: .9}, m)

	r := run{Sample: report.Sample{}}
	now := time.Now()
	r.levels(&looks{list: []look{{at: now, proxy: 1000, kv: [ranks.Count]float64{3200, 1280}, complete: true}, {at: now, proxy: 3000},
		{at: now.Add(time.Hour), proxy: 1}}}, now, now)
	require.InDelta(t, 2000, r.Sample[report.Imbalance], 1e-9)
	require.InDelta(t, 1920, r.Sample[engineLevel], 1e-9)
	require.InDelta(t, 3200, r.Sample[engineTop], 1e-9)
}

func TestTheSameSeedDrawsTheSameList(t *testing.T) {
	list := draw(3, 2000)
	require.Equal(t, list, draw(3, 2000))
	require.NotEqual(t, list, draw(4, 2000))
	long := 0
	for _, r := range list {
		require.GreaterOrEqual(t, r.Prompt, 32)
		require.LessOrEqual(t, r.Prompt+r.Output, ranks.ContextLen)
		if r.Prompt > 2200 {
			long++
		}
	}
	require.InDelta(t, 0.15, float64(long)/2000, 0.04, "a few are long")
}

func TestDifferencesArePaired(t *testing.T) {
	var rounds [][]*run
	for i := range 5 {
		of := func(policy string, tokens float64) *run {
			return &run{policy: policy, Sample: report.Sample{ranks.WholeTokens: tokens, report.TokensPerS: tokens, ranks.GapMean: 1000 / tokens}}
		}
		base := 100 + 50*float64(i) // rounds differ by far more than policies do
		rounds = append(rounds, []*run{of("br0", 1.1*base), of(reference, base)})
	}
	var out strings.Builder
	writeDifferences(&out, rounds)
	require.Contains(t, out.String(), "| `br0` | +10.0 ± 0.0 | +10.0 ± 0.0 | -9.1 ± 0.0 |")
}
