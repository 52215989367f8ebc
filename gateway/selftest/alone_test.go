package selftest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// both is a config of engines that prefill and decode, two ranks behind each URL.
func both(t *testing.T, p mooncake.Profile, urls ...string) *config.Config {
	t.Helper()
	c := config.Default()
	c.Profiles = map[string]mooncake.Profile{config.DefaultAggregated: p}
	for _, u := range urls {
		c.Engines.Aggregated = append(c.Engines.Aggregated, config.Engine{URL: u, Ranks: 2, Slots: 32, Budget: 2048})
	}
	require.NoError(t, c.Validate())
	return c
}

func noConnector() mooncake.Profile {
	return mooncake.Profile{Connector: mooncake.None, DPMode: mooncake.DPInternal}
}

func TestEachRankThatPrefillsAndDecodesIsTriedAlone(t *testing.T) {
	var mu sync.Mutex
	asked := map[string]int{}
	heard := func(path string, h http.Header) {
		if path == mooncake.Completions.Path() {
			mu.Lock()
			defer mu.Unlock()
			asked[h.Get("X-Data-Parallel-Rank")]++
		}
	}
	a := start(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal", Hooks: refengine.Hooks{OnRequest: heard}})
	b := start(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal", Hooks: refengine.Hooks{OnRequest: heard}})
	c := both(t, noConnector(), a.URLs()[0], b.URLs()[0])
	for _, every := range []bool{false, true} {
		found := Run(t.Context(), c, Options{EveryPair: every})
		require.Empty(t, pick(found, Bad))
		require.Empty(t, pick(found, Warn))
		require.Len(t, pick(found, OK), 8, "each rank answers, and each engine says what it holds and does not tell")
		require.Contains(t, pick(found, OK)[1], "aggregated: does not tell its --max-num-seqs")
		require.Regexp(t, `^aggregated: computed a prompt of \d+ tokens and answered with 4$`, pick(found, OK)[7])
	}
	require.Equal(t, map[string]int{"0": 4, "1": 4}, asked)
}

func TestARankThatFailsAloneIsTold(t *testing.T) {
	e := start(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal"})
	e.SetFaults(refengine.Rule{Fault: refengine.Busy, Rank: new(1)})
	found := Run(t.Context(), both(t, noConnector(), e.URLs()[0]), Options{})
	require.Len(t, pick(found, Bad), 1)
	require.Contains(t, pick(found, Bad)[0], "a request was answered with 503")
}

// A test's request has a slot of its rank, and another proxy's ranks are left alone.
func TestARankIsTriedAloneOnASlot(t *testing.T) {
	e := start(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal"})
	var mu sync.Mutex
	var sat []string
	left := 0
	engines := both(t, noConnector(), e.URLs()[0])
	found := Run(t.Context(), engines, Options{TakeSlot: func(_ context.Context, rank string, _ int) (Slot, error) {
		mu.Lock()
		defer mu.Unlock()
		if sat = append(sat, rank); len(sat) == 2 {
			return Slot{}, ErrNotOwned
		}
		return Slot{Release: func() { left++ }}, nil
	}})
	require.Empty(t, pick(found, Bad))
	host, err := url.Parse(e.URLs()[0])
	require.NoError(t, err)
	require.Equal(t, []string{host.Host + "/0", host.Host + "/1"}, sat)
	require.Equal(t, 1, left)
	require.Len(t, pick(found, OK), 3)
}

func TestADiscoveredEngineThatPrefillsAndDecodesIsTriedAlone(t *testing.T) {
	e := start(t, refengine.Config{Role: refengine.Aggregated})
	c := both(t, mooncake.Profile{Connector: mooncake.None}, e.URLs()[0])
	conf := config.Engine{URL: e.URLs()[0], Profile: config.DefaultAggregated}
	found, err := TryEngine(t.Context(), c, aggregated, conf, nil, nil)
	require.NoError(t, err)
	require.Empty(t, pick(found, Warn))
	e.SetFaults(refengine.Rule{Fault: refengine.Busy})
	_, err = TryEngine(t.Context(), c, aggregated, conf, nil, nil)
	require.ErrorContains(t, err, "answered with 503")
}

// told puts an answer of /server_info before an engine.
func told(t *testing.T, raw, answer string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/server_info" {
			_, _ = w.Write([]byte(answer))
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		req, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), r.Method, raw+r.URL.RequestURI(), bytes.NewReader(body))
		if err != nil {
			return
		}
		req.Header, req.Close = r.Header.Clone(), true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return
		}
		defer func() { _ = resp.Body.Close() }()
		all, err := io.ReadAll(resp.Body) // whole, so that nothing is begun that does not end
		if err != nil {
			return
		}
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		_, _ = w.Write(all)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestSettingsThatDifferFromTheConfigAreTold(t *testing.T) {
	e := start(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal"})
	sglang := noConnector()
	sglang.Connector = mooncake.SGLang
	for _, tc := range []struct {
		name, answer string
		profile      mooncake.Profile
		warns        []string
	}{
		{"vLLM is as the config says", `{"vllm_config":{"scheduler_config":{"max_num_seqs":32,"max_num_batched_tokens":2048,"prefill_schedule_interval":1}}}`, noConnector(), nil},
		{
			"vLLM has larger steps, and an interval", `{"vllm_config":{"scheduler_config":{"max_num_seqs":32,"max_num_batched_tokens":8192,"prefill_schedule_interval":2}}}`, noConnector(),
			[]string{
				"aggregated: was started with --max-num-batched-tokens 8192, and the config says token_budget: 2048; write 8192",
				"aggregated: was started with --prefill-schedule-interval 2, and the config says prefill_schedule_interval: 1; write 2, but not for " +
					"a rank that steps alone and is older than vLLM 0.33: it ignores this flag",
			},
		},
		{
			"SGLang rests after a prefill", `{"prefill_decode_interval":22,"prefill_decode_interval_min_bs":0}`, sglang,
			[]string{"aggregated: was started with --prefill-decode-interval 22 (or chose it itself), " +
				"and the config says prefill_schedule_interval: 1; write 23"},
		},
		{"SGLang rests after no prefill", `{"prefill_decode_interval":0}`, sglang, nil},
		{"SGLang holds nothing", `{"enable_prefill_delayer":false}`, sglang, nil},
		{
			"SGLang holds prompts itself", `{"enable_prefill_delayer":true}`, sglang,
			[]string{"aggregated: holds prompts back itself (--enable-prefill-delayer). evenkeel holds them, too, and one hold is enough; start " +
				"it without this flag"},
		},
		{
			"SGLang waits for free slots", `{"min_free_slots_delay":4}`, sglang,
			[]string{"aggregated: holds prompts back itself (--min-free-slots-delay 4). evenkeel holds them, too, and one hold is enough; start " +
				"it with --min-free-slots-delay 1"},
		},
		{
			"SGLang with DSpark waits for free slots by itself", `{"min_free_slots_delay":null,"speculative_algorithm":"DSPARK"}`, sglang,
			[]string{"aggregated: holds prompts back itself (--speculative-algorithm DSPARK, which turns --min-free-slots-delay on). evenkeel " +
				"holds them, too, and one hold is enough; start it with --min-free-slots-delay 1"},
		},
		{"SGLang with DFlash that was told not to wait", `{"min_free_slots_delay":1,"speculative_algorithm":"DFLASH"}`, sglang, nil},
		{"SGLang without speculation", `{"min_free_slots_delay":null,"speculative_algorithm":null}`, sglang, nil},
		{
			"vLLM tells a number that cannot be right", `{"vllm_config":{"scheduler_config":{"max_num_seqs":333333333333333333,"max_num_batched_tokens":1e30}}}`, noConnector(),
			[]string{`aggregated: does not tell its max_num_seqs: the engine's page cannot be right: max_num_seqs says "333333333333333333"`, `aggregated: does not tell its max_num_batched_tokens: the engine's page cannot be right: max_num_batched_tokens says "1e30"`},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			found := Run(t.Context(), both(t, tc.profile, told(t, e.URLs()[0], tc.answer)), Options{})
			require.Empty(t, pick(found, Bad))
			require.Equal(t, tc.warns, pick(found, Warn))
			require.Equal(t, strings.Contains(tc.answer, `"max_num_batched_tokens":8192`), strings.Contains(strings.Join(pick(found, OK), "\n"),
				"computes up to 8192 tokens in a step (--max-num-batched-tokens). With fewer"))
		})
	}
}

func TestADecodeEngineThatKeepsTheKVOfAnswersIsTold(t *testing.T) {
	const (
		costs  = "keeps the KV of each answer for the next request of its chat (bidirectional_kv_xfer), for 480 s"
		counts = "keeps the KV of each answer for the next request of its chat (bidirectional_kv_xfer), and evenkeel counts its room as taken " +
			"for 8m0s"
		none    = "keeps the KV of no answer, although its profile has hand_back: counted"
		another = "was started with decoder_kv_blocks_ttl 60, and its profile says 8m0s; write decoder_kv_blocks_ttl: 60s"
	)
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.NIXLPull})
	settings := func(extra string) string {
		return `{"vllm_config":{"kv_transfer_config":{"kv_role":"kv_consumer","kv_connector_extra_config":` + extra + `}}}`
	}
	for name, tc := range map[string]struct {
		version  string
		keeps    bool
		handBack string
		settings string
		whole    bool // an answer in one piece is asked for, too
		level    Level
		says     []string
	}{
		"it keeps none":                           {"0.33.0", false, "", "", true, Warn, nil},
		"its streams say so":                      {"0.33.0", true, "", "", false, Warn, []string{costs}},
		"its streams do not say so":               {"0.32.0", true, "", "", false, Warn, nil},
		"its answers in one piece say so":         {"0.32.0", true, "", "", true, Warn, []string{costs}},
		"it is counted":                           {"0.33.0", true, "counted", "", true, OK, []string{counts}},
		"it is counted, and only the whole says":  {"0.32.0", true, "counted", "", true, OK, []string{counts}},
		"it is counted for nothing":               {"0.32.0", false, "counted", "", true, Warn, []string{none}},
		"its settings say so":                     {"0.32.0", true, "", settings(`{"bidirectional_kv_xfer":true}`), false, Warn, []string{costs}},
		"its settings say otherwise":              {"0.32.0", false, "", settings(`{"bidirectional_kv_xfer":false}`), false, Warn, nil},
		"both say so":                             {"0.33.0", true, "", settings(`{"bidirectional_kv_xfer":true}`), true, Warn, []string{costs}},
		"its settings say another time than ours": {"0.33.0", true, "counted", settings(`{"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":60}`), true, Warn, []string{another}},
	} {
		t.Run(name, func(t *testing.T) {
			c := refengine.Config{Role: refengine.Decode, Connector: refengine.NIXLPull, Version: tc.version}
			if tc.keeps {
				c.KV.KeepsAnswers = time.Minute
			}
			url := start(t, c).URLs()[0]
			if tc.settings != "" {
				url = told(t, url, tc.settings)
			}
			found := Run(t.Context(), cluster(t, mooncake.Profile{Connector: mooncake.NIXLPull, HandBack: tc.handBack}, p.URLs(), []string{url}),
				Options{Resumes: tc.whole})
			require.Empty(t, pick(found, Bad))
			said := slices.DeleteFunc(pick(found, tc.level), func(s string) bool { return tc.level == OK && !strings.Contains(s, "the KV of") })
			require.Len(t, said, len(tc.says), "%v", said)
			for i, want := range tc.says {
				require.Contains(t, said[i], "decode: "+want)
			}
			if tc.level == OK {
				require.Empty(t, pick(found, Warn))
			}
		})
	}
}

