package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
	"evenkeel/prefill/policy"
)

const smallPrefill = "simulate --tier prefill --requests 400 --prefills 3 --seeds 2 "

func TestSimulateThePrefillTier(t *testing.T) {
	race.Alone(t)
	var lines strings.Builder
	for i := range 60 {
		fmt.Fprintf(&lines, `{"timestamp":%d,"input_length":1700,"output_length":5,"hash_ids":[%d,%d,%d,%d]}`+"\n", 3000*(i/4), i%5, 10+i%5, 20+i, 100+i)
	}
	file := textFile(t, "toolagent.jsonl", lines.String())
	for _, tc := range []struct {
		name, line string
		runs       int
	}{
		{"all policies on the embedded trace", "", len(policy.Names())},
		{"a file, several loads, a policy of one's own", "--requests 0 --trace " + file + " --load 0.5,0.85 --policies lmetric,mine --define mine=p_tokens*(bs+1)", 4},
		{"a trace without blocks", "--trace synth:lognormal --policies finish", 1},
		{"engines that decode, a burst, no detector", "--both --c0 20ms --burst 0.6 --no-hotspots --policies finish,bailian:lambda=0.4", 2},
		{"a wrong capacity, learned times, sessions", "--wrong-capacity 4 --learn --affinity --push 2 --beta2 1e-7 --policies finish", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(strings.Fields(smallPrefill + "--json " + tc.line)...)
			require.Equal(t, 0, status, errs)
			var got simulatedJSON
			require.NoError(t, json.Unmarshal([]byte(out), &got), out)
			require.Len(t, got.Runs, tc.runs)
			for _, r := range got.Runs {
				require.Equal(t, 2, r.Seeds)
				for _, m := range strings.Fields("ttft_mean_ms ttft_p50_ms ttft_p90_ms ttft_p99_ms hit_ratio utilisation imbalance load") {
					require.Contains(t, r.Metrics, m)
				}
				require.Positive(t, r.Metrics["ttft_mean_ms"].Mean)
			}
		})
	}
}

func TestSimulatePrefillPrintsATableALoad(t *testing.T) {
	status, out, errs := line(strings.Fields(smallPrefill + "--load 0.5,0.7 --policies lmetric,finish")...)
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `(?m)^load 0.5, [\d,]+ requests an hour$`, out)
	require.Regexp(t, `(?m)^finish +[\d,]+ ± \d+ ×[\d.]+ `, out)
	require.Contains(t, out,
		"Again: evenkeel simulate --tier prefill --load 0.5,0.7 --prefills 3 --seeds 2 --policies lmetric,finish --requests 400 ")
}

func TestSimulatePrefillSaysTheFormatAgain(t *testing.T) {
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp":%d,"input_length":1700,"output_length":5}`+"\n", 1000*i)
	}
	file := textFile(t, "trace", lines.String())
	status, out, errs := line(strings.Fields("simulate --tier prefill --seeds 2 --policies finish --format mooncake --trace " + file)...)
	require.Equal(t, 0, status, errs)
	require.Contains(t, out, "Again: evenkeel simulate --tier prefill --trace "+file+" --format mooncake --prefills 8 ")
}

func TestSimulatePrefillRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--load 0.5,x":            "want shares of time",
		"--load 0.7,1.5":          "above 0 and below 1",
		"--workers 4 --slots 2":   "--workers, --slots: --tier prefill has no such flag",
		"--capacity 1000":         "give at least",
		"--policies lmetrik":      "unknown policy",
		"--define a=b --seeds 1":  "policy a: score: unknown name b (1:1)",
		"--out there":             "--out: --tier prefill has no such flag, only --tier decode",
		"--log there":             "--log: --tier prefill has no such flag",
		"--preset l4-llama8b":     "--preset: --tier prefill has no such flag, only --tier geo",
		"--c0 5ms":                "--c0 needs --both with --tier prefill",
		"--chunk 12":              "--chunk needs --both with --tier prefill",
		"--both --hold 1s":        "--hold does not go with --both",
		"--trace synth:nothing":   "no synthetic trace",
		"--trace /does/not/exist": "no such file",
	} {
		status, _, errs := line(strings.Fields(smallPrefill + args)...)
		require.NotZero(t, status, args)
		require.Contains(t, errs, want, args)
	}
}
