package mooncake

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write testdata/*.golden anew")

// kitchenSink has every key that this package treats in its own way, and
// bystanders it must not touch.
const kitchenSink = `{
  "model": "dsv3", "messages": [{"role":"user","content":"Hi \u2603"}],
  "tools": [{"type":"function","function":{"name":"f"}}], "tool_choice": "none", "response_format": {"type":"json_object"},
  "chat_template_kwargs": {"thinking":true}, "cache_salt": "s", "temperature": 0.70, "Stream": "kept",
  "stream": true, "stream_options": {"include_usage":true}, "str\u0065am": false,
  "max_tokens": 512, "max_completion_tokens": null, "min_tokens": 3, "n": 1, "best_of": 1, "use_beam_search": false,
  "logprobs": true, "top_logprobs": 2, "prompt_logprobs": null, "stop": ["x"], "stop_token_ids": [1, 2],
  "structured_outputs": {}, "guided_json": {}, "guided_whitespace_pattern": " ", "min_p": 0.1, "logit_bias": {"1":2},
  "bad_words": [], "allowed_token_ids": null, "thinking_token_budget": 9, "repetition_detection": {}, "echo": false,
  "ignore_eos": false, "seed": 41, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
  "return_token_ids": false, "priority": 0, "request_id": "mine", "session_id": "s", "vllm_xargs": {"kv_transfer_params":{}},
  "stream_interval": 9, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2, "bootstrap_pair_key": "k",
  "routed_dp_rank": 1, "data_parallel_rank": 2, "disagg_prefill_dp_rank": 3, "rid": "r", "return_hidden_states": true,
  "logits_processors": [], "prompt_embeds": "AAAA", "_vllm_ascend_recompute_token_ids": [1],
  "metaserver": "http://evil", "do_virtual": true, "batch_kv_transfer_params": {"evil":1}, "pd_room": "evil",
  "ec_transfer_params": {}, "kv_transfer_params": {"do_remote_prefill":true,"evil":1}, "user": "u"
}
`

const handoffJSON = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[412,413]],"remote_engine_id":"e1","remote_request_id":"chatcmpl-ek-1-p1-9a0b1c2d","remote_host":"10.0.0.5","remote_port":30000,"big":9007199254740993, "odd" :1.50}`

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run the test with -update")
	require.Equal(t, string(want), got)
}

func TestBodies(t *testing.T) {
	b := scan(t, kitchenSink)
	vocab := Profile{VocabSize: 1000}.WithDefaults()
	bare := Profile{ProbeMinTokens: MinTokensOmit, ContinuousUsage: new(false), ReturnTokenIDs: new(false)}.WithDefaults()
	ignore := Profile{ProbeMinTokens: MinTokensIgnoreEOS}.WithDefaults()
	both := Profile{ProbeIgnoreEOS: true}.WithDefaults()
	upstream := Profile{Connector: VLLMMooncake}.WithDefaults()
	info := &BootstrapInfo{TransferID: "xfer-1", BootstrapAddr: "http://10.0.0.5:8998", EngineID: `e"1`}
	kv := json.RawMessage(handoffJSON)
	for name, segments := range map[string][][]byte{
		"probe":              vocab.ProbeBody(b, Chat, nil, nil, nil),
		"probe-bare":         bare.ProbeBody(b, Chat, nil, nil, nil),
		"probe-ignore-eos":   ignore.ProbeBody(b, Chat, nil, nil, nil),
		"probe-both":         both.ProbeBody(b, Chat, nil, nil, nil),
		"probe-again":        vocab.ProbeBody(b, Chat, &Patch{IgnoreEOS: true}, nil, nil),
		"probe-upstream":     upstream.ProbeBody(b, Chat, nil, info, nil),
		"decode":             vocab.DecodeBody(b, Chat, nil, kv, "", true, nil),
		"decode-bare":        bare.DecodeBody(b, Chat, nil, kv, "", true, nil),
		"decode-sample":      vocab.DecodeBody(b, Chat, &Patch{SeedOffset: 2}, kv, "", true, nil),
		"decode-passthrough": vocab.DecodeBody(b, Chat, nil, kv, "", false, nil),
		"drain":              vocab.DiscardBody(b, Chat, nil, kv, "salt of the drain", nil),
	} {
		t.Run(name, func(t *testing.T) {
			got := join(segments)
			golden(t, name, got)
			after := scan(t, got)
			for key := range after.All() {
				require.Equal(t, 1, after.Count(key), "key %q", key)
				require.False(t, Reserved(key) && key != "kv_transfer_params", "key %q", key)
			}
			require.NotContains(t, got, "evil")
		})
	}
}

func TestDecodeRelaysTheHandoffByteForByte(t *testing.T) {
	p := Profile{}.WithDefaults()
	for _, stream := range []bool{true, false} {
		got := join(p.DecodeBody(scan(t, `{"model":"m"}`), Chat, nil, json.RawMessage(handoffJSON), "", stream, nil))
		require.Contains(t, got, `"kv_transfer_params":`+handoffJSON+`}`)
	}
}

func TestDecodeWithoutAHandoffHasNoParams(t *testing.T) { // local prefill, where a profile allows it
	p := Profile{}.WithDefaults()
	got := join(p.DecodeBody(scan(t, `{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}`), Chat, nil, nil, "", true, nil))
	require.NotContains(t, got, "kv_transfer_params")
	require.True(t, json.Valid([]byte(got)))
}

// With return_token_ids vLLM leaves the echoed prompt out.
func TestAnEchoIsNotAskedForWithTokenIDs(t *testing.T) {
	p := Profile{}.WithDefaults()
	for _, tc := range []struct {
		name, body string
		leg        *Patch
		want       bool
	}{
		{"an echo", `{"prompt":"one","echo":true}`, nil, false},
		{"an echo of one prompt of several", `{"prompt":["one","two"],"echo":true}`, &Patch{Prompt: json.RawMessage(`"two"`)}, false},
		{"no echo", `{"prompt":"one","echo":false}`, nil, true},
		{"null is no echo", `{"prompt":"one","echo":null}`, nil, true},
		{"the rest of an answer echoes nothing", `{"prompt":"one","echo":true}`, &Patch{Resume: &Resume{Method: ResumePrompt, IDs: json.RawMessage(`[1]`)}}, true},
		{"ids that the client wants stay", `{"prompt":"one","echo":true,"return_token_ids":true}`, nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			after := scan(t, join(p.DecodeBody(scan(t, tc.body), Completions, tc.leg, json.RawMessage(`{}`), "", true, nil)))
			ids, _ := after.Get("return_token_ids")
			require.Equal(t, tc.want, string(ids) == "true")
		})
	}
}

func TestALegOfAListPrompt(t *testing.T) {
	b := scan(t, `{"model":"m","prompt":["one","two"],"n":2,"seed":7}`)
	p := Profile{}.WithDefaults()
	leg := &Patch{Prompt: json.RawMessage(`"two"`), SeedOffset: 1}
	for _, segments := range [][][]byte{
		p.ProbeBody(b, Completions, leg, nil, nil),
		p.DecodeBody(b, Completions, leg, json.RawMessage(`{}`), "", true, nil),
		p.DiscardBody(b, Completions, leg, json.RawMessage(`{}`), "salt", nil),
	} {
		after := scan(t, join(segments))
		prompt, _ := after.Get("prompt")
		require.Equal(t, `"two"`, string(prompt))
		require.Equal(t, 1, after.Count("prompt"))
		require.Zero(t, after.Count("n"))
	}
	decode := scan(t, join(p.DecodeBody(b, Completions, leg, json.RawMessage(`{}`), "", true, nil)))
	seed, _ := decode.Get("seed")
	require.Equal(t, "8", string(seed))
}

func TestSeedsOfSamplesDiffer(t *testing.T) {
	for _, tc := range []struct {
		name, seed, want string
	}{
		{"counts up", "41", "43"},
		{"counts down at the top", "9223372036854775807", "9223372036854775805"},
		{"below zero", "-1", "1"},
		{"null stays null", "null", "null"},
		{"what no engine takes stays as it is", "1e3", "1e3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := Profile{}.WithDefaults()
			b := scan(t, `{"seed":`+tc.seed+`}`)
			after := scan(t, join(p.DecodeBody(b, Chat, &Patch{SeedOffset: 2}, nil, "", true, nil)))
			got, _ := after.Get("seed")
			require.Equal(t, tc.want, string(got))
		})
	}
	require.NotEqual(t, offsetSeed(math.MaxInt64-1, 1), offsetSeed(math.MaxInt64-1, 2))
}

func TestStopTokensThatCouldEndTheEngineAreDropped(t *testing.T) {
	for _, tc := range []struct {
		name, body string
		vocab      int
		kept       bool
	}{
		{"in the vocabulary", `{"stop_token_ids":[0,99],"min_tokens":5}`, 100, true},
		{"beyond the vocabulary", `{"stop_token_ids":[0,100]}`, 100, false},
		{"below zero", `{"stop_token_ids":[-1]}`, 0, false},
		{"not integers", `{"stop_token_ids":[1.5]}`, 100, false},
		{"not a list", `{"stop_token_ids":"1"}`, 100, false},
		{"null", `{"stop_token_ids":null,"min_tokens":5}`, 0, true},
		{"an unknown vocabulary, nothing masked", `{"stop_token_ids":[5]}`, 0, true},
		{"an unknown vocabulary, min_tokens null", `{"stop_token_ids":[5],"min_tokens":null}`, 0, true},
		{"an unknown vocabulary, masked", `{"stop_token_ids":[5],"min_tokens":1}`, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := Profile{VocabSize: tc.vocab}.WithDefaults()
			b := scan(t, tc.body)
			for _, stream := range []bool{true, false} {
				got := join(p.DecodeBody(b, Chat, nil, nil, "", stream, nil))
				require.Equal(t, tc.kept, strings.Contains(got, "stop_token_ids"), got)
			}
			require.NotContains(t, join(p.ProbeBody(b, Chat, nil, nil, nil)), "stop_token_ids")
		})
	}
}

func TestPathsOfEndpoints(t *testing.T) {
	require.Equal(t, "/v1/chat/completions", Chat.Path())
	require.Equal(t, "/v1/completions", Completions.Path())
}

// A prefill engine is asked for logprobs only where it may say no, before a decode engine does.
func TestAProbeAsksForManyLogprobsOnly(t *testing.T) {
	p := Profile{}.WithDefaults()
	for _, c := range []struct {
		members string
		ep      Endpoint
		asks    bool
	}{
		{`"logprobs":true,"top_logprobs":20`, Chat, false},
		{`"logprobs":true,"top_logprobs":21`, Chat, true},
		{`"logprobs":true,"top_logprobs":-1`, Chat, true},
		{`"logprobs":true`, Chat, false},
		{`"logprobs":null,"top_logprobs":null`, Chat, false},
		{`"logprobs":20`, Completions, false},
		{`"logprobs":21`, Completions, true},
	} {
		body, err := ScanBody([]byte(`{"model":"m","prompt":"a","messages":[],`+c.members+`}`), 0)
		require.NoError(t, err)
		sent := string(bytes.Join(p.ProbeBody(&body, c.ep, nil, nil, nil), nil))
		require.Equal(t, c.asks, strings.Contains(sent, c.members), "%s: %s", c.members, sent)
		require.Equal(t, c.asks, strings.Contains(sent, "logprobs"), "%s: %s", c.members, sent)
	}
}

// A client may write null for a salt that it does not set, and engines take that for none. The salt
// that keeps a rank's wrong KV away is sent all the same.
func TestANullSaltIsNone(t *testing.T) {
	pull, layerwise := Profile{Connector: NIXLPull}.WithDefaults(), Profile{Connector: AscendLayerwise}.WithDefaults()
	body := scan(t, `{"model":"m","messages":[{"role":"user","content":"hi"}],"cache_salt":null}`)
	for name, got := range map[string][][]byte{
		"chat":     pull.DecodeBody(body, Chat, nil, []byte(`{"k":1}`), "ours", true, nil),
		"messages": pull.DecodeBody(body, Messages, nil, []byte(`{"k":1}`), "ours", true, nil),
		"early":    layerwise.EarlyDecode(body, nil, &Rendezvous{}, "ours", true, nil),
	} {
		require.Contains(t, join(got), `"cache_salt":"ours"`, name)
	}
}
