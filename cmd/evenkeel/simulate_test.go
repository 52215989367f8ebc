package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// simulatedJSON is the JSON document of simulate.
type simulatedJSON struct {
	Runs []struct {
		Policy  string
		Seeds   int
		Metrics map[string]struct{ Mean, SD float64 }
	}
	Bound map[string]struct{ Mean, SD float64 }
}

const smallSim = "--workers 4 --slots 4 --requests 200 --seeds 2 "

func TestSimulate(t *testing.T) {
	dir := t.TempDir()
	scenario := textFile(t, "fleet.yaml",
		"groups: [{ranks: [{count: 3}, {slots: 2, cost: 1.5, joins: step 100}]}, {name: b, ranks: [{leaves: 60s}, {}]}]")
	for _, tc := range []struct{ name, line string }{
		{"a closed loop", smallSim + "--policies jsq,br0:window=4,theta=0,evenkeel --out " + dir},
		{"an open loop on a drawn trace", smallSim + "--trace synth:mix --load 0.8 --stale 3 --transfer 1 --policies jsq,brh:horizon=20,evenkeel --predictor exact"},
		{"tight KV", smallSim + "--capacity 9000 --policies jsq-kv,pjsq-kv,br0"},
		{"ranks bound before the prefill", smallSim + "--policies jsq-kv,br0,evenkeel --bind arrival --prefill-ms 200 --prefill-per-token 0.1 --prefills 20 --ahead auto"},
		{"ranks of a deployment", strings.TrimPrefix(smallSim, "--workers 4 ") + "--law gpt-oss-120b,sglang,h200,4 --policies rr,jsq-kv,evenkeel"},
		{"groups of unequal ranks that come and go", strings.TrimPrefix(smallSim, "--workers 4 ") + "--scenario " + scenario + " --policies jsq,br0,evenkeel --pool 20 --c0 20ms --c1 1us"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(append([]string{"simulate", "--json"}, strings.Fields(tc.line)...)...)
			require.Equal(t, 0, status, errs)
			var got simulatedJSON
			require.NoError(t, json.Unmarshal([]byte(out), &got), out)
			require.Len(t, got.Runs, 3)
			for _, r := range got.Runs {
				require.Equal(t, 2, r.Seeds)
				for _, m := range strings.Fields("imbalance_tokens max_minus_min idle_share tokens_per_s tpot_p50_ms tpot_p95_ms ttft_p50_ms " +
					"ttft_p99_ms pool_wait_max_ms tick_p99_us ok failed") {
					require.Contains(t, r.Metrics, m)
				}
				require.EqualValues(t, 200, r.Metrics["ok"].Mean+r.Metrics["failed"].Mean)
			}
			require.Contains(t, got.Bound, "step_ms")
		})
	}
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	require.NoError(t, err)
	require.Contains(t, string(page), "br0:window=4,theta=0")
	require.Contains(t, string(page), "<svg")
	require.FileExists(t, filepath.Join(dir, "report.json"))
}

func TestSimulatePrintsALineAPolicy(t *testing.T) {
	status, out, errs := line(append([]string{"simulate"}, strings.Fields(smallSim+"--policies jsq,br0")...)...)
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `(?m)^jsq +[\d,]+ ± `, out)
	require.Regexp(t, `(?m)^br0 .*×0\.\d\d`, out)
	require.Regexp(t, `(?m)^balanced +0`, out)
	require.Contains(t, out, "at most the idle share times KV's share of a step")
	require.Contains(t, errs, "4 ranks behind one barrier, 4 slots each")
}

func TestSimulateTakesAFitFile(t *testing.T) {
	fit := filepath.Join(t.TempDir(), "fit.json")
	status, _, errs := line("fit", "--trace", azure, "--kind", "survival", "--out", fit)
	require.Equal(t, 0, status, errs)
	status, out, errs := line(append([]string{"simulate", "--json", "--predictor", fit, "--policies", "brh"}, strings.Fields(smallSim)...)...)
	require.Equal(t, 0, status, errs)
	require.Contains(t, out, `"policy": "brh"`)
}

