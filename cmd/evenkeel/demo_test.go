package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/step"
)

// small makes a demo of seconds: 2 ranks of 4 slots, quick steps.
func small(dir string, more ...string) []string {
	return append([]string{"demo", "--out", dir, "--workers", "2", "--slots", "4", "--extra", "8", "--c0", "1ms", "--prefill-base", "2ms"},
		more...)
}

// noLeak looks for goroutines that outlive a demo.
func noLeak(t *testing.T) func() {
	before := goleak.IgnoreCurrent()
	sleeper := goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2") // ends within 10 s of its server
	clock := goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1")      // one a process
	return func() { goleak.VerifyNone(t, before, sleeper, clock) }
}

func TestDemo(t *testing.T) {
	defer noLeak(t)()
	var out, progress bytes.Buffer
	dir := filepath.Join(t.TempDir(), "made", "for", "it")
	status := run(small(dir, "--requests", "60", "--policies", "jsq,br0:window=4,theta=0", "--json"), streams{&out, &progress})
	require.Zero(t, status, progress.String())

	var doc struct {
		Runs []struct {
			Policy  string
			Seeds   int
			Metrics map[report.Metric]report.Value
		}
		Bound map[report.Metric]report.Value
	}
	dec := json.NewDecoder(bytes.NewReader(out.Bytes()))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&doc))
	require.False(t, dec.More(), "one document")
	require.Len(t, doc.Runs, 2)
	require.Equal(t, "jsq", doc.Runs[0].Policy)
	require.Equal(t, "br0:window=4,theta=0", doc.Runs[1].Policy)
	for _, r := range doc.Runs {
		require.Equal(t, 1, r.Seeds)
		for _, name := range []report.Metric{"imbalance_tokens", "max_minus_min", "idle_share", "tokens_per_s", "tpot_p50_ms", "tpot_p95_ms",
			"ttft_p50_ms",
			"ttft_p99_ms", "pool_wait_max_ms", "tick_p99_us", "step_ms", "window_s"} {
			require.Positive(t, r.Metrics[name].Mean, "%s of %s", name, r.Policy)
		}
		require.Equal(t, report.Value{Mean: 60}, r.Metrics["ok"])
		require.Equal(t, report.Value{}, r.Metrics["failed"])
		require.Greater(t, doc.Bound["tokens_per_s"].Mean, 0.0)
		require.LessOrEqual(t, r.Metrics["idle_share"].Mean, 1.0)
	}
	require.Zero(t, doc.Bound["imbalance_tokens"].Mean)

	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	require.NoError(t, err)
	require.Equal(t, 4+3, bytes.Count(page, []byte("<svg")), "plots, and the waterline with its two panes")
	require.Contains(t, string(page), "br0:window=4,theta=0,max_age_ms=3000")
	require.Contains(t, string(page), "0 leaked, 0 still pinned, 0 pulls or writes of other KV, drift of the proxy&#39;s books 0")
	require.NotContains(t, string(page), "NaN")
	saved, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	require.Equal(t, out.String(), string(saved))
	require.Contains(t, progress.String(), filepath.Join(dir, "report.html"))
}

// aggregated makes a demo of seconds, of ranks that prefill and decode.
func aggregated(dir string, more ...string) []string {
	return append([]string{"demo", "--aggregated", "--out", dir, "--workers", "2", "--slots", "4", "--c0", "1ms", "--prefill-base", "1ms",
		"--jitter", "1ms"}, more...)
}

func TestDemoOfRanksThatPrefillAndDecode(t *testing.T) {
	defer noLeak(t)()
	var out, progress bytes.Buffer
	dir := t.TempDir()
	status := run(aggregated(dir, "--requests", "60"), streams{&out, &progress})
	require.Zero(t, status, progress.String())
	require.Contains(t, progress.String(), "2 ranks of 4 slots that prefill and decode, 7 requests in the system")
	require.NotContains(t, progress.String(), "too few")
	require.Regexp(t, `policy +rr +jsq-kv +delayer +evenkeel +balanced\n`, out.String())
	require.Regexp(t, `ok +60 +60 +60 +60\n`, out.String())
	for _, line := range []string{"steps with prefill, %", "ranks without, %", "throughput, tokens/s", "TTFT p50, ms", "TTFT p99, ms",
		"TPOT p50, ms", "TPOT p95, ms", "step, ms"} {
		require.Regexp(t, regexp.QuoteMeta(line)+` +[0-9]`, out.String())
	}
	text, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	var doc struct {
		Runs []struct {
			Metrics map[report.Metric]report.Value
		}
	}
	require.NoError(t, json.Unmarshal(text, &doc))
	for _, r := range doc.Runs {
		require.LessOrEqual(t, r.Metrics[report.MixedSteps].Mean, 1.0)
		require.LessOrEqual(t, r.Metrics[report.EmptyRanks].Mean, 0.5, "one of the two ranks computes a prompt")
	}
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	require.NoError(t, err)
	for _, says := range []string{"evenkeel demo --aggregated --requests 60", "--extra=-1 ", "in steps without a prefill",
		"Steps that compute a prompt",
		"evenkeel: drift of the proxy&#39;s books 0", "max_hold=1,max_age_ms=3000"} {
		require.Contains(t, string(page), says)
	}
	require.NotContains(t, string(page), "NaN")
}

