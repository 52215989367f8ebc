package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/step"
	"evenkeel/gateway/keys"
)

const vectorFolder = "../../bench/lab/vectors/testdata"

func TestVectors(t *testing.T) {
	status, out, errs := line("vectors", vectorFolder)
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `^\d+ passed, 0 failed\n$`, out)

	status, out, errs = line("vectors", filepath.Join(vectorFolder, "br0.jsonl"), filepath.Join(vectorFolder, "subset.jsonl"))
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `^\d+ passed, 0 failed\n$`, out)

	later := filepath.Join(t.TempDir(), "later.jsonl")
	require.NoError(t, os.WriteFile(later, []byte(`{"kind":"later","id":"l-1","in":{},"want":{}}`+"\n"), 0o600))
	status, out, errs = line("vectors", later)
	require.Equal(t, 1, status, "an unknown kind is a failure, not a skip")
	require.Empty(t, errs, "everything is said on stdout")
	require.Contains(t, out, "unknown kind")
	require.Regexp(t, `0 passed, 1 failed\n$`, out)

	status, _, errs = line("vectors", filepath.Join(t.TempDir(), "none.jsonl"))
	require.Equal(t, 1, status)
	require.Contains(t, errs, "none.jsonl")
}

// snapshot is the first vector of br0.
func snapshot(t *testing.T) string {
	t.Helper()
	all, err := os.ReadFile(filepath.Join(vectorFolder, "br0.jsonl"))
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(all), "\n")
	path := filepath.Join(t.TempDir(), "snapshot.json")
	require.NoError(t, os.WriteFile(path, []byte(first), 0o600))
	return path
}

func TestDecide(t *testing.T) {
	file := snapshot(t)
	status, out, errs := line("decide", "--snapshot", file, "--policy", "br0", "--json")
	require.Equal(t, 0, status, errs)
	var report map[string]any
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.Len(t, report, 3)
	require.Contains(t, report["policy"], "br0")
	require.NotEmpty(t, report["assignments"])
	for _, a := range report["assignments"].([]any) {
		require.Len(t, a, 4)
		for _, key := range []string{"entry", "worker", "score", "stage"} {
			require.IsType(t, 0.0, a.(map[string]any)[key], key)
		}
	}
	require.NotEmpty(t, report["left"])
	for _, l := range report["left"].([]any) {
		require.Len(t, l, 2)
		require.IsType(t, 0.0, l.(map[string]any)["entry"])
		require.NotEmpty(t, l.(map[string]any)["why"])
	}

	status, table, errs := line("decide", "--snapshot", file, "--policy", "br0")
	require.Equal(t, 0, status, errs)
	require.Regexp(t, `(?m)^entry +worker +score +stage$`, table)
	require.Equal(t, 2+len(report["assignments"].([]any))+len(report["left"].([]any)), strings.Count(table, "\n"))

	for _, tc := range []struct {
		name, file, policy, says string
	}{
		{"a policy nobody knows", file, "brx", "there are br0"},
		{"a file that is not there", file + ".none", "br0", "no such file"},
		{"a file that is no snapshot", "main.go", "br0", ""},
	} {
		status, out, errs := line("decide", "--snapshot", tc.file, "--policy", tc.policy, "--json")
		require.Equal(t, 1, status, tc.name)
		require.Empty(t, out, tc.name)
		require.Contains(t, errs, "evenkeel decide: ", tc.name)
		require.Contains(t, errs, tc.says, tc.name)
	}
}

func TestVersion(t *testing.T) {
	status, out, _ := line("version")
	require.Equal(t, 0, status)
	require.Regexp(t, `^evenkeel \S+, commit \S+, `+runtime.Version()+` `+runtime.GOOS+`/`+runtime.GOARCH+`\n$`, out)
}

func TestKeysNewIsReadByServe(t *testing.T) {
	status, out, errs := line("keys", "new", "--name", "batch jobs", "--trusted")
	require.Equal(t, 0, status, errs)
	path := filepath.Join(t.TempDir(), "keys.yaml")
	require.NoError(t, os.WriteFile(path, []byte("keys:\n"+out), 0o600))
	_, err := keys.Load(path)
	require.NoError(t, err, out)
	require.Contains(t, out, "batch jobs")
	require.Contains(t, out, "trusted: true")

	status, out, errs = line("keys", "new", "--name=")
	require.Equal(t, 1, status)
	require.Empty(t, out, "an entry that serve would refuse")
	require.Contains(t, errs, "a key needs a name")
}

