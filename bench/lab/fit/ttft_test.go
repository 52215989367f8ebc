package fit

import (
	"bytes"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/internal/stats"
)

// probes are n rounds of probes of (uncached tokens, ms).
func probes(n int, pairs ...[2]float64) (out []logLine) {
	for range n {
		for _, p := range pairs {
			out = append(out,
				logLine{model: "m", prefill: "p0", prompt: int(p[0]) + 64, cached: 64, output: 1, probeMs: p[1], attempts: 1, outcome: "ok"})
		}
	}
	return out
}

func fitTTFT(t *testing.T, lines []logLine) *TTFT {
	t.Helper()
	log, err := ReadRequestLog(write(t, "log", joined(lines)))
	require.NoError(t, err)
	fit, err := PrefillLines(log)
	require.NoError(t, err)
	return fit
}

func TestPrefillLine(t *testing.T) {
	fit := fitTTFT(t, probes(10, [2]float64{1000, 250}, [2]float64{2000, 330}, [2]float64{4000, 530}))
	require.Len(t, fit.Fits, 2, "the engine, and all")
	for _, f := range fit.Fits {
		require.Equal(t, 30, f.N)
		require.InDelta(t, 0.0942857, float64(f.B), 1e-6)
		require.InDelta(t, 150, float64(f.A), 1e-6)
		require.InDelta(t, 0.9973, float64(f.R2), 1e-4)
		require.Equal(t, []int{1000, 4000}, []int{f.MinTokens, f.MaxTokens})
		require.Empty(t, f.Refused)
	}
	require.Equal(t, "# m, 30 probes, R2 0.997\nprefill:\n  calibration: {tp_ms: 0.09429, t0_ms: 150.00}\n", fit.Config)

	exact := fitTTFT(t, probes(10, [2]float64{1000, 244.52}, [2]float64{2000, 338.32}, [2]float64{4000, 525.92})).Fits[0]
	require.InDelta(t, 0.0938, float64(exact.B), 1e-9)
	require.InDelta(t, 150.72, float64(exact.A), 1e-6)
	require.InDelta(t, 1, float64(exact.R2), 1e-9)
}

func TestAPrefillLineIsRefused(t *testing.T) {
	noise := rand.New(rand.NewPCG(1, 2))
	var scattered [][2]float64
	for range 40 {
		x := 1000 + 9000*noise.Float64()
		scattered = append(scattered, [2]float64{x, 500 + 0.005*x + 400*noise.Float64()})
	}
	for _, tc := range []struct {
		name  string
		lines []logLine
		says  string
	}{
		{"too few probes", probes(1, [2]float64{1000, 250}, [2]float64{2000, 330}, [2]float64{4000, 530}), "3 probes; 20 are needed"},
		{"prompts of about one length", probes(20, [2]float64{1000, 250}, [2]float64{1900, 330}), "the longest must have twice the tokens"},
		{"longer prompts are no slower", probes(20, [2]float64{1000, 250}, [2]float64{4000, 200}), "longer prompts were not slower"},
		{"time below none for an empty prompt", probes(20, [2]float64{1000, 10}, [2]float64{4000, 530}), "less than no time"},
		{"anything but a line", probes(1, scattered...), "prompt length does not explain the time"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fit := fitTTFT(t, tc.lines)
			require.Contains(t, fit.Fits[0].Refused, tc.says)
			require.Empty(t, fit.Config, "nothing to paste")
		})
	}
}

