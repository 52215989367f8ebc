package load

import (
	"encoding/json"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
)

func TestEqualSeedsSendEqualRequests(t *testing.T) {
	cfg := Config{Requests: trace.Azure().Requests[:50], Chat: 0.5, Stream: 0.5, Usage: 0.5, Cancel: Cancel{Share: 0.5, Phases: Phases()},
		Seed: 9, Check: CheckText}
	other := cfg
	other.Seed = 10
	differ := 0
	for i := range 200 {
		a, b, c := cfg.ask(i), cfg.ask(i), other.ask(i)
		require.Equal(t, a, b)
		differ += count(a.chat != c.chat)
		require.Equal(t, cfg.appendPrompt(nil, &a), cfg.appendPrompt(nil, &b))
		require.NotEqual(t, cfg.appendPrompt(nil, &a), other.appendPrompt(nil, &c))
	}
	require.Greater(t, differ, 50)
}

func TestBodiesSayWhatWasPlanned(t *testing.T) {
	cfg := Config{Requests: trace.Azure().Requests[:50], Chat: 0.5, Stream: 0.5, Usage: 0.5, Seed: 9, Check: CheckText, MaxPrompt: 600,
		MaxOutput: 30}
	for i := range 100 {
		a := cfg.ask(i)
		prompt := cfg.appendPrompt(nil, &a)
		body := cfg.appendBody(nil, &a, "m", prompt)
		require.True(t, json.Valid(body))
		p, err := reftext.Render(a.chat, body)
		require.NoError(t, err)
		want := cfg.expects(&a, string(prompt))
		require.Equal(t, p.Answer, want.answer)
		require.Equal(t, p.Tokens(), want.promptTokens)
		require.Equal(t, min(600, cfg.Requests[i%50].Prompt), p.Tokens())
		require.Equal(t, min(30, cfg.Requests[i%50].Output), want.tokens)
	}
}

func TestSharedBlocksAreEqualAndTheLastIsNot(t *testing.T) {
	cfg := Config{SharePrefixes: true, Seed: 4, Requests: []trace.Request{
		{Prompt: 1300, Output: 1, HashIDs: []uint64{7, 8, 9}}, {Prompt: 1300, Output: 1, HashIDs: []uint64{7, 8, 9}},
		{Prompt: 1300, Output: 1, HashIDs: []uint64{7, 1, 2}}, {Prompt: 40, Output: 1, HashIDs: []uint64{7}}}}
	ids := func(i int) []int32 {
		a := cfg.ask(i)
		return reftext.Of(string(cfg.appendPrompt(nil, &a))).IDs
	}
	require.Len(t, ids(0), 1300)
	require.Equal(t, ids(0)[:1024], ids(1)[:1024])
	require.NotEqual(t, ids(0)[1024:], ids(1)[1024:])
	require.Equal(t, ids(0)[:512], ids(2)[:512])
	require.NotEqual(t, ids(0)[512:1024], ids(2)[512:1024])
	require.Len(t, ids(3), 40)
}

func TestArrivalsFollowTheTraceAndTheRate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Rate: rapid.SampledFrom([]float64{0, 0.5, 20}).Draw(t, "rate")}
		at := time.Duration(0)
		for range rapid.IntRange(1, 20).Draw(t, "requests") {
			cfg.Requests = append(cfg.Requests, trace.Request{At: at})
			at += time.Duration(rapid.IntRange(0, 1e9).Draw(t, "gap"))
		}
		n := len(cfg.Requests)
		require.Zero(t, cfg.at(0))
		for i := range 3 * n {
			require.LessOrEqual(t, cfg.at(i), cfg.at(i+1))
		}
		if cfg.Rate > 0 {
			require.InEpsilon(t, float64(100*n)/cfg.Rate, cfg.at(100*n).Seconds(), 1e-3, "the mean rate, however often the trace goes round")
		} else {
			require.Equal(t, cfg.Requests[n-1].At, cfg.at(n-1))
		}
	})
}

func TestPercentilesAreCloseToTheSamples(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Map(rapid.Float64Range(0, 32),
			func(x float64) time.Duration { return time.Duration(1000 * math.Exp2(x)) }), 1, 300).Draw(t, "samples")
		var h histogram
		for _, d := range samples {
			h.add(d)
		}
		slices.Sort(samples)
		for _, p := range []float64{0.01, 0.5, 0.9, 0.99, 1} {
			want := samples[max(0, int(math.Ceil(p*float64(len(samples))))-1)]
			require.InDelta(t, float64(want), float64(h.percentile(p)), float64(want)/250+1024, "p%v", p)
		}
		require.Equal(t, samples[len(samples)-1], h.largest)
	})
}

func TestAnEmptyHistogramIsZero(t *testing.T) {
	require.Zero(t, new(histogram).millis())
}
