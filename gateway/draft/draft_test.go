package draft

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stub is an engine that answers these paths, and 404 to others.
func stub(t *testing.T, answers map[string]string) (url string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, ok := answers[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, answer)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

const models = `{"object":"list","data":[{"id":"m","max_model_len":4096}]}`

// What an engine says of its slots counts, and else what a person says (--slots).
func TestSlotsOfAPerson(t *testing.T) {
	for server, want := range map[string]int{
		`{}`: 16,
		`{"vllm_config":{"scheduler_config":{"max_num_seqs":64}}}`:   64,
		`{"disaggregation_mode":"decode"}`:                           16,
		`{"disaggregation_mode":"decode","max_running_requests":48}`: 48,
	} {
		list := []Entry{{Engine: config.Engine{URL: stub(t, map[string]string{"/health": "", "/server_info": server}), Slots: 16},
			Role: "decode"}}
		Ask(t.Context(), list, "")
		require.Equal(t, want, list[0].Slots, server)
	}
}

func TestAsk(t *testing.T) {
	for _, tt := range []struct {
		name    string
		answers map[string]string
		given   string // role
		want    Entry
		says    []string
	}{
		{
			"SGLang tells all", map[string]string{"/health": "", "/v1/models": models, "/server_info": `{"version":"0.5.4","disaggregation_mode":"decode","max_running_requests":128,"dp_size":4,"disaggregation_bootstrap_port":8998}`, "/metrics": "sglang:max_total_num_tokens 90000\n"}, "",
			Entry{Engine: config.Engine{Ranks: 4, Slots: 32}, Role: "decode", Connector: mooncake.SGLang, Bootstrap: 8998},
			[]string{"It is SGLang 0.5.4.", "It is a decode engine: its disaggregation_mode is decode.", "room for 90000 tokens in all"},
		},
		{
			"an older SGLang", map[string]string{"/health": "", "/get_server_info": `{"version":"0.4.9","disaggregation_mode":"prefill"}`}, "",
			Entry{Role: "prefill", Connector: mooncake.SGLang},
			[]string{"It is SGLang 0.4.9.", "GET /v1/models did not tell its models", "GET /metrics could not be read"},
		},
		{
			"an SGLang that does both", map[string]string{"/health": "", "/server_info": `{"version":"0.5.23","disaggregation_mode":"null","max_running_requests":128,"dp_size":4,"enable_dp_attention":true,"chunked_prefill_size":2048,"enable_prefill_delayer":true,"prefill_decode_interval":22}`}, "",
			Entry{Engine: config.Engine{Ranks: 4, Slots: 32, Budget: 2048, Interval: 23}, Role: "aggregated", Connector: mooncake.SGLang},
			[]string{"It is an aggregated engine: its disaggregation_mode is null.",
				"It holds prompts back itself (--enable-prefill-delayer). One hold is enough"},
		},
		{
			"an SGLang that waits for free slots", map[string]string{"/health": "", "/server_info": `{"disaggregation_mode":"null","max_running_requests":64,"dp_size":4,"min_free_slots_delay":4}`}, "",
			Entry{Engine: config.Engine{Ranks: 4, Slots: 16}, Role: "aggregated", Connector: mooncake.SGLang},
			[]string{"It holds prompts back itself (--min-free-slots-delay 4). One hold is enough: start it with --min-free-slots-delay 1."},
		},
		{
			"an SGLang with DFlash, which waits for free slots by itself", map[string]string{"/health": "", "/server_info": `{"disaggregation_mode":"null","max_running_requests":64,"min_free_slots_delay":null,"speculative_algorithm":"DFLASH"}`}, "",
			Entry{Engine: config.Engine{Slots: 64}, Role: "aggregated", Connector: mooncake.SGLang},
			[]string{"It holds prompts back itself (--speculative-algorithm DFLASH, which turns --min-free-slots-delay on). One hold is enough: " +
				"start it with --min-free-slots-delay 1."},
		},
		{
			"numbers of SGLang that cannot be right", map[string]string{"/health": "", "/v1/models": `{"data":[{"id":"m","max_model_len":-3}]}`, "/metrics": "sglang:token_usage +Inf\n",
				"/server_info": `{"disaggregation_mode":"null","max_running_requests":333333333333333333,"dp_size":1e30,"chunked_prefill_size":-2}`}, "",
			Entry{Role: "aggregated", Connector: mooncake.SGLang},
			[]string{`The engine's page cannot be right: max_running_requests says "333333333333333333".`, `cannot be right: dp_size says "1e30".`, `chunked_prefill_size says "-2".`,
				`The engine's page cannot be right: max_model_len says "-3".`, `It serves "m".`, "The engine's page cannot be right: sglang:token_usage says +Inf."},
		},
		{
			"numbers of vLLM that cannot be right",
			map[string]string{"/health": "", "/metrics": "vllm:cache_config_info{num_gpu_blocks=\"99999999999999999999\",block_size=\"16\"} 1\n",
				"/server_info": `{"vllm_config":{"kv_transfer_config":null,"scheduler_config":{"max_num_seqs":1e30,"max_num_batched_tokens":-5,"prefill_schedule_interval":2.5}}}`}, "",
			Entry{Role: "aggregated"},
			[]string{`max_num_seqs says "1e30".`, `max_num_batched_tokens says "-5".`, `prefill_schedule_interval says "2.5".`, `The engine's page cannot be right: vllm:cache_config_info num_gpu_blocks says "99999999999999999999".`},
		},
		{
			"an SGLang whose ranks are replicas", map[string]string{"/health": "", "/server_info": `{"disaggregation_mode":"null","max_running_requests":128,"dp_size":4,"enable_dp_attention":false,"chunked_prefill_size":-1}`}, "",
			Entry{Engine: config.Engine{Ranks: 4, Slots: 128}, Role: "aggregated", Connector: mooncake.SGLang}, nil,
		},
		{
			"vLLM in developer mode without a connector", map[string]string{"/health": "", "/version": `{"version":"0.32.0"}`, "/v1/models": models, "/server_info": `{"vllm_config":{"kv_transfer_config":null,"scheduler_config":{"max_num_seqs":64,"max_num_batched_tokens":8192,"prefill_schedule_interval":2}}}`}, "",
			Entry{Engine: config.Engine{Slots: 64, Budget: 8192, Interval: 2}, Role: "aggregated"},
			[]string{"It is an aggregated engine: it has no KV connector."},
		},
		{
			"vLLM that hands nothing over", map[string]string{"/health": "", "/version": `{"version":"0.32.0"}`, "/v1/models": models, "/v1/completions": `{"choices":[{"text":"b"}],"kv_transfer_params":null}`}, "",
			Entry{Role: "aggregated"}, []string{"It is an aggregated engine: when it was asked to hand a prompt over, it handed nothing over.",
				"MooncakeConnector", "It does not tell its --prefill-schedule-interval."},
		},
		{
			"vLLM that hands its prompts over", map[string]string{"/health": "", "/version": `{"version":"0.32.0"}`, "/v1/models": models, "/v1/completions": `{"choices":[{"text":"b"}],"kv_transfer_params":{"transfer_mode":"push"}}`}, "",
			Entry{Connector: mooncake.NIXLPush}, []string{"Nothing that it answers says whether it prefills or decodes."},
		},
		{
			"an engine that a person calls aggregated", map[string]string{"/health": "", "/v1/models": models, "/server_info": `{"kv_transfer_config":{"kv_connector":"NixlConnector","kv_role":"kv_producer"}}`}, "aggregated",
			Entry{Role: "aggregated", Connector: mooncake.NIXLPull},
			[]string{"You call it an aggregated engine, but its kv_role is kv_producer, which makes it a prefill engine."},
		},
		{
			"vLLM tells neither", map[string]string{"/health": "", "/version": `{"version":"0.27.1"}`, "/v1/models": models, "/metrics": "vllm:cache_config_info{num_gpu_blocks=\"300\",block_size=\"16\",engine=\"0\"} 1\n"}, "decode",
			Entry{Role: "decode"}, []string{"Its version is 0.27.1.", `It serves "m", with a context of 4096 tokens.`, "room for 4800 tokens in all"},
		},
		{
			"a capacity that means something else", map[string]string{"/health": "", "/version": `{"version":"0.31.0"}`, "/v1/models": models, "/metrics": "vllm:cache_config_info{num_gpu_blocks=\"300\",block_size=\"4\",engine=\"0\"} 1\n"}, "decode",
			Entry{Role: "decode"}, []string{"would have room for 1200 tokens, less than one request needs (4096), so that number " +
				"means something else. Write kv_tokens"},
		},
		{
			"vLLM in developer mode", map[string]string{"/health": "", "/version": `{"version":"0.27.1"}`, "/server_info": `{"vllm_config":"... kv_transfer_config=KVTransferConfig(kv_connector='NixlConnector', engine_id='x', kv_role='kv_producer') ..."}`}, "",
			Entry{Role: "prefill", Connector: mooncake.NIXLPull}, []string{"It is a prefill engine: its kv_role is kv_producer."},
		},
		{
			"vLLM with both roles", map[string]string{"/health": "", "/server_info": `{"kv_transfer_config":{"kv_connector":"MyConnector","kv_role":"kv_both"}}`}, "",
			Entry{}, []string{"Its version is unknown.", "Nothing that it answers says", "Its kv_role is kv_both, which vLLM deprecates for NIXL.",
				"Its kv_connector is MyConnector, for which there is no profile"},
		},
		{
			"another role than a person gave", map[string]string{"/health": "", "/server_info": `{"version":"0.5.4","disaggregation_mode":"decode"}`}, "prefill",
			Entry{Role: "prefill", Connector: mooncake.SGLang},
			[]string{"You call it a prefill engine, but its disaggregation_mode is decode, which makes it a decode engine."},
		},
		{
			"several ranks in the metrics", map[string]string{"/health": "",
				"/metrics": "vllm:kv_cache_usage_perc{engine=\"0\"} 0\nvllm:kv_cache_usage_perc{engine=\"1\"} 0\n"}, "decode",
			Entry{Engine: config.Engine{Ranks: 2}, Role: "decode"}, []string{"Its metrics name 2 DP ranks."},
		},
		{
			"a web server", map[string]string{"/": "<html>"}, "decode",
			Entry{Role: "decode"}, []string{"It answered GET /health with status 404", "did not tell its models"},
		},
		{
			"lines that would leave their comment", map[string]string{"/health": "", "/version": `{"version":"1\nlisten: evil"}`, "/v1/models": `{"data":[{"id":"a\n\u2028b: c"},{"id":"2"},{"id":"3"},{"id":"4"},{"id":"5"},{"id":"6"}]}`}, "decode",
			Entry{Role: "decode"}, []string{"Its version is 1 listen: evil.", `a model that is left out says "a\n\u2028b: c"`, "It serves 2 more models."},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			entries := []Entry{{Engine: config.Engine{URL: stub(t, tt.answers)}, Role: tt.given}}
			Ask(t.Context(), entries, "")
			notes := strings.Join(entries[0].Notes, "\n")
			for _, want := range tt.says {
				require.Contains(t, notes, want)
			}
			for _, n := range entries[0].Notes {
				require.NotContains(t, n, "\n")
			}
			tt.want.URL = entries[0].URL
			text, err := File(config.Default(), entries)
			require.NoError(t, err)
			cfg, err := config.Parse("t", text)
			require.NoError(t, err)
			require.Equal(t, ":8000", cfg.Listen)
			require.Equal(t, tt.want.Role == "prefill", len(cfg.Engines.Prefill) == 1)
			require.Equal(t, tt.want.Role == "decode", len(cfg.Engines.Decode) == 1)
			require.Equal(t, tt.want.Role == "aggregated", len(cfg.Engines.Aggregated) == 1)
			entries[0].Notes, entries[0].model, entries[0].version, entries[0].handOff, entries[0].slotsReported = nil, "", "", unreached, false
			require.Equal(t, tt.want, entries[0])
		})
	}
}