func TestOnlyAProbeAloneOnItsEngineCounts(t *testing.T) {
	lines := probes(10, [2]float64{1000, 250}, [2]float64{2000, 340}, [2]float64{4000, 520})
	for i, spoil := range []func(*logLine){
		func(l *logLine) { l.probeBS = 1 },
		func(l *logLine) { l.attempts = 2 },
		func(l *logLine) { l.prefill = "" },
		func(l *logLine) { l.probeMs = 0 },
	} {
		lines[i].probeMs = 9000
		spoil(&lines[i])
	}
	fit := fitTTFT(t, lines)
	require.Equal(t, ProbesLeft{NoProbe: 2, Shared: 1, Several: 1}, fit.LeftOut)
	require.Equal(t, 26, fit.Fits[0].N)
	require.Greater(t, float64(fit.Fits[0].R2), 0.99)

	log, err := ReadRequestLog(write(t, "log", joined(lines[:4])))
	require.NoError(t, err)
	_, err = PrefillLines(log)
	require.ErrorContains(t, err,
		"no probe was alone on its engine: of 4 lines 2 have no probe, 1 shared the engine (probe_bs > 0), 1 add several attempts up")
}

func TestEveryEngineOfEveryModelHasItsLine(t *testing.T) {
	var lines []logLine
	for _, at := range []struct{ model, engine string }{{"b", "p1"}, {"a", "p0"}, {"a", "p1"}} {
		for _, l := range probes(10, [2]float64{1000, 250}, [2]float64{2000, 340}, [2]float64{4000, 520}) {
			l.model, l.prefill = at.model, at.engine
			lines = append(lines, l)
		}
	}
	var got [][2]string
	fit := fitTTFT(t, lines)
	for _, f := range fit.Fits {
		got = append(got, [2]string{f.Model, f.Prefill})
	}
	require.Equal(t, [][2]string{{"a", "p0"}, {"a", "p1"}, {"a", "all"}, {"b", "p1"}, {"b", "all"}}, got)
	require.Contains(t, fit.Config, "# a, 60 probes")
	require.Contains(t, fit.Config, "# b, 30 probes")
}

func TestTTFTAsTextAndJSON(t *testing.T) {
	fit := fitTTFT(t, append(probes(10, [2]float64{1000, 250}, [2]float64{2000, 340}, [2]float64{4000, 520}),
		logLine{model: "small", prefill: "p9", prompt: 5, probeMs: 3, attempts: 1, outcome: "ok"}))
	var b bytes.Buffer
	require.NoError(t, fit.WriteText(&b))
	for _, want := range []string{"a ms", "b ms/token", "R2", "160.00", "0.09000", "small on p9: not used: 1 probes; 20 are needed",
		"for the config file:", "tp_ms: 0.09, t0_ms: 160.00"} {
		require.Contains(t, b.String(), want)
	}
	data, err := json.Marshal(fit)
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(data, &got))
	require.ElementsMatch(t, []string{"fits", "left_out", "config"}, slices.Sorted(maps.Keys(got)))
	require.ElementsMatch(t, []string{"model", "prefill", "n", "a_ms", "b_ms_per_token", "r2", "min_tokens", "max_tokens"},
		slices.Sorted(maps.Keys(got["fits"].([]any)[0].(map[string]any))))
}

func TestLeastSquaresFindsTheLine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.Float64Range(-1000, 1000).Draw(t, "a"), rapid.Float64Range(0.001, 10).Draw(t, "b")
		xs := rapid.SliceOfNDistinct(rapid.IntRange(0, 2_000_000), 2, 50, rapid.ID).Draw(t, "x")
		var ps []stats.Point
		for _, x := range xs {
			ps = append(ps, stats.Point{X: float64(x), Y: a + b*float64(x)})
		}
		l := stats.LeastSquares(ps)
		require.InEpsilon(t, b, l.Slope, 1e-6)
		require.InDelta(t, a, l.Intercept, 1e-3)
		require.InDelta(t, 1, l.R2, 1e-6)
	})
	require.Equal(t, stats.Line{}, stats.LeastSquares(nil))
	require.Equal(t, stats.Line{N: 2, Intercept: 6, MinX: 3, MaxX: 3}, stats.LeastSquares([]stats.Point{{X: 3, Y: 5}, {X: 3, Y: 7}}),
		"no spread, no slope")
}