func write(t *testing.T, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "evenkeel.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestCheck(t *testing.T) {
	good := write(t, "engines: {prefill: [{url: \"http://127.0.0.1:1\"}], decode: [{url: \"http://d0:1\", slots: 4}]}\n")
	status, out, errs := line("check", "--config", good)
	require.Equal(t, 0, status, errs)
	require.Equal(t, good+": ok, 1 prefill and 1 decode engines, policy evenkeel\n", out)
	together := write(t, "engines: {aggregated: [{url: \"http://127.0.0.1:1\", ranks: 2, slots: 4}]}\n")
	_, out, _ = line("check", "--config", together)
	require.Equal(t, together+": ok, 1 aggregated engine, policy evenkeel\n", out)
	both := write(t, "engines: {prefill: [{url: \"http://127.0.0.1:1\"}], decode: [{url: \"http://d0:1\", slots: 4}], aggregated: [{url: "+
		"\"http://a0:1\", slots: 4}]}\n")
	_, out, _ = line("check", "--config", both)
	require.Equal(t, both+": ok, 1 prefill, 1 decode and 1 aggregated engines, policy evenkeel\n", out)
	misspelt := write(t, "engines: {prefill: [{url: \"http://127.0.0.1:1\"}], decode: [{url: \"http://d0:1\", slots: 4, ranks: 8, "+
		"group: main}, {url: \"http://d1:1\", slots: 4, ranks: 8, group: main}, "+
		"{url: \"http://d2:1\", slots: 4, ranks: 8, group: mian}]}\n")
	_, out, _ = line("check", "--config", misspelt)
	require.Equal(t, misspelt+": ok, 1 prefill and 3 decode engines, policy evenkeel, ranks of each decode group: main (16), mian (8)\n",
		out)

	status, out, _ = line("check", "-c", good, "--json")
	require.Equal(t, 0, status)
	require.JSONEq(t, `{"config":"`+good+`","errors":[],"findings":[]}`, out)

	listing := write(t, "decode: [{url: 7}]\n")
	status, out, _ = line("check", "--config", write(t, "discovery: {files: ["+listing+", /nowhere]}\n"))
	require.Equal(t, 0, status, "serve starts without")
	require.Contains(t, out, "warn discovery.files: "+listing+":1:16: engines.decode[0].url")
	require.Contains(t, out, "warn discovery.files: open /nowhere")

	bad := write(t, "pool: {size: 0, tll: 5s}\n")
	status, out, errs = line("check", "--config", bad)
	require.Equal(t, 1, status)
	require.Empty(t, out)
	require.Contains(t, errs,
		bad+":1:17: pool.tll: no such key (did you mean \"ttl\"?); the keys here are size, ttl\n>    1 | pool: {size: 0, tll: 5s}\n")
}

func TestCheckProbesTheEngines(t *testing.T) {
	start := func(role refengine.Role, faults ...refengine.Rule) string {
		e, err := refengine.Start(refengine.Config{Role: role, Steps: refengine.Steps{C0: time.Millisecond},
			Prompts: refengine.Prompts{Base: time.Millisecond}, Answers: refengine.Answers{PromptTokensDetails: true},
			Faults: faults})
		require.NoError(t, err)
		t.Cleanup(e.Close)
		return e.URLs()[0]
	}
	p, d := start(refengine.Prefill), start(refengine.Decode)
	cluster := func(p, d string) string {
		return write(t, "engines:\n  prefill: [{url: \""+p+"\"}]\n  decode: [{url: \""+d+"\", slots: 4}]\n")
	}
	status, out, errs := line("check", "--config", cluster(p, d), "--probe")
	require.Equal(t, 0, status, out+errs)
	require.Contains(t, out, "ok   decode "+strings.TrimPrefix(d, "http://")+": decoded 4 tokens of a hand-off\n")

	a := start(refengine.Aggregated)
	status, out, errs = line("check", "--config", write(t, "engines: {aggregated: [{url: \""+a+"\", slots: 4}]}\n"), "--probe")
	require.Equal(t, 0, status, out+errs)
	require.Regexp(t, `ok   aggregated `+strings.TrimPrefix(a, "http://")+`: computed a prompt of \d+ tokens and answered with 4\n`, out)
	require.Contains(t, out, "does not tell its --max-num-seqs")

	broken := start(refengine.Prefill, refengine.Rule{Fault: refengine.NullHandoff})
	status, out, errs = line("check", "--config", cluster(broken, d), "--probe", "--json")
	require.Equal(t, 1, status)
	require.Empty(t, errs)
	var report struct {
		Findings []struct{ Engine, Level, Message string }
	}
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.Len(t, report.Findings, 3, "what each engine holds, and what is wrong")
	require.Equal(t, "bad", report.Findings[2].Level)
	require.Equal(t, "prefill "+strings.TrimPrefix(broken, "http://"), report.Findings[2].Engine)
}