// An engine that hands nothing over may be one half of a pair, if there is an engine of the other
// half.
func TestAnEngineBesidePrefillEnginesIsNotCalledAggregated(t *testing.T) {
	silent := stub(t, map[string]string{"/health": "", "/v1/models": models, "/v1/completions": `{"choices":[{"text":"b"}]}`})
	entries := []Entry{{Engine: config.Engine{URL: silent}}, {Engine: config.Engine{URL: "http://127.0.0.1:1"}, Role: "prefill"}}
	Ask(t.Context(), entries, "")
	require.Empty(t, entries[0].Role)
	require.Contains(t, strings.Join(entries[0].Notes, "\n"), "Nothing that it answers says")
}

func TestAFileOfAggregatedEngines(t *testing.T) {
	entries := []Entry{
		{Engine: config.Engine{URL: "http://a:1", Ranks: 8, Slots: 64, Budget: 8192, Interval: 2}, Role: "aggregated"},
		{Engine: config.Engine{URL: "http://a:2", Ranks: 8}, Role: "aggregated"},
	}
	text, err := File(config.Default(), entries)
	require.NoError(t, err)
	for _, absent := range []string{"No prefill engine", "No decode engine", "ascend:"} {
		require.NotContains(t, string(text), absent)
	}
	for _, there := range []string{"connector: none", "token_budget: 8192", "# token_budget: 8192", "# prefill: {index: {tokenize: engine}}"} {
		require.Contains(t, string(text), there)
	}
	cfg, err := config.Parse("new", text)
	require.NoError(t, err)
	require.Empty(t, cfg.Doubts())
	require.Equal(t, 2, cfg.Engines.Aggregated[0].Interval)
	require.Equal(t, "a:2", cfg.Engines.Aggregated[1].Group, "the ranks of one address step together, and not with those of the other")
	text, err = File(config.Default(), append(entries, Entry{Engine: config.Engine{URL: "http://d:1"}, Role: "decode"}))
	require.NoError(t, err)
	require.Contains(t, string(text), "No prefill engine is known")
}

