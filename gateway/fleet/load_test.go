package fleet_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
)

// conversation is n requests of a few hundred tokens that are answered by 30
// to 60.
func conversation(n int) []trace.Request {
	rng := rand.New(rand.NewPCG(1, 2))
	all := make([]trace.Request, n)
	for i := range all {
		all[i] = trace.Request{Prompt: 20 + rng.IntN(300), Output: 30 + rng.IntN(31)}
	}
	return all
}

// A thousand clients stream at once, paced as engines pace them. Every token is
// checked, and afterwards nothing is left anywhere.
func TestThousandStreams(t *testing.T) {
	if testing.Short() {
		t.Skip("needs some seconds of two cores")
	}
	streams, step := 1000, 60*time.Millisecond
	if race.Enabled {
		streams, step = 200, 100*time.Millisecond
	}
	const ranks = 8
	b := start(t, options{
		prefill: []refengine.Config{{Prompts: refengine.Prompts{Concurrency: 4}}, {Prompts: refengine.Prompts{Concurrency: 4}}},
		decode:  []refengine.Config{{DPSize: ranks, Slots: streams / ranks, Steps: refengine.Steps{C0: step}}},
		configure: func(cfg *config.Config) {
			cfg.Dispatch.Window = time.Millisecond
			cfg.Prefill.Scrape.Interval = 500 * time.Millisecond
			cfg.Limits.EventTimeout, cfg.Limits.ProbeTimeout = time.Minute, time.Minute
		},
	})
	most := 0.0
	got, err := load.Run(t.Context(), load.Config{
		URLs: []string{b.URL}, Requests: conversation(streams + streams/2), Concurrency: streams, Chat: 0.5, Stream: 0.9, Usage: 0.5, Seed: 7,
		OnProgress: func(p load.Progress) {
			if p.Ended%16 == 0 {
				most = max(most, b.Metric("evenkeel_requests_open"))
			}
		},
	})
	require.NoError(t, err)
	require.Equal(t, streams+streams/2, got.OK, "%v %v", got.Kinds, got.Failures)
	require.Greater(t, most, 0.8*float64(streams), "they were in the system at once")
	b.settled(false)
	require.Len(t, b.Records(), got.Sent, "one line a request")
	require.EqualValues(t, got.Sent, b.Metric(`evenkeel_requests_total{outcome="ok"}`))
	t.Logf("%d streams, %.0f tokens/s, TTFT p50 %.0f ms, TPOT p50 %.1f ms p99 %.1f ms", streams, got.All.TokensPerS, got.All.TTFT.P50,
		got.All.TPOT.P50, got.All.TPOT.P99)
}
