package refengine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine/steplog"
)

func TestEveryEndpoint(t *testing.T) {
	e := start(t, Config{DPSize: 2, Model: Model{MaxLen: 4096}, Server: Server{APIKey: "secret"}})
	c := client(t)
	key := []string{"Authorization", "Bearer secret"}
	for _, row := range []struct {
		name, method, path, body string
		header                   []string
		status                   int
		says                     string
	}{
		{"health", "GET", "/health", "", nil, 200, ""},
		{"health by HEAD", "HEAD", "/health", "", nil, 200, ""},
		{"version", "GET", "/version", "", nil, 200, `"version":"0.27.1"`},
		{"models", "GET", "/v1/models", "", key, 200, `"max_model_len":4096`},
		{"models without a key", "GET", "/v1/models", "", nil, 401, ""},
		{"a completion without a key", "POST", "/v1/completions", completionBody("a", ""), nil, 401, ""},
		{"metrics", "GET", "/metrics", "", nil, 200, "vllm:kv_cache_usage_perc"},
		{"stats", "GET", "/stats", "", nil, 200, `"unknown_handoffs":0`},
		{"faults", "GET", "/faults", "", nil, 200, "recomputed"},
		{"faults that do not exist", "POST", "/faults", `{"rules":[{"fault":"nope"}]}`, nil, 400, "no fault"},
		{"faults with an unknown member", "POST", "/faults", `[{"fault":"hang","often":1}]`, nil, 400, "often"},
		{"faults by PUT", "PUT", "/faults", "", nil, 405, ""},
		{"tokenize text", "POST", "/tokenize", `{"model":"ref","prompt":"a b c"}`, nil, 200, `"count":3`},
		{"tokenize a chat", "POST", "/tokenize", chatBody("a b", ""), nil, 200, `"count":2`},
		{"tokenize nothing", "POST", "/tokenize", `{}`, nil, 400, "prompt"},
		{"prefix cache", "POST", "/reset_prefix_cache", "", nil, 200, ""},
		{"bootstrap of another connector", "GET", "/query", "", nil, 404, ""},
		{"a pull without an id", "POST", "/kv/pull", `{}`, nil, 400, "id"},
		{"unknown path", "GET", "/nope", "", nil, 404, "Not Found"},
		{"wrong method", "GET", "/v1/completions", "", nil, 405, "Not Allowed"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := do(c, row.method, e.URLs()[1]+row.path, row.body, row.header...)
			require.NoError(t, r.err)
			require.Equal(t, row.status, r.status, r.body)
			require.Contains(t, r.body, row.says)
		})
	}
}

func gauge(t *testing.T, page, name string, labels ...string) (values []float64) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	require.NoError(t, err, page)
	require.Contains(t, families, name)
	for _, m := range families[name].GetMetric() {
		for _, l := range m.GetLabel() {
			for i := 0; i+1 < len(labels); i += 2 {
				if l.GetName() == labels[i] {
					require.Equal(t, labels[i+1], l.GetValue())
				}
			}
		}
		values = append(values, m.GetGauge().GetValue())
	}
	return values
}

func TestMetricsOfARank(t *testing.T) {
	e := start(t, Config{DPSize: 2, KV: KV{Tokens: 1280}})
	c := client(t)
	probe(t, c, e, "a b")
	page := do(c, "GET", e.URLs()[0]+"/metrics", "").body
	require.Equal(t, []float64{0.1}, gauge(t, page, "vllm:kv_cache_usage_perc", "engine", "0"), "a pinned block of ten")
	require.Equal(t, []float64{1}, gauge(t, page, "vllm:cache_config_info", "num_gpu_blocks", "10", "block_size", "128", "engine", "0"))
	require.Equal(t, []float64{0}, gauge(t, page, "vllm:num_requests_running"))
	require.InDelta(t, float64(time.Now().Unix()), gauge(t, page, "process_start_time_seconds")[0], 60)

	internal := start(t, Config{DPSize: 3, DPMode: "internal", Answers: Answers{OldMetricNames: true}})
	page = do(c, "GET", internal.URLs()[0]+"/metrics", "").body
	require.Len(t, gauge(t, page, "vllm:gpu_cache_usage_perc"), 3, "a series a rank")
	require.Len(t, gauge(t, page, "vllm:cache_config_info", "num_gpu_blocks", fmt.Sprint(3*internal.Config().KV.Tokens/128)), 3,
		"the blocks of all ranks, told for each")
	require.NotContains(t, page, "vllm:kv_cache_usage_perc")
}