func TestAskEndsWithItsContext(t *testing.T) {
	hangs := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hangs }))
	defer server.Close()
	defer close(hangs)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	entries := make([]Entry, 40)
	for i := range entries {
		entries[i].URL = server.URL
	}
	Ask(ctx, entries, "")
	for _, e := range entries {
		require.Contains(t, e.Notes[0], "It did not answer GET /health")
	}
}

func TestConnectorsThatDiffer(t *testing.T) {
	entries := []Entry{{Engine: config.Engine{URL: "http://p:1"}, Role: "prefill", Connector: mooncake.NIXLPull},
		{Engine: config.Engine{URL: "http://d:1"}, Role: "decode", Connector: mooncake.NIXLPush}}
	text, err := File(config.Default(), entries)
	require.NoError(t, err)
	require.Contains(t, string(text), "The engines have several connectors (nixl-pull, nixl-push).")
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: mooncake.NIXLPull}}
	text, err = File(cfg, entries)
	require.NoError(t, err)
	require.Contains(t, string(text), "You chose this connector, but the engines say that they have nixl-pull, nixl-push.")
	text, err = File(config.Default(), nil)
	require.NoError(t, err)
	require.Contains(t, string(text), "No decode engine is known.")
}

// A profile has the name of its engines, and a sentence about slots says where the number is from.
func TestTheFileSpeaksOfTheseEngines(t *testing.T) {
	told := stub(t, map[string]string{"/health": "", "/server_info": `{"disaggregation_mode":"decode","max_running_requests":64,"dp_size":2}`})
	for _, tt := range []struct {
		connector, url string
		slots          int
		profile, says  string
	}{
		{mooncake.SGLang, told, 0, "sglang", "The rank runs so many requests at once: its --max-running-requests, divided"},
		{mooncake.SGLang, "http://d:1", 16, "sglang", "You said that a rank runs so many requests at once (--slots). Compare its --max-running-requests"},
		{mooncake.SGLang, "http://d:1", 0, "sglang", "Nothing tells how many requests the rank runs at once. Write its --max-running-requests"},
		{mooncake.NIXLPush, "http://d:1", 16, "vllm", "(--slots). Compare its --max-num-seqs."},
		{mooncake.AscendMooncakeV1, "http://d:1", 0, "ascend", "Write its --max-num-seqs: "},
		{mooncake.Opaque, "http://d:1", 0, "opaque", ""},
	} {
		entries := []Entry{{Engine: config.Engine{URL: "http://p:1"}, Role: "prefill"},
			{Engine: config.Engine{URL: tt.url, Slots: tt.slots}, Role: "decode"}}
		if tt.url == told {
			Ask(t.Context(), entries[1:], "")
		}
		cfg := config.Default()
		cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: tt.connector}}
		text, err := File(cfg, entries)
		require.NoError(t, err)
		require.Contains(t, string(text), tt.says)
		cfg, err = config.Parse("new", text)
		require.NoError(t, err)
		require.Empty(t, cfg.Doubts())
		require.Equal(t, tt.profile, cfg.Engines.Decode[0].Profile)
		require.Equal(t, tt.profile, cfg.Engines.Prefill[0].Profile)
		require.Equal(t, tt.connector, cfg.Profiles[tt.profile].Connector)
	}
}

