package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/predictor"
)

const azure = "../../bench/lab/trace/azure-2023-conv.csv.gz"

// textFile writes a file of its own for a test.
func textFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// requests are n lines of a request log whose probes take 150 ms + 0.1 ms a token.
func requests(n int) string {
	var b strings.Builder
	for i := range n {
		prompt := 500 + 37*(i%100)
		fmt.Fprintf(&b, `{"id":"%d","model":"m","key":"","arrival":%q,"prefill":"p0","rank":"d0","policy":"br0","prompt_tokens":%d,"cached_tokens":0,"output_tokens":%d,`+
			`"probe_bs":0,"probe_ms":%v,"wait_ms":0,"transfer_ms":1,"ttft_ms":200,"total_ms":900,"attempts":1,"outcome":"ok"}`+"\n",
			i, time.Unix(1_763_632_800+int64(i), 0).UTC().Format(time.RFC3339), prompt, 5+(i*7)%200, 150+0.1*float64(prompt))
	}
	return b.String()
}

// steps are n lines of a step trace of one rank, 55 ms + 2e-4 ms a token.
func steps(n int) string {
	var b strings.Builder
	at := 0.0
	for i := range n {
		kv := 10_000 + 100*(i%60)
		fmt.Fprintf(&b, `{"t_ms":%.3f,"group":"main","rank":0,"step":%d,"running":4,"kv_tokens":%d}`+"\n", at, i+1, kv)
		at += 55 + 2e-4*float64(kv)
	}
	return b.String()
}

func TestFitAzure(t *testing.T) {
	out := filepath.Join(t.TempDir(), "fit.json")
	status, text, errs := line("fit", "--trace", azure, "--kind", "survival", "--out", out)
	require.Equal(t, 0, status, errs)
	require.Contains(t, errs, "fitting survival to 19366 requests")
	require.Regexp(t, `base rate +0\.5000`, text)
	b, err := os.ReadFile(out)
	require.NoError(t, err)
	f, err := predictor.ParseFit(b)
	require.NoError(t, err)
	require.Equal(t, 80, f.Holdout.Horizon)
	require.Equal(t, 19366, f.Outputs.Len(), "all of the trace")
	require.Greater(t, float64(f.Holdout.AUC), 0.7, "clearly above chance")
	require.Less(t, float64(f.Holdout.Brier), 0.85*float64(f.Holdout.Base.Brier), "clearly below the base rate's")
	require.FileExists(t, strings.TrimSuffix(out, ".json")+".svg")
}

func TestFitPrintsOneJSONDocument(t *testing.T) {
	out := filepath.Join(t.TempDir(), "fit.json")
	log, trace := textFile(t, "log.jsonl", requests(300)), textFile(t, "steps.jsonl", steps(300))
	for _, tc := range []struct {
		name string
		line []string
		keys []string
	}{
		{"a predictor from a log", []string{"fit", "--log", log, "--kind", "exact", "--horizon", "40", "--holdout", "0.2", "--out", out},
			[]string{"kind", "horizon", "source", "trained_on", "held_out", "holdout", "base", "compared", "reliability", "file", "plot"}},
		{"the prefill line", []string{"fit", "ttft", "--log", log}, []string{"fits", "left_out", "config"}},
		{"the step model", []string{"fit", "step", "--log", trace}, []string{"groups", "config"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, text, errs := line(append(tc.line, "--json")...)
			require.Equal(t, 0, status, errs)
			var got map[string]any
			require.NoError(t, json.Unmarshal([]byte(text), &got))
			for _, key := range tc.keys {
				require.Contains(t, got, key)
			}
		})
	}
}

func TestFitLines(t *testing.T) {
	status, text, errs := line("fit", "ttft", "--log", textFile(t, "log", requests(60)))
	require.Equal(t, 0, status, errs)
	require.Contains(t, text, "calibration: {tp_ms: 0.1, t0_ms: 150.00}")

	status, text, errs = line("fit", "step", "--log", textFile(t, "steps", steps(300)))
	require.Equal(t, 0, status, errs)
	require.Contains(t, text, "step_model: {c0_ms: 55, c1_ms: 0.0002}")

	log := textFile(t, "decisions", `{"tick":1,"t_ms":1763632800010,"group":"main","in":{"workers":[{"id":3,"free":1,"running":[{"prompt":9000,"generated":1000}]}],"pool":[]},"assign":[]}`+"\n")
	status, text, errs = line("fit", "step", "--log", textFile(t, "steps", steps(300)), "--decisions", log, "--shift", "1763632800000")
	require.Equal(t, 0, status, errs)
	require.Contains(t, text, "mirror of KV tokens against the trace:")
	require.Contains(t, text, "0.000 %")
}

func TestAFitThatMayNotBeUsedEndsWith1(t *testing.T) {
	for _, command := range []string{"ttft --log " + textFile(t, "log", requests(5)), "step --log " + textFile(t, "steps", steps(50))} {
		status, text, errs := line(append([]string{"fit"}, strings.Fields(command)...)...)
		require.Equal(t, 1, status, command)
		require.Empty(t, errs)
		require.Contains(t, text, "not used: ")
	}
}

func TestFitRefuses(t *testing.T) {
	short := textFile(t, "short.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,5\n1,5,5\n")
	out := filepath.Join(t.TempDir(), "fit.json")
	for _, tc := range []struct {
		name, line string
		status     int
		says       string
	}{
		{"no source", "fit --out " + out, 2, "--trace or --log"},
		{"two sources", "fit --trace a --log b --out " + out, 2, "--trace or --log"},
		{"no place for the file", "fit --trace " + azure, 2, "--out"},
		{"a kind that is none", "fit --trace " + azure + " --kind oracle --out " + out, 2, "--kind"},
		{"a horizon of nothing", "fit --trace " + azure + " --horizon 0 --out " + out, 2, "--horizon 0: look at least 1 step ahead"},
		{"a hold-out of all", "fit --trace " + azure + " --holdout 1 --out " + out, 2, "--holdout 1: write a share above 0 and below 1"},
		{"a shift of nothing", "fit step --log x --shift 5", 2, "--shift needs --decisions"},
		{"no such trace", "fit --trace none.csv --out " + out, 1, "none.csv"},
		{"a trace for a log", "fit --log " + azure + " --out " + out, 1, "not a line of evenkeel's request log"},
		{"too few requests", "fit --trace " + short + " --out " + out, 1, "want at least 50"},
		{"no such log", "fit ttft --log none", 1, "none"},
		{"no such step trace", "fit step --log none", 1, "none"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, text, errs := line(strings.Fields(tc.line)...)
			require.Equal(t, tc.status, status, errs)
			require.Empty(t, text)
			require.Contains(t, errs, tc.says)
			require.NoFileExists(t, out)
		})
	}
}

func TestFitHelp(t *testing.T) {
	for command, says := range map[string][]string{
		"fit":           {"--trace FILE", "fit ttft", "fit step", "fit predictor"},
		"fit predictor": {"--trace", "--log", "--kind", "--horizon", "--holdout", "--out", "--json"},
		"fit ttft":      {"--log", "--json"},
		"fit step":      {"--log", "--decisions", "--shift", "--json"},
	} {
		status, text, _ := line(append(strings.Fields(command), "--help")...)
		require.Equal(t, 0, status)
		for _, want := range says {
			require.Contains(t, text, want, command)
		}
	}
}
