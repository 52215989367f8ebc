package trace

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSyntheticTracesHaveTheirShapes(t *testing.T) {
	const n = 20_000
	for _, tt := range []struct {
		name                   string
		prompts, outputs       [2]int     // range
		medianPrompt, medianOf [2]float64 // range of the median: prompt, output
	}{
		{"lognormal", [2]int{16, 64_000}, [2]int{4, 8000}, [2]float64{1940, 2060}, [2]float64{176, 187}},
		{"pareto", [2]int{16, 64_000}, [2]int{60, 8000}, [2]float64{2900, 3060}, [2]float64{100, 105}},
		{"burst", [2]int{16, 64_000}, [2]int{60, 8000}, [2]float64{2900, 3060}, [2]float64{100, 105}},
		{"mix", [2]int{50, 120_000}, [2]int{4, 4000}, [2]float64{310, 370}, [2]float64{195, 206}},
		{"recurrent", [2]int{32, 60_000}, [2]int{8, 4000}, [2]float64{1500, 6000}, [2]float64{100, 400}}, // templates differ
		{"code", [2]int{16, 7500}, [2]int{1, 1000}, [2]float64{1460, 1540}, [2]float64{12, 14}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Synth(tt.name, n, 7)
			require.NoError(t, err)
			require.Len(t, got.Requests, n)
			require.Zero(t, got.Requests[0].At)
			last := time.Duration(0)
			for _, r := range got.Requests {
				require.GreaterOrEqual(t, r.At, last)
				last = r.At
				require.GreaterOrEqual(t, r.Prompt, tt.prompts[0])
				require.LessOrEqual(t, r.Prompt, tt.prompts[1])
				require.GreaterOrEqual(t, r.Output, tt.outputs[0])
				require.LessOrEqual(t, r.Output, tt.outputs[1])
			}
			require.InDelta(t, n, last.Seconds(), n/5, "a mean gap of a second; a burst's periods make it vary")
			s := got.Summary()
			require.Greater(t, float64(s.Prompt.P50), tt.medianPrompt[0])
			require.Less(t, float64(s.Prompt.P50), tt.medianPrompt[1])
			require.Greater(t, float64(s.Output.P50), tt.medianOf[0])
			require.Less(t, float64(s.Output.P50), tt.medianOf[1])

			again, err := Synth(tt.name, n, 7)
			require.NoError(t, err)
			require.Equal(t, got, again, "a seed draws the same")
			other, err := Synth(tt.name, n, 8)
			require.NoError(t, err)
			require.NotEqual(t, got, other)
		})
	}
	_, err := Synth("normal", 5, 1)
	require.ErrorContains(t, err, "synth:lognormal, synth:pareto, synth:burst, synth:mix, synth:recurrent, synth:code")
	_, err = Synth("mix", 0, 1)
	require.Error(t, err)
}

func TestRecurrentRequestsRecur(t *testing.T) {
	got, err := Synth("recurrent", 20_000, 3)
	require.NoError(t, err)
	outputs, fresh := map[uint64][]float64{}, 0
	for _, r := range got.Requests {
		if r.PromptKey() == 0 {
			fresh++
			continue
		}
		outputs[r.PromptKey()] = append(outputs[r.PromptKey()], math.Log(float64(r.Output)))
	}
	require.InDelta(t, 0.15, float64(fresh)/20_000, 0.01)
	require.InDelta(t, 150, len(outputs), 3)
	first := outputs[1] // u < 1/sqrt(150): the most frequent one
	require.InDelta(t, 0.85*math.Sqrt(1.0/150), float64(len(first))/20_000, 0.006)
	require.Less(t, slices.Max(first)-slices.Min(first), 0.8, "within a few deviations of 8 %")
}

func TestBurstsAreDenserThanTheRest(t *testing.T) {
	got, err := Synth("burst", 5000, 1)
	require.NoError(t, err)
	most, least := 0.0, math.Inf(1) // requests a second, over 40 requests
	for i := 40; i < len(got.Requests); i += 40 {
		rate := 40 / (got.Requests[i].At - got.Requests[i-40].At).Seconds()
		most, least = max(most, rate), min(least, rate)
	}
	require.Greater(t, most, 6*least)
}

func TestCodeCompletionsAreShort(t *testing.T) {
	got, err := Synth("code", 20_000, 1)
	require.NoError(t, err)
	require.InDelta(t, 28, got.Summary().Output.Mean, 1)
}

func TestPromptKey(t *testing.T) {
	ids := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}
	long := Request{Prompt: 4500, HashIDs: ids}
	require.NotZero(t, long.PromptKey())
	require.Equal(t, long.PromptKey(), (&Request{Prompt: 4500, Output: 7, HashIDs: slices.Clone(ids)}).PromptKey())
	require.NotEqual(t, long.PromptKey(), (&Request{Prompt: 4500, HashIDs: append(slices.Clone(ids[:8]), 10)}).PromptKey(),
		"another last block is another prompt, as in the server")
	require.NotEqual(t, long.PromptKey(), (&Request{Prompt: 4501, HashIDs: ids}).PromptKey(), "and so is one that goes on after it")
	require.Zero(t, (&Request{}).PromptKey(), "nothing known")
	require.EqualValues(t, 5, (&Request{Key: 5, HashIDs: ids}).PromptKey())
}