func TestAnEngineThatIsBothIsTold(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.NIXLPull})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.NIXLPull})
	role := `{"vllm_config":{"kv_transfer_config":{"kv_role":"kv_both"}}}`
	found := Run(t.Context(), cluster(t, mooncake.Profile{Connector: mooncake.NIXLPull}, []string{told(t, p.URLs()[0], role)},
		[]string{told(t, d.URLs()[0], role)}), Options{})
	require.Empty(t, pick(found, Bad))
	said := pick(found, Warn)
	require.Len(t, said, 2)
	require.Contains(t, said[0], "prefill: was started with kv_role kv_both, which vLLM deprecates for NIXL")
	require.Contains(t, said[1], "decode: was started with kv_role kv_both")
}

func TestADecodeEngineWithAsManySlotsAsItRunsIsTold(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.NIXLPull})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.NIXLPull})
	for _, tc := range []struct {
		runs        int
		level       Level
		says, never string
	}{
		{31, Warn, "decode: was started with --max-num-seqs 31, and the config says slots: 32, so that requests wait inside the engine; write at most 31", ""},
		{32, OK, "decode: was started with --max-num-seqs 32, which is its slots.", ""},
		{36, OK, "", "max-num-seqs"},
	} {
		cfg := cluster(t, mooncake.Profile{Connector: mooncake.NIXLPull}, p.URLs(), []string{told(t, d.URLs()[0], fmt.Sprintf(`{"vllm_config":{"scheduler_config":{"max_num_seqs":%d}}}`, tc.runs))})
		cfg.Engines.Decode[0].Slots = 32
		found := Run(t.Context(), cfg, Options{})
		require.Empty(t, pick(found, Bad))
		said := strings.Join(pick(found, tc.level), "\n")
		require.Contains(t, said, tc.says)
		if tc.never != "" {
			require.NotContains(t, said, tc.never)
		}
	}
}
