package gateway_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
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
	c := start(t, options{
		prefill: []refengine.Config{{PrefillConcurrency: 4}, {PrefillConcurrency: 4}},
		decode:  []refengine.Config{{DPSize: ranks, Slots: streams / ranks, C0: step}},
		configure: func(cfg *config.Config) {
			cfg.Dispatch.Window = time.Millisecond
			cfg.Prefill.Scrape.Interval = 500 * time.Millisecond
			cfg.Limits.EventTimeout, cfg.Limits.ProbeTimeout = time.Minute, time.Minute
		},
	})
	most := 0.0
	got, err := load.Run(t.Context(), load.Config{
		URLs: []string{c.url}, Requests: conversation(streams + streams/2), Concurrency: streams, Chat: 0.5, Stream: 0.9, Usage: 0.5, Seed: 7,
		OnProgress: func(p load.Progress) {
			if p.Ended%16 == 0 {
				most = max(most, c.metric("evenkeel_requests_open"))
			}
		},
	})
	require.NoError(t, err)
	require.Equal(t, streams+streams/2, got.OK, "%v %v", got.Kinds, got.Failures)
	require.Greater(t, most, 0.8*float64(streams), "they were in the system at once")
	c.settled(false)
	require.Len(t, c.records(), got.Sent, "one line a request")
	require.EqualValues(t, got.Sent, c.metric(`evenkeel_requests_total{outcome="ok"}`))
	t.Logf("%d streams, %.0f tokens/s, TTFT p50 %.0f ms, TPOT p50 %.1f ms p99 %.1f ms", streams, got.All.TokensPerS, got.All.TTFT.P50, got.All.TPOT.P50, got.All.TPOT.P99)
}

// A third of the clients leave, in every phase.
func TestManyThatLeave(t *testing.T) {
	c := start(t, options{
		prefill: []refengine.Config{{PrefillConcurrency: 4}, {PrefillConcurrency: 4}},
		decode:  []refengine.Config{{DPSize: 4, Slots: 8, C0: 4 * time.Millisecond}},
	})
	got, err := load.Run(t.Context(), load.Config{
		URLs: []string{c.url}, Requests: conversation(600), Concurrency: 64, Chat: 0.5, Stream: 0.7, Seed: 3, Cancel: load.Cancel{Share: 0.35},
	})
	require.NoError(t, err)
	require.Zero(t, got.Failed, "%v %v", got.Kinds, got.Failures)
	require.Positive(t, got.Cancelled)
	c.settled(false)
	for _, outcome := range []string{"unplaced", "expired", "failed", "refused"} {
		require.Zero(t, c.metric(fmt.Sprintf("evenkeel_drains_total{outcome=%q}", outcome)))
	}
	ended := 0.0
	for _, outcome := range []string{"ok", "client_closed"} {
		ended += c.metric(fmt.Sprintf("evenkeel_requests_total{outcome=%q}", outcome))
	}
	require.EqualValues(t, len(c.records()), ended, "each counted and logged once, and as nothing else")
	require.LessOrEqual(t, len(c.records()), got.Sent)
}

// What the proxy believes a rank holds is what the engine's step log says, but
// for the tokens on their way: a chunk for each running request. It is never
// ahead of the engine; on a busy machine it may now and then be further behind.
func TestTheBoardAgreesWithTheStepLog(t *testing.T) {
	for name, engine := range map[string]refengine.Config{
		"a token a chunk":                  {},
		"three tokens a chunk":             {TokensPerChunk: 3},
		"a chunk every four steps":         {StreamInterval: 4},
		"engines that tell token ids":      {TokensPerChunk: 2, NoContinuousUsage: true},
		"engines that tell nothing at all": {NoContinuousUsage: true, NoTokenIDs: true},
	} {
		t.Run(name, func(t *testing.T) {
			engine.DPSize, engine.C0 = 2, 20*time.Millisecond
			c := start(t, options{decode: []refengine.Config{engine}})
			const clients = 10
			for i := range clients {
				c.send(chat(reftext.MakePrompt(uint64(i), 50+37*i), `"stream":true,"ignore_eos":true,`))
			}
			c.eventually("all are decoded", func() bool { return c.metric("evenkeel_ttft_seconds_count") == clients })
			made := int64(c.decode[0].Config().TokensPerChunk) // by a request in a step
			chunk := made * int64(c.decode[0].Config().StreamInterval)
			agreed, compared := 0, 0
			c.eventually("they agree", func() bool {
				before := c.gw.Status(t.Context()).Dispatch.Models[0].Workers
				steps := c.decode[0].Steps()
				after := c.gw.Status(t.Context()).Dispatch.Models[0].Workers
				log := steps[len(steps)-1] // the load when the step began; its tokens are made by now
				behind := false
				for i, rank := range log.Ranks {
					if rank.Running != before[i].Running { // the step in which the last one began
						return false
					}
					n := int64(rank.Running)
					require.LessOrEqual(t, before[i].KVTokens, int64(rank.KVTokens)+n*made, "ahead of rank %d", i)
					behind = behind || after[i].KVTokens < int64(rank.KVTokens)+n*made-n*chunk
				}
				compared++
				if !behind {
					agreed++
				}
				return compared >= 50 && agreed > compared/2
			})
		})
	}
}