func TestFaultsOverHTTP(t *testing.T) {
	e := start(t, Config{})
	c := client(t)
	ask := func() int {
		return do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", `"max_tokens":1,`)).status
	}
	r := do(c, "POST", e.URLs()[0]+"/faults", `{"rules":[{"fault":"busy","skip":1,"count":2},{"fault":"throttle","leg":"probe"}]}`)
	require.Equal(t, 200, r.status, r.body)
	require.Equal(t, []int{200, 503, 503, 200}, []int{ask(), ask(), ask(), ask()})
	do(c, "POST", e.URLs()[0]+"/faults", `[{"fault":"internal"}]`)
	require.Equal(t, 500, ask())
	require.Equal(t, 200, do(c, "DELETE", e.URLs()[0]+"/faults", "").status)
	require.Equal(t, 200, ask())
}

func TestTheStepTraceHasALineARankAndStep(t *testing.T) {
	var out bytes.Buffer
	e, err := Start(quick(Config{DPSize: 2, Steps: Steps{Trace: &out}, Group: "g"}))
	require.NoError(t, err)
	do(client(t), "POST", e.URLs()[1]+"/v1/completions", completionBody("a b c", `"max_tokens":3,`))
	steps := e.Steps()
	e.Close()
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 6)
	for i, line := range lines {
		var got struct {
			Group    string
			Rank     int
			Step     int64
			Running  int
			KVTokens int     `json:"kv_tokens"`
			At       float64 `json:"t_ms"`
		}
		require.NoError(t, json.Unmarshal([]byte(line), &got), line)
		require.Equal(t, "g", got.Group)
		require.Equal(t, i%2, got.Rank)
		require.EqualValues(t, i/2+1, got.Step)
		require.Equal(t, steps[i/2].Ranks[i%2], steplog.RankLoad{Running: got.Running, KVTokens: got.KVTokens})
		if got.Rank == 1 {
			require.Equal(t, steplog.RankLoad{Running: 1, KVTokens: 3 + i/2}, steplog.RankLoad{Running: got.Running, KVTokens: got.KVTokens})
		}
	}
}

func TestATraceWhoseWriterFailsHoldsNothingUp(t *testing.T) {
	e := start(t, Config{Steps: Steps{Trace: broken{}}})
	require.Equal(t, 200, do(client(t), "POST", e.URLs()[0]+"/v1/completions", completionBody("a b c", `"max_tokens":3,`)).status)
	eventually(t, "what was lost is counted", func() bool { return e.Stats().TraceDropped == 3 })
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, bytes.ErrTooLarge }

func TestConfigsThatCannotWork(t *testing.T) {
	for want, c := range map[string]Config{
		"role":           {Role: "x"},
		"connector":      {Connector: "sglang"},
		"dp mode":        {DPMode: "hybrid"},
		"listen":         {Server: Server{Listen: "nowhere"}},
		"slots":          {Slots: -1},
		"KV tokens":      {KV: KV{Tokens: 5}},
		"c0":             {Steps: Steps{C0: -1}},
		"fault 0":        {Faults: []Rule{{Fault: "x"}}},
		"has no phase":   {Faults: []Rule{{Fault: Busy, Phase: PhaseAccept}}},
		"probability":    {Faults: []Rule{{Fault: Busy, Probability: 2}}},
		"400..599":       {Faults: []Rule{{Fault: Status}}},
		"no leg":         {Faults: []Rule{{Fault: Busy, Leg: "x"}}},
		"no error shape": {Faults: []Rule{{Fault: Busy, Shape: "x"}}},
	} {
		_, err := Start(c)
		require.ErrorContains(t, err, want)
	}
	e := start(t, Config{})
	_, err := Start(Config{Server: Server{Listen: strings.TrimPrefix(e.URLs()[0], "http://")}})
	require.ErrorContains(t, err, "choose another listen address")
}

func TestCloseEndsWhatRuns(t *testing.T) {
	e, err := Start(Config{Steps: Steps{C0: time.Hour}, Prompts: Prompts{Base: time.Hour}})
	require.NoError(t, err)
	c := client(t)
	var wg sync.WaitGroup
	for _, more := range []string{`"stream":true,`, "", probeMore} {
		wg.Go(func() { do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a", more)) })
	}
	eventually(t, "three run", func() bool { s := e.Stats(); return s.Running+s.Waiting == 3 })
	e.Close()
	wg.Wait()
	e.Close()
	require.Error(t, e.Revive())
}