// Of many ranks that say the same, it is written once.
func TestWhatIsTrueOfAllRanksIsSaidOnce(t *testing.T) {
	var entries []Entry
	for i := range 144 {
		entries = append(entries, Entry{Engine: config.Engine{URL: fmt.Sprintf("http://d:%d", 8000+i)}, Role: "decode",
			Notes: []string{"Its version is 0.32.0.", "It serves \"m\"."}})
	}
	text, err := File(config.Default(), entries)
	require.NoError(t, err)
	for _, once := range []string{"Its version is 0.32.0.", "Nothing tells how many requests",
		"Ranks of one DP deployment step together and have one group."} {
		require.Equal(t, 1, strings.Count(string(text), once), once)
	}
	require.Less(t, strings.Count(string(text), "\n"), 3*144+40)
	cfg, err := config.Parse("new", text)
	require.NoError(t, err)
	require.Len(t, cfg.Engines.Decode, 144)
	require.Equal(t, "main", cfg.Engines.Decode[143].Group)
}

// Decode engines of vllm-ascend give chats back in their middle: the file says how they go on, by
// what the version knows.
func TestChatsOfAscendGoOn(t *testing.T) {
	for _, tc := range []struct{ connector, version, want string }{
		{mooncake.AscendMooncakeV1, "", mooncake.ChatResumeAscend},
		{mooncake.AscendMooncakeV1, "0.30.0", mooncake.ChatResumeAscend},
		{mooncake.AscendLayerwise, "0.26.0", mooncake.ChatResumeAscend},
		{mooncake.AscendMooncakeV1, "0.23.0", mooncake.ChatResumeContinue},
		{mooncake.NIXLPull, "0.30.0", ""},
	} {
		url := stub(t, map[string]string{"/health": "", "/version": `{"version":"` + tc.version + `"}`})
		list := []Entry{{Engine: config.Engine{URL: url}, Role: "prefill", Connector: tc.connector},
			{Engine: config.Engine{URL: url}, Role: "decode", Connector: tc.connector}}
		Ask(t.Context(), list, "")
		text, err := File(config.Default(), list)
		require.NoError(t, err)
		if tc.want == "" {
			require.NotContains(t, string(text), "chat_resume")
			continue
		}
		require.Contains(t, string(text), "\n    chat_resume: "+tc.want+" ", "%v", tc)
	}
}

// A survey learns from the engines what a step computes at most, and changes nothing by asking.
func TestEnginesTellTheirStepBudget(t *testing.T) {
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	for answer, want := range map[string]int{
		`{"vllm_config":{"kv_transfer_config":null,"scheduler_config":{"max_num_batched_tokens":4096}}}`:                         4096,
		`{"vllm_config":{"kv_transfer_config":{"kv_role":"kv_producer"},"scheduler_config":{"max_num_batched_tokens":4096}}}`:    0,
		`{"version":"0.5.23","disaggregation_mode":"null","dp_size":4,"enable_dp_attention":true,"chunked_prefill_size":512}`:    512,
		`{"version":"0.5.23","disaggregation_mode":"prefill","dp_size":4,"enable_dp_attention":true,"chunked_prefill_size":512}`: 0,
		`{"vllm_config":{"kv_transfer_config":null,"scheduler_config":{"max_num_batched_tokens":1e99}}}`:                         0,
		`<html>`: 0,
	} {
		target, err := config.Target(config.Engine{URL: stub(t, map[string]string{"/server_info": answer})}, &mooncake.Profile{})
		require.NoError(t, err)
		require.Equal(t, want, StepBudget(t.Context(), client, target), answer)
	}
}
