package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const smallGeo = "like: skew\nwarm_s: 2\nmeasure_s: 10\nregions: [{replicas: 1, clients: 6}, {replicas: 1, clients: 2}]\nrtt_ms: [[3, " +
	"90], [90, 3]]\n"

func TestSimulateTheGeoTier(t *testing.T) {
	args := []string{"simulate", "--tier", "geo", "--scenario", textFile(t, "two.yaml", smallGeo), "--seeds", "2", "--policies",
		"skylb:push=sp-p,tau=2,finish,region-local"}
	status, out, errs := line(append(args, "--json")...)
	require.Equal(t, 0, status, errs)
	var got simulatedJSON
	require.NoError(t, json.Unmarshal([]byte(out), &got), out)
	require.Len(t, got.Runs, 3)
	require.Equal(t, "skylb:push=sp-p,tau=2", got.Runs[0].Policy)
	for _, r := range got.Runs {
		require.Equal(t, 2, r.Seeds)
		for _, m := range strings.Fields("ttft_mean_ms ttft_p50_ms ttft_p90_ms ttft_p99_ms hit_ratio tokens_per_s forwards egress_bytes " +
			"egress_usd e2e_mean_ms e2e_p50_ms e2e_p90_ms e2e_p99_ms spread") {
			require.Contains(t, r.Metrics, m)
		}
		require.Zero(t, r.Metrics["violations"].Mean)
	}

	status, out, errs = line(args...)
	require.Equal(t, 0, status, errs)
	require.Contains(t, out, "TTFT mean")
	require.Contains(t, out, "Again: evenkeel simulate --tier geo --scenario")
	require.NotContains(t, out, "invariant")
}

func TestSimulateTheGeoTierSaysWhatIsWrong(t *testing.T) {
	for _, row := range []struct{ name, flags, want string }{
		{"an unknown scenario", "--scenario nowhere", "--scenario: scenario \"nowhere\": there are multi-turn"},
		{"an unknown preset", "--preset h100", "unknown preset \"h100\""},
		{"an unknown policy", "--policies sky", "unknown policy \"sky\""},
		{"a trace", "--trace synth:mix", "--trace: --tier geo has no such flag"},
		{"a log", "--log x", "--log: --tier geo has no such flag"},
		{"plots", "--out x", "--out: --tier geo has no such flag, only --tier decode"},
		{"a load", "--load 0.7 --requests 100", "--load, --requests: --tier geo has no such flag, only --tier aggregated, decode and prefill"},
		{"decode ranks", "--workers 8 --slots 16 --pool 3 --capacity 1 --stale 1 --transfer 1 --predictor none", "--workers, --slots, --pool, --capacity, --stale, --transfer, --predictor: --tier geo has no such flag"},
		{"decode steps", "--c0 55ms --c1 200ns", "--c0, --c1: --tier geo has no such flag"},
		{"prefill engines", "--prefills 2 --both --define a=b", "--prefills, --both, --define: --tier geo has no such flag, only --tier decode and prefill"},
	} {
		status, _, errs := line(append([]string{"simulate", "--tier", "geo"}, strings.Fields(row.flags)...)...)
		require.NotZero(t, status, row.name)
		require.Contains(t, errs, row.want, row.name)
	}
}