// Ranks of a deployment step as its law says, only faster, and the last note is what the table of
// README has.
func TestDemoOfADeployment(t *testing.T) {
	for args, want := range map[string]struct {
		runs  int
		words string
		model string
	}{
		"--law gpt-oss-120b,sglang,h200,4":            {5, "gpt-oss-120b, SGLang, 4 H200 that decode: evenkeel beside rr, which is nearest to SGLang's own balancing: tokens/s ", "--law gpt-oss-120b,sglang,H200,4 --slots 4"},
		"--aggregated --law gpt-oss-120b,vllm,h200,4": {4, "gpt-oss-120b, vLLM, 4 H200 that prefill and decode: evenkeel beside jsq, which is nearest to vLLM's own balancing: tokens/s ", "--aggregated --requests 70 --slots 4 --extra=-2"},
	} {
		var out, progress bytes.Buffer
		dir := t.TempDir()
		status := run(append([]string{"demo", "--out", dir, "--slots", "4", "--requests", "70"}, strings.Fields(args)...),
			streams{&out, &progress})
		require.Zero(t, status, progress.String())
		said := strings.Join(strings.Fields(out.String()), " ")
		if !strings.Contains(said, "This machine was too slow for engines that are 5 times as fast") { // its cores had other work
			require.Contains(t, said, want.words)
		}
		require.Contains(t, progress.String(), "they step as gpt-oss-120b,")
		page, err := os.ReadFile(filepath.Join(dir, "report.html"))
		require.NoError(t, err)
		require.True(t, strings.Contains(string(page), want.model), "the command that makes the page again")
		text, err := os.ReadFile(filepath.Join(dir, "report.json"))
		require.NoError(t, err)
		var doc struct{ Runs []json.RawMessage }
		require.NoError(t, json.Unmarshal(text, &doc))
		require.Len(t, doc.Runs, want.runs)
	}
}

// The engines of a demo take what the deployment's take, in all parts of a step: each part is so
// many times as fast.
func TestADemoStepsAsTheDeployment(t *testing.T) {
	for _, e := range laws.All() {
		if e.Prompt.Fit.Steps == 0 {
			continue
		}
		c := demoCmd{Law: e.Name(), Slots: 8, demoAggregated: demoAggregated{Aggregated: true}}
		require.NoError(t, c.lookUpLaw(nil))
		c.setAggregatedDefaults(nil)
		c.setLawDefaults(nil)
		got, want := c.aggregatedEngine(demoPolicy{}).Steps.Law, e.Served()
		ranks := make([]step.Rank, e.Ranks)
		for i := range ranks {
			ranks[i] = step.Rank{Requests: float64(8 - i%3), KV: 9000, Prompt: float64(100 * (i % 2))}
		}
		require.InEpsilon(t, want.Ms(ranks), c.speedup()*got.Ms(ranks), 1e-9, e.Name())
		require.InEpsilon(t, want.C1Ms*1e6, c.speedup()*c.stepModel().C1, 1e-9, e.Name())
		require.GreaterOrEqual(t, c.Requests, 2*(c.concurrency()+c.warmUpRequests()), "something is measured")
		require.Equal(t, e.Ranks, c.aggregatedEngine(demoPolicy{}).DPSize)
	}
}

// Two users of a machine, or two demos of one, do not write over each other.
func TestEachDemoHasAFolderOfItsOwn(t *testing.T) {
	defer noLeak(t)()
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	require.NoError(t, os.WriteFile(filepath.Join(temp, "evenkeel-demo"), nil, 0o400), "of another user")
	for range 2 {
		var out, progress bytes.Buffer
		args := small("", "--requests", "5", "--policies", "rr")
		require.Equal(t, "--out", args[1])
		status := run(append(args[:1], args[3:]...), streams{&out, &progress})
		require.Zero(t, status, progress.String())
		require.Contains(t, progress.String(), "5 requests are too few to measure anything")
	}
	reports, err := filepath.Glob(filepath.Join(temp, "evenkeel-demo-*", "report.html"))
	require.NoError(t, err)
	require.Len(t, reports, 2)
}