func TestSimulateReplaysADecisionLog(t *testing.T) {
	log := textFile(t, "decisions.jsonl", `{"tick":1,"t_ms":10,"group":"main","in":{"policy":"pjsq-kv","workers":[{"id":0,"free":1,"running":[{"prompt":500,"generated":1}]},{"id":1,"free":1,"running":[]}],"pool":[{"id":7,"prompt":100,"age_ms":5}]},"assign":[[7,1]]}`+"\n")
	status, out, errs := line("simulate", "--log", log, "--policies", "pjsq-kv,prr", "--json")
	require.Equal(t, 0, status, errs)
	var got simulatedJSON
	require.NoError(t, json.Unmarshal([]byte(out), &got))
	require.Equal(t, "recorded", got.Runs[0].Policy)
	require.EqualValues(t, 1, got.Runs[1].Metrics["agreement"].Mean)
	require.EqualValues(t, 401, got.Runs[1].Metrics["imbalance_tokens"].Mean)
	require.EqualValues(t, 601, got.Runs[2].Metrics["imbalance_tokens"].Mean)

	status, out, _ = line("simulate", "--log", log, "--policies", "pjsq-kv")
	require.Equal(t, 0, status)
	require.Regexp(t, `recorded +401`, out)
}

func TestSimulateSaysWhatIsWrong(t *testing.T) {
	for _, tc := range []struct {
		name, line string
		status     int
		want       string
	}{
		{"a load that is neither", "--load full", 1, `--load "full"`},
		{"a load of nothing", "--load 0", 1, `--load "0"`},
		{"a pool where arrivals decide", "--load 0.5 --pool 3", 1, "--pool"},
		{"no ranks", "--workers 0", 1, "--workers 0"},
		{"no slots", "--slots 0", 1, "0 slots"},
		{"a policy nobody knows", "--policies jsq,fast", 1, `unknown policy "fast"`},
		{"a trace that is not there", "--trace none.csv", 1, "none.csv"},
		{"a drawn trace nobody knows", "--trace synth:none", 1, "no synthetic trace"},
		{"a predictor that is neither kind nor file", "--predictor crystal", 1, "crystal"},
		{"a scenario that is not there", "--scenario none.yaml", 1, "none.yaml"},
		{"a log that is not there", "--log none.jsonl", 1, "none.jsonl"},
		{"too few requests", "--requests 3", 1, "take at least"},
		{"another tier", "--tier moon", 2, "--tier"},
		{"flags of another tier", "--tp 3 --t0 1 --preset l4-llama8b", 2, "--tp, --t0, --preset: --tier decode has no such flag, only --tier geo and prefill"},
		{"a switch of another tier", "--no-hotspots", 2, "--hotspots: --tier decode has no such flag"},
		{"a flag of another tier with its default", "--hold 500ms", 2, "--hold: --tier decode has no such flag"},
		{"what a log has", "--log x.jsonl --slots 3", 2, "--slots has no effect with --log, because the log has it; a replay takes --policies, --out, --json"},
		{"ranks that the scenario has", "--scenario none.yaml --workers 3", 2, "--workers does not go with --scenario"},
		{"slots ahead of what is prefilled", "--ahead 3", 2, "--ahead needs --bind arrival"},
		{"so many slots ahead as nobody counts", "--bind arrival --ahead all", 1, `--ahead "all"`},
		{"no engine that prefills", "--prefills 0", 1, "--prefills 0"},
		{"a law nobody knows", "--law mine", 2, `--law: "mine" is no law of the table`},
		{"a law of no name", "--law=", 2, "--law is empty"},
		{"the list of laws as JSON", "--law list --json", 2, "--law list prints all laws and looks at no other flag"},
		{"less than no room", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --capacity=-5", 1, "--capacity -5: a number of KV tokens"},
		{"a policy that keeps all room free", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --slots 4 --seeds 1 --policies evenkeel:watermark=0.9 --capacity 15600", 1, "a request fits no rank"},
		{"more slots than can be kept", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --slots 5000", 1, "--slots 5000: 1 to 4096"},
		{"more requests than can be kept", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --pool 20000000", 1, "--pool 20000000: at most"},
		{"a budget below the slots", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --slots 64 --token-budget 32", 1, "--token-budget 32: 64 to 1048576"},
		{"a budget of ranks that decode", "--law gpt-oss-120b,vllm,H200,4 --token-budget 512", 2, "--token-budget: --tier decode has no such flag"},
		{"prompts in no step", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --prefill-schedule-interval 0", 1, "--prefill-schedule-interval 0: 1 to 64"},
		{"nearly no load", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --load 1e-9", 1, "less than one request at a time"},
		{"ranks beside a law, which has them", "--law gpt-oss-120b,vllm,H200,4 --workers 3", 2, "--workers does not go with --law"},
		{"a fixed part beside a law, which has it", "--law gpt-oss-120b,vllm,H200,4 --c0 3ms", 2, "--c0 does not go with --law"},
		{"ranks that do both, of nobody", "--tier aggregated", 2, "--tier aggregated needs --law"},
		{"ranks that do both and predict", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --predictor exact", 2, "--predictor: --tier aggregated has no such flag"},
		{"a law of prefill engines", "--tier prefill --law gpt-oss-120b,vllm,H200,4", 2, "--law: --tier prefill has no such flag"},
		{"no request in the system", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --slots 4 --pool=-16", 1, "--pool -16: no request would be in the system, which has 16 slots"},
		{"room for no request", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --capacity 100", 1, "--capacity 100: the longest request of the trace has"},
		{"a policy nobody knows for ranks that do both", "--tier aggregated --law gpt-oss-120b,vllm,H200,4 --policies fast", 1, "besides them there are engine and delayer"},
		{"the format of no file", "--format azure --trace synth:mix", 2, "--format needs --trace FILE"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(append([]string{"simulate"}, strings.Fields(tc.line)...)...)
			require.Equal(t, tc.status, status, errs)
			require.Empty(t, out)
			require.Contains(t, errs, tc.want)
		})
	}
}

func TestSimulateListsTheLaws(t *testing.T) {
	status, out, errs := line("simulate", "--law", "list")
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `(?m)^MODEL +ENGINE +GPU +RANKS +form of a decode step$`, out)
	require.Regexp(t, `(?m)^DeepSeek-V3 +sglang +H200 +16 32 64 +own buckets$`, out)
	status, demo, errs := line("demo", "--law", "list")
	require.Equal(t, 0, status, errs)
	require.Equal(t, out, demo)
}

func TestSimulateTellsWhatADeploymentGains(t *testing.T) {
	const interval = `( \([+-][0-9.]+ to [+-][0-9.]+\))?`
	for args, says := range map[string]string{
		"--workers 4 --slots 4 --requests 120 --seeds 2 --policies jsq,evenkeel":                                                    "evenkeel beside jsq: tokens/s ",
		"--law gpt-oss-120b,vllm,h200,4 --slots 8 --requests 300 --seeds 1 --policies jsq,evenkeel":                                 "gpt-oss-120b, vLLM, 4 H200 that decode: evenkeel beside jsq, which is nearest to vLLM's own balancing: tokens/s ",
		"--tier aggregated --law gpt-oss-120b,sglang,h200,4 --slots 8 --seeds 2 --trace synth:lognormal --policies engine,evenkeel": "gpt-oss-120b, SGLang, 4 H200 that prefill and decode: evenkeel beside engine, which is SGLang's own balancing: tokens/s ",
		"--tier aggregated --law gpt-oss-120b,vllm,h200,4 --slots 4 --seeds 1 --load 0.5 --policies engine,delayer,jsq":             "jsq beside engine, which is vLLM's own balancing: tokens/s ",
	} {
		status, out, errs := line(append([]string{"simulate"}, strings.Fields(args)...)...)
		require.Equal(t, 0, status, errs)
		plain := strings.Join(strings.Fields(out), " ")
		_, notes, _ := strings.Cut(out, "\n- ")
		first, _, _ := strings.Cut(notes, "\n- ")
		require.Contains(t, strings.Join(strings.Fields(first), " "), says, "docs/fit.md says that this is the first note")
		gain := `([+-][0-9.]+ %` + interval + `)`
		found := regexp.MustCompile(`tokens/s ` + gain + `, mean TTFT ` + gain + `, TPOT p95 ` + gain + `\.`).FindString(plain)
		require.NotEmpty(t, found, plain)
		require.Equal(t, strings.Contains(args, "--law"), strings.Contains(plain, "NVIDIA measured"))
		if strings.Contains(args, "--seeds 1") {
			require.NotContains(t, found, " to ")
			require.Contains(t, plain, "One seed has no interval")
		} else {
			require.Equal(t, 3, strings.Count(found, " to "), "%s", found)
			require.Contains(t, plain, "means of the ratios of 2 seeds")
		}
	}
}

// What an operator can have by flags of the engine is simulated as those flags are: by other steps.
func TestSimulateTakesTheFlagsOfEngines(t *testing.T) {
	const args = "simulate --tier aggregated --law gpt-oss-120b,vllm,h200,4 --slots 16 --seeds 1 --trace synth:lognormal --policies engine --json "
	seen := map[float64]string{}
	for _, flags := range []string{"", "--token-budget 512", "--prefill-schedule-interval 3"} {
		status, out, errs := line(strings.Fields(args + flags)...)
		require.Equal(t, 0, status, errs)
		var r simulatedJSON
		require.NoError(t, json.Unmarshal([]byte(out), &r))
		ttft := r.Runs[0].Metrics["ttft_mean_ms"].Mean
		require.Positive(t, ttft)
		require.NotContains(t, seen, ttft)
		seen[ttft] = flags
	}
}