func TestEveryEngineFlagReachesTheEngine(t *testing.T) {
	c := engineCmd{
		Role: "decode", Listen: "127.0.0.1:1", Advertise: "a", DPSize: 2, DPMode: "internal", Group: "g", Model: "m", MaxModelLen: 3,
		Version: "v", APIKey: "k",
		Slots: 4, KVTokens: 500, MaxQueued: 6, C0: 7, C1: 8, TokensPerChunk: 9, StreamInterval: 10, Recompute: true, PrefillBase: 11,
		PrefillPerToken: 12, PrefixCache: 15,
		KVEvents: 16, KVEventsEncoding: "map",
		Connector: "nixl-pull", FlatBlockIDs: true, Holds: holdFlags{KVHoldTimeout: 13, KeepsAnswers: 14}, RejectReleases: true,
		ErrorShape: "rust", OldMetricNames: true,
		Fault: []string{`{"fault":"hang","after_tokens":3}`}, Seed: 14,
		Steps:  stepFlags{CR: 17, Jitter: 18, CM: 25, CS: 26, Padding: "masked", Captured: 27},
		SGLang: sglangFlags{BootstrapTimeout: 19, WaitingTimeout: 20, BarrierMetrics: true},
		Aggregated: aggregatedFlags{MaxNumBatchedTokens: 21, PrefillShared: 22, PrefillScheduleInterval: 23, PrefillFirst: true,
			PrefillDelayer: 24},
	}
	got, err := c.config()
	require.NoError(t, err)
	require.Equal(t, refengine.Config{
		Role: refengine.Decode, Connector: refengine.NIXLPull, Version: "v", Group: "g", DPSize: 2, DPMode: "internal", Slots: 4, MaxQueued: 6,
		Jitter: 18, Seed: 14, Faults: []refengine.Rule{{Fault: refengine.Hang, AfterTokens: 3}},
		Server: refengine.Server{Listen: "127.0.0.1:1", Advertise: "a", APIKey: "k"}, Model: refengine.Model{Name: "m", MaxLen: 3},
		Steps: refengine.Steps{C0: 7, C1: 8, TokensPerChunk: 9, StreamInterval: 10, Recompute: true, CR: 17, CM: 25, CS: 26, Form: step.Masked,
			Captured: 27},
		Prompts:  refengine.Prompts{Base: 11, PerToken: 12, MaxBatchedTokens: 21, Shared: 22, Interval: 23, First: true, Delayer: 24},
		KV:       refengine.KV{Tokens: 500, PrefixCache: 15, FlatBlockIDs: true, HoldTimeout: 13, KeepsAnswers: 14, RejectReleases: true},
		KVEvents: refengine.KVEvents{Address: "127.0.0.1:16", Encoding: "map"},
		SGLang:   refengine.SGLangOptions{BootstrapTimeout: 19, WaitingTimeout: 20, BarrierMetrics: true},
		Answers:  refengine.Answers{PromptTokensDetails: true, ErrorShape: refengine.ShapeRust, OldMetricNames: true},
	}, got)
}

func TestTop(t *testing.T) {
	flags, _, _ := cluster(t, time.Millisecond)
	proxy := serve(t, flags...)
	status, out, errs := line("top", "--once", "--admin", strings.TrimPrefix(proxy.admin, "http://"))
	require.Zero(t, status, errs)
	for _, want := range []string{": ready\n", "group main: 2 ranks, policy evenkeel", "prefill policy finish: ", "engines: "} {
		require.Contains(t, out, want)
	}
	status, _, errs = line("top", "--once", "--admin", proxy.public)
	require.Equal(t, 1, status)
	require.Contains(t, errs, "evenkeel's admin listener", "the wrong port is the first mistake")
	status, _, errs = line("top", "--once", "--token-file", "/nowhere")
	require.Equal(t, 1, status)
	require.Contains(t, errs, "--token-file")
	full := writerFunc(func([]byte) (int, error) { return 0, syscall.ENOSPC })
	var said strings.Builder
	require.Equal(t, 1, run([]string{"top", "--once", "--admin", proxy.admin}, streams{full, &said}), "nothing was written")
	require.Contains(t, said.String(), syscall.ENOSPC.Error())
}