func TestDemoFailsIfAStreamDoes(t *testing.T) {
	defer noLeak(t)()
	var csv strings.Builder
	csv.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 20 {
		tokens := 100
		if i == 7 {
			tokens = 140_000 // more than the engines' context
		}
		fmt.Fprintf(&csv, "2023-11-16 18:00:%02d,%d,20\n", i, tokens)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "my.csv")
	require.NoError(t, os.WriteFile(file, []byte(csv.String()), 0o600))

	var out, progress bytes.Buffer // with more slots than requests nothing is ever measured, however late the requests are sent
	require.Equal(t, 1, run(small(dir, "--requests", "20", "--slots", "16", "--policies", "prr", "--trace", file), streams{&out, &progress}))
	require.Contains(t, progress.String(), "prr: 1 of 20 streams failed, 0 of them with a wrong answer")
	require.Contains(t, progress.String(), "http_400")
	require.Regexp(t, `failed +1\n`, out.String())
	require.Contains(t, progress.String(), "prr: nothing could be measured")
	require.NotContains(t, out.String(), "imbalance, KV tokens")
}

func TestDemoEndsWhenAsked(t *testing.T) {
	defer noLeak(t)()
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	progress := writerFunc(func(p []byte) (int, error) {
		if bytes.HasPrefix(p, []byte("1/2 rr")) { // everything is up
			time.AfterFunc(100*time.Millisecond, cancel)
		}
		return len(p), nil
	})
	c := demoCmd{Out: t.TempDir(), Requests: 500, Workers: 2, Slots: 4, Extra: 8, Policies: "rr,br0", Seed: 1, C0: time.Millisecond, C1: 200,
		Prefills: 1, PrefillBase: time.Millisecond, PrefillPerToken: 1000, Window: time.Millisecond, MaxAge: time.Second}
	require.ErrorIs(t, c.run(ctx, streams{&out, progress}), errFailed)
	require.Empty(t, out.String())
}

// Whoever types the command of a report runs the same demo again.
func TestTheCommandOfAReportRunsItAgain(t *testing.T) {
	for _, args := range []string{
		"--connector sglang --extra 4 --policies rr,br0 --prefills 3",
		"--aggregated --extra=-2 --policies engine,br0 --prefill-shared 6us --token-budget 512 --jitter 1ms --max-hold 2s",
	} {
		args += " --requests 10 --workers 2 --slots 3 --trace t.csv --seed 5 --c0 2ms --c1 3us --prefill-base 4ms --prefill-per-token 5us " +
			"--window 2ms --max-age 4s"
		parse := func(line string) (c demoCmd) {
			var cli commands
			parser, err := kong.New(&cli, helpVariables())
			require.NoError(t, err)
			_, err = parser.Parse(strings.Fields(line)[1:])
			require.NoError(t, err, line)
			return cli.Demo
		}
		c := parse("evenkeel demo " + args)
		require.Equal(t, c, parse(c.commandLine()))
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestDemoRefusesBeforeItStarts(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a policy nobody knows", []string{"--policies", "jsq,best"}, `unknown policy "best"`},
		{"no ranks", []string{"--workers", "0"}, "--workers 0: at least 1"},
		{"a file that is not there", []string{"--trace", "/no/such/file.csv"}, "no such file"},
		{"steps without cost", []string{"--c1", "0s"}, "--c1"},
		{"a folder that cannot be made", []string{"--out", "/dev/null/x"}, "--out"},
		{"fewer requests than none", []string{"--aggregated", "--extra=-128"}, "--extra -128: no request would be in the system, which has 128 slots"},
		{"less for a step than its answers need", []string{"--aggregated", "--token-budget", "15"}, "--token-budget 15: each of the 16 slots needs one token"},
		{"a hold that is negative", []string{"--aggregated", "--max-hold=-1s"}, "--max-hold must not be negative"},
		{"the engines' delayer where they only decode", []string{"--policies", "delayer"}, `unknown policy "delayer"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out, progress bytes.Buffer
			require.Equal(t, 1, run(append([]string{"demo"}, tt.args...), streams{&out, &progress}))
			require.Contains(t, progress.String(), tt.want)
			require.Empty(t, out.String())
		})
	}
}

func TestDemoRefusesFlagsThatNothingWouldLookAt(t *testing.T) {
	for line, says := range map[string]string{
		"demo --token-budget 4096":                        "--token-budget without --aggregated",
		"demo --aggregated --prefills 3":                  "--prefills with --aggregated",
		"demo --aggregated --connector nixl-pull":         "--connector with --aggregated",
		"demo --law mine":                                 `--law: "mine" is no law of the table`,
		"demo --law list --json":                          "--law list prints all laws and looks at no other flag",
		"demo --law=":                                     "--law is empty",
		"demo --law gpt-oss-120b,vllm,H200,4 --workers 4": "--workers does not go with --law",
		"demo --aggregated --law gpt-oss-120b,vllm,H200,4 --prefill-base 1ms": "--prefill-base does not go with --law",
	} {
		var out, progress bytes.Buffer
		require.Equal(t, 2, run(strings.Fields(line), streams{&out, &progress}))
		require.Contains(t, progress.String(), says)
	}
}

func TestDemoPoliciesGetTheGuardAge(t *testing.T) {
	c := demoCmd{Requests: 1, Workers: 1, Slots: 1, Prefills: 1, C0: 1, C1: 1, MaxAge: 2500 * time.Millisecond,
		Policies: "jsq,pjsq,br0,br0:max_age_ms=7,br0:paper"}
	got, err := c.checkFlags()
	require.NoError(t, err)
	require.Equal(t, []demoPolicy{
		{"jsq", "jsq"}, {"pjsq", "pjsq:max_age_ms=2500"}, {"br0", "br0:max_age_ms=2500"}, {"br0:max_age_ms=7", "br0:max_age_ms=7"}, {"br0:paper", "br0:paper"},
	}, got)
}

func TestDemoSeedsSendOtherPartsOfTheTrace(t *testing.T) {
	all := trace.Azure().Requests
	for seed, first := range map[uint64]int{1: 2000, 2: 3000, 17: 18_000, 19_367: 2000} {
		c := demoCmd{Requests: 1000, Seed: seed}
		got, history, source, err := c.readRequests()
		require.NoError(t, err)
		require.Equal(t, all[first:first+1000], got, "seed %d", seed)
		require.Equal(t, all[first-2000:first], history, "learned from what came before")
		require.Contains(t, source, "Azure")
	}
	c := demoCmd{Requests: len(all) + 5, Seed: 1}
	got, _, _, err := c.readRequests()
	require.NoError(t, err)
	require.Equal(t, got[:5], got[len(all):], "a longer run starts again")
}

func TestDemoQuantile(t *testing.T) {
	series := func(values ...float64) *dto.Metric {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Buckets: []float64{1, 2, 4}})
		for _, v := range values {
			h.Observe(v)
		}
		var m dto.Metric
		require.NoError(t, h.Write(&m))
		return &m
	}
	for _, tt := range []struct {
		name   string
		series []*dto.Metric
		q      float64
		want   float64
	}{
		{"half of the first bucket", []*dto.Metric{series(0.5, 0.6)}, 0.5, 0.5},
		{"within a later bucket", []*dto.Metric{series(0.5, 1.5, 1.5, 3)}, 0.75, 2},
		{"two series are one", []*dto.Metric{series(0.5, 1.5), series(1.5, 3)}, 0.75, 2},
		{"an empty bucket is passed over", []*dto.Metric{series(3, 3)}, 0.5, 3},
	} {
		t.Run(tt.name, func(t *testing.T) { require.InDelta(t, tt.want, quantile(tt.series, tt.q), 1e-9) })
	}
	require.True(t, math.IsNaN(quantile(nil, 0.5)), "nothing was observed")
	require.True(t, math.IsNaN(quantile([]*dto.Metric{series(9)}, 0.5)), "beyond the last bucket")
}

func TestDemoKVShareOfKnownTraces(t *testing.T) {
	azure := fullScale.KVShare(16 * trace.Resident(trace.Azure().Requests))
	require.InDelta(t, 0.08, azure, 0.015)
	require.InDelta(t, 0.43, fullScale.KVShare(16*mooncakeKVPerRequest), 0.005)
}

func TestAReportOfNoTwoRunsHasNoAnimation(t *testing.T) {
	dir := t.TempDir()
	_, err := writeReport(&report.Report{}, dir)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(dir, "report.html"))
	require.NoFileExists(t, filepath.Join(dir, "waterline.svg"))
}

func TestAfterAPolicyThatFailsEarlyNoneStarts(t *testing.T) {
	var tried []string
	_, err := new(demoCmd).runTrials(t.Context(), []demoPolicy{{name: "a"}, {name: "b"}, {name: "c"}},
		func(p demoPolicy, _ string, sent func()) (*trial, error) {
			tried = append(tried, p.name)
			if p.name == "b" {
				return nil, errors.New("its engines did not come up")
			}
			sent()
			return &trial{}, nil
		})
	require.EqualError(t, err, "policy b: its engines did not come up")
	require.Equal(t, []string{"a", "b"}, tried)
}
