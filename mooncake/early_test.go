package mooncake

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const callbackJSON = `{"token_ids":[],"request_id":"chatcmpl-ek-1","do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[7,8,9]],"remote_block_size":[128],` +
	`"remote_engine_id":"d1","remote_host":"10.0.0.5","remote_port":31000,"remote_tp_size":1,"remote_pcp_size":1,"remote_dcp_size":1, "remote_cached_tokens":0}`

func profileOf(connector string) *Profile {
	p := Profile{Connector: connector}.WithDefaults()
	return &p
}

func TestBodiesOfEarlyBinds(t *testing.T) {
	b := scan(t, kitchenSink)
	r := &Rendezvous{
		Metaserver: "http://10.0.0.2:8010/v1/metaserver/0123", Callback: json.RawMessage(callbackJSON),
		RID: "r-0001", Host: "10.0.0.5", Port: 8998, Room: 1<<63 - 2, PrefillRank: 2, DecodeRank: 5,
	}
	alone := *r
	alone.PrefillRank, alone.DecodeRank = -1, -1
	lw, sgl := profileOf(AscendLayerwise), profileOf(SGLang)
	for name, segments := range map[string][][]byte{
		"early-layerwise-probe":  lw.EarlyProbe(b, nil, r, true, nil),
		"early-layerwise-decode": lw.EarlyDecode(b, nil, r, "", true, nil),
		"early-layerwise-whole":  lw.EarlyDecode(b, nil, r, "", false, nil),
		"early-sglang-probe":     sgl.EarlyProbe(b, nil, r, true, nil),
		"early-sglang-decode":    sgl.EarlyDecode(b, nil, r, "", true, nil),
		"early-sglang-alone":     sgl.EarlyProbe(b, &Patch{SeedOffset: 2}, &alone, true, nil),
		"early-sglang-whole":     sgl.EarlyDecode(b, nil, &alone, "", false, nil),
	} {
		t.Run(name, func(t *testing.T) {
			got := join(segments)
			golden(t, name, got)
			after := scan(t, got)
			for key := range after.All() {
				require.Equal(t, 1, after.Count(key), "key %q", key)
			}
			require.NotContains(t, got, "evil")
		})
	}
}

func TestTheLegsOfSGLangDifferInTheirRanksOnly(t *testing.T) {
	b := scan(t, kitchenSink)
	p := profileOf(SGLang)
	leg := &Patch{SeedOffset: 1, Resume: &Resume{Method: ChatResumeContinue, Text: json.RawMessage(`"so far"`), Tokens: 2, Limit: 7, LimitKey: "max_tokens"}}
	for _, stream := range []bool{true, false} {
		r := &Rendezvous{RID: "r", Host: "h", Port: 1, Room: 6, PrefillRank: 2, DecodeRank: 1}
		const ranks = `,"routed_dp_rank":`
		prefill, decode := join(p.EarlyProbe(b, leg, r, stream, nil)), join(p.EarlyDecode(b, leg, r, "", stream, nil))
		same, found := strings.CutSuffix(prefill, ranks+`2,"disagg_prefill_dp_rank":2}`+"\n")
		require.True(t, found, prefill)
		require.Equal(t, same+ranks+`1,"disagg_prefill_dp_rank":2}`+"\n", decode)
		unnamed := *p
		unnamed.NameRanks = new(false)
		require.Equal(t, []int{-1, 2}, []int{unnamed.NamedRank(2), p.NamedRank(2)})
		r.PrefillRank, r.DecodeRank = -1, -1
		require.Equal(t, join(p.EarlyProbe(b, leg, r, stream, nil)), join(p.EarlyDecode(b, leg, r, "", stream, nil)))
		require.NotContains(t, join(p.EarlyProbe(b, leg, r, stream, nil)), "dp_rank")
	}
}

// SGLang answers with the base model unless it is asked for an adapter in its own way. Other
// engines list adapters as models.
func TestAnAdapterIsNamedAsItsEngineWants(t *testing.T) {
	for ep, asked := range map[Endpoint]string{
		Chat:        `{"messages":[{"role":"user","content":"Hi"}],"model":"lora1"}`,
		Completions: `{"prompt":"Hi","model":"lora1"}`,
		Messages:    `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":9}`,
		Generate:    `{"text":"Hi","sampling_params":{"max_new_tokens":9}}`,
	} {
		b, err := ScanFor(ep, []byte(asked), 0)
		require.NoError(t, err)
		r := &Rendezvous{Endpoint: ep, RID: "r", Host: "h", Port: 1, Room: 6, PrefillRank: 2, DecodeRank: 1}
		leg := &Patch{Adapter: Adapter{Base: "gpt-oss:120b", Name: "lora1"}}
		p := profileOf(SGLang)
		for name, sent := range map[string]string{
			"prefill": join(p.EarlyProbe(&b, leg, r, true, nil)), "decode": join(p.EarlyDecode(&b, leg, r, "", true, nil)),
			"alone": join(p.DecodeBody(&b, ep, leg, nil, "salt", true, nil)),
		} {
			var got struct {
				Model string `json:"model"`
				Path  string `json:"lora_path"`
			}
			require.NoError(t, json.Unmarshal([]byte(sent), &got), sent)
			require.Equal(t, ep != Generate, got.Model == "gpt-oss:120b:lora1", "%s: %s", name, sent)
			require.Equal(t, ep != Messages, got.Path == "lora1", "%s: %s", name, sent)
		}
		ofBase := &Patch{Adapter: Adapter{Base: "m"}}
		require.Equal(t, join(p.DecodeBody(&b, ep, nil, nil, "", true, nil)), join(p.DecodeBody(&b, ep, ofBase, nil, "", true, nil)))
		for _, other := range []string{NIXLPush, NIXLPull, None} {
			p := profileOf(other)
			require.Equal(t, join(p.DecodeBody(&b, ep, nil, nil, "", true, nil)), join(p.DecodeBody(&b, ep, leg, nil, "", true, nil)), other)
		}
		again, _ := b.Get("lora_path")
		require.Nil(t, again, "the body itself stays")
	}
}

// Both legs of a layerwise request get the longer prompt: the decode leg beside the
// metaserver, the prefill leg in the callback's object, to which nothing else is added.
func TestALayerwiseChatGoesOnOnBothLegs(t *testing.T) {
	b := scan(t, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":9}`)
	leg := &Patch{Resume: &Resume{Method: ChatResumeVLLM, IDs: json.RawMessage(`[1,2,3]`), Limit: 4, LimitKey: "max_tokens"}}
	r := &Rendezvous{Metaserver: "http://m/1", Callback: json.RawMessage(callbackJSON)}
	p := profileOf(AscendLayerwise)
	require.Contains(t, join(p.EarlyProbe(b, leg, r, true, nil)), `"kv_transfer_params":`+strings.TrimSuffix(callbackJSON, "}")+`,"prompt_token_ids":[1,2,3]}}`)
	require.Contains(t, join(p.EarlyDecode(b, leg, r, "", true, nil)),
		`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":"http://m/1","prompt_token_ids":[1,2,3]}}`)
	require.Contains(t, join(p.EarlyProbe(b, nil, r, true, nil)), `"kv_transfer_params":`+callbackJSON+`}`, "as it came")
}

func TestIDsOfRequestsInEngines(t *testing.T) {
	require.Equal(t, "chatcmpl-ek-1", Chat.RequestID("ek-1"))
	require.Equal(t, "cmpl-ek-1-0", Completions.RequestID("ek-1"))
}

func TestReadCallback(t *testing.T) {
	with := func(old, repl string) string {
		require.Contains(t, callbackJSON, old)
		return strings.Replace(callbackJSON, old, repl, 1)
	}
	const (
		blocks, host, id = `[[7,8,9]]`, `"10.0.0.5"`, `"chatcmpl-ek-1"`
		first            = `"token_ids":[]`
	)
	for _, tc := range []struct {
		name, body string
		want       error
		text       string
	}{
		{"as it is", callbackJSON, nil, ""},
		{"with white space around it", " \n" + callbackJSON + "\n", nil, ""},
		{"flat block ids of old versions", with(blocks, `[7,8,9]`), nil, ""},
		{"groups of which one is empty", with(blocks, `[[],[7]]`), nil, ""},
		{"a block size that is no list", with(`[128]`, `128`), nil, ""},
		{"only what is needed", with(`,"remote_tp_size":1,"remote_pcp_size":1,"remote_dcp_size":1, "remote_cached_tokens":0`, ``), nil, ""},
		{"an IPv6 host", with(host, `"fd00::5"`), nil, ""},
		{"as many blocks as the prompt can have", with(blocks, `[[1,2,3,4],[1,2,3,4]]`), nil, ""},

		{"nothing", ``, ErrBadCallback, "the text ends"},
		{"no object", `[]`, ErrBadCallback, "'[' where '{' should be"},
		{"no JSON", `{"a"`, ErrBadCallback, "invalid JSON"},
		{"an empty object", `{}`, ErrBadCallback, "remote_block_ids is missing"},
		{"nested too deep", with(blocks, `[[[[[[[[[1]]]]]]]]]`), ErrBadCallback, "nested deeper than 8 levels"},
		{"nested deep", with(blocks, `[[[1]]]`), ErrBadCallback, "remote_block_ids is a list of 7 bytes, not"},
		{"a metaserver", with(first, `"metaserver":"x"`), ErrBadCallback, "a decode engine may not send metaserver"},
		{"do_virtual", with(first, `"do_virtual":true`), ErrBadCallback, "a decode engine may not send do_virtual"},
		{"other requests' parameters", with(first, `"batch_kv_transfer_params":{}`), ErrBadCallback, "a decode engine may not send batch_kv_transfer_params"},
		{"the port of a transfer engine", with(first, `"remote_te_rpc_port":1`), ErrBadCallback, "a decode engine may not send remote_te_rpc_port"},
		{"places in memory", with(first, `"remote_layer_metadata":{}`), ErrBadCallback, "a decode engine may not send remote_layer_metadata"},
		{"another prompt", with(first, `"prompt_token_ids":[1]`), ErrBadCallback, "a decode engine may not send prompt_token_ids"},
		{"a file to write", with(first, `"hidden_states_path":"/x"`), ErrBadCallback, "a decode engine may not send hidden_states_path"},
		{"a key that is written in escapes", with(first, `"do_virtu\u0061l":true`), ErrBadCallback, "a decode engine may not send do_virtual"},
		{"what an engine notes for itself", with(first, `"_p_side_truncated":true`), ErrBadCallback, "a key whose name is not a letter and then"},
		{"a key with a text for a name", with(first, `"the prompt":1`), ErrBadCallback, "a key whose name is not a letter and then"},
		{"a key with a long name", with(first, `"`+strings.Repeat("k", 65)+`":1`), ErrBadCallback, "a key whose name is not a letter and then"},
		{"a key without a name", with(first, `"":1`), ErrBadCallback, "a key whose name is not a letter and then"},
		{"an unknown key that is called like an address", with(first, `"remote_addr":[1]`), ErrBadCallback, "remote_addr seems to hold an address"},
		{"an unknown key with an address of the engine", with(first, `"remote_peers":["10.0.0.5:7"]`), ErrBadCallback, "remote_peers seems to hold an address"},
		{"an unknown key with a URL", with(first, `"later":"http://d1/x"`), ErrBadCallback, "later seems to hold an address"},
		{"an unknown key with a host in it", with(first, `"later":{"0":{"host":"d1"}}`), ErrBadCallback, "later seems to hold an address"},
		{"an unknown key twice", with(first, `"later":1,"later":2`), ErrBadCallback, "later stands there twice"},
		{"many unknown keys", with(first, unknownKeys(maxUnknownKeys+1)), ErrBadCallback, "more than 32 keys that this evenkeel does not know"},
		{"a key twice", with(first, `"remote_host":"10.0.0.5"`), ErrBadCallback, "remote_host stands there twice"},
		{"tokens that are none", with(first, `"token_ids":["a"]`), ErrBadCallback, "token_ids is a list of 5 bytes"},
		{"blocks of text", with(blocks, `[["a"]]`), ErrBadCallback, "remote_block_ids is a list of"},
		{"blocks below zero", with(blocks, `[[-1]]`), ErrBadCallback, "remote_block_ids is a list of"},
		{"blocks beyond numbers", with(blocks, `[[12345678901]]`), ErrBadCallback, "remote_block_ids is a list of"},
		{"no list of blocks", with(blocks, `7`), ErrBadCallback, "remote_block_ids is a number"},
		{"more blocks than the prompt can have", with(blocks, `[[1],[1,2,3,4,5]]`), ErrBadCallback, "remote_block_ids has 5 blocks in a group, and the prompt at most 4"},
		{"a decode leg's flags", with(`"do_remote_prefill":false`, `"do_remote_prefill":true`), ErrBadCallback, "do_remote_prefill is true"},
		{"no prefill", with(`"do_remote_decode":true`, `"do_remote_decode":false`), ErrBadCallback, "do_remote_decode is false"},
		{"a port beyond ports", with(`31000`, `70000`), ErrBadCallback, "remote_port is a number"},
		{"no port", with(`31000`, `null`), ErrBadCallback, "remote_port is null"},
		{"no ranks", with(`"remote_tp_size":1`, `"remote_tp_size":0`), ErrBadCallback, "remote_tp_size is a number"},
		{"half a token", with(`"remote_cached_tokens":0`, `"remote_cached_tokens":0.5`), ErrBadCallback, "remote_cached_tokens is a number"},
		{"no engine", with(`"d1"`, `""`), ErrBadCallback, "remote_engine_id is a string of 0 bytes"},
		{"no id", with(id, `""`), ErrBadCallback, "request_id is a string of 0 bytes"},
		{"too long", callbackJSON + strings.Repeat(" ", MaxCallback(300, 128)), ErrBadCallback, "bytes, more than"},

		{"another request", with(id, `"chatcmpl-ek-2"`), ErrOtherRequest, "a request_id of 13 bytes"},
		{"a beginning of the id", with(id, `"chatcmpl-e"`), ErrOtherRequest, "a request_id of 10 bytes"},
		{"a host of nobody", with(host, `"10.6.6.6"`), ErrUnknownHost, `"10.6.6.6" under remote_host; if it is one of yours, add it to kv_hosts`},
		{"a list of no hosts", with(host, `" ,"`), ErrUnknownHost, "a name of 2 bytes"},
		{"a list of hosts", with(host, `"10.0.0.5,10.6.6.6"`), ErrUnknownHost, "under remote_host"},
		{"a host somewhere else", with(`"d1"`, `"http://10.6.6.6"`), ErrUnknownHost, `"10.6.6.6" under remote_engine_id`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := profileOf(AscendLayerwise).ReadCallback([]byte(tc.body), "chatcmpl-ek-1", 300, 128, known)
			if tc.want != nil {
				require.ErrorIs(t, err, tc.want)
				require.ErrorContains(t, err, tc.text)
				require.Zero(t, got)
				return
			}
			require.NoError(t, err)
			require.Equal(t, Callback{KV: json.RawMessage(strings.TrimSpace(tc.body))}, got)
		})
	}
	_, err := profileOf(AscendLayerwise).ReadCallback([]byte(callbackJSON), "chatcmpl-ek-1", 0, 0, nil)
	require.ErrorIs(t, err, ErrUnknownHost, "nobody is known")
}

// unknownKeys are members k1 to kn.
func unknownKeys(n int) string {
	members := make([]string, n)
	for i := range members {
		members[i] = fmt.Sprintf(`"k%d":1`, i+1)
	}
	return strings.Join(members, ",")
}

// A later version of the engine may tell the prefill engine more.
func TestAnUnknownKeyOfACallbackPasses(t *testing.T) {
	p := profileOf(AscendLayerwise)
	p.KVPlainKeys = []string{"remote_url"}
	for members, want := range map[string][]string{
		`"remote_pp_size":2`:                        {"remote_pp_size"},
		`"later":{"blocks":[[1,2],null]},"a1":"é"`:  {"later", "a1"},
		`"remote_url":"http://10.6.6.6","Later":""`: {"remote_url", "Later"}, // which the operator calls plain
	} {
		body := strings.Replace(callbackJSON, `"token_ids":[]`, members, 1)
		got, err := p.ReadCallback([]byte(body), "chatcmpl-ek-1", 300, 128, known)
		require.NoError(t, err)
		require.Equal(t, Callback{KV: json.RawMessage(body), Unknown: want}, got)
	}
	got, err := p.ReadCallback([]byte(strings.Replace(callbackJSON, `"token_ids":[]`, unknownKeys(maxUnknownKeys), 1)), "chatcmpl-ek-1", 300, 128, known)
	require.NoError(t, err)
	require.Len(t, got.Unknown, maxUnknownKeys)
}

func TestACallbackForAPromptInTheCacheNeedsNothing(t *testing.T) {
	for _, none := range []string{`[]`, `[[]]`, `[[],[]]`} {
		got, err := profileOf(AscendLayerwise).ReadCallback([]byte(strings.Replace(callbackJSON, `[[7,8,9]]`, none, 1)), "chatcmpl-ek-1", 300, 128, known)
		require.NoError(t, err)
		require.True(t, got.Empty)
	}
}

func TestAnEngineWithoutSuffixesCutsTheID(t *testing.T) {
	p := profileOf(AscendLayerwise)
	got, err := p.ReadCallback([]byte(callbackJSON), "chatcmpl-ek-1-9a0b1c2", 300, 128, known)
	require.ErrorIs(t, err, ErrOtherRequest, "eight characters are missing")
	require.Zero(t, got)
	got, err = p.ReadCallback([]byte(callbackJSON), "chatcmpl-ek-1-9a0b1c2d", 300, 128, known)
	require.NoError(t, err)
	require.True(t, got.ShortID)
	_, err = p.ReadCallback([]byte(callbackJSON), "short", 300, 128, known)
	require.ErrorIs(t, err, ErrOtherRequest)
}

func TestHowLongACallbackMayBe(t *testing.T) {
	require.Equal(t, 1<<20, MaxCallback(0, 128), "an unknown prompt")
	require.Equal(t, 1<<20, MaxCallback(300, 0), "an unknown block")
	require.Equal(t, 1<<20+4*32, MaxCallback(300, 128))
	require.Equal(t, 1<<20+2*32, MaxCallback(128, 128))
}

// What passes is an object without any key that an engine would act on in another way.
func FuzzReadCallback(f *testing.F) {
	for _, s := range []string{
		callbackJSON, strings.Replace(callbackJSON, `[[7,8,9]]`, `[]`, 1), strings.Replace(callbackJSON, `"10.0.0.5"`, `"evil"`, 1),
		strings.Replace(callbackJSON, `"token_ids":[]`, `"do_virtual":true`, 1), strings.Replace(callbackJSON, `"token_ids":[]`, `"later":[1]`, 1), `{}`, `{"remote_block_ids":[[1]}`, strings.Repeat("[", 20), ` {"request_id":"\u0063hatcmpl-ek-1"}`,
	} {
		f.Add([]byte(s))
	}
	p := profileOf(AscendLayerwise)
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := p.ReadCallback(body, "chatcmpl-ek-1", 300, 128, known)
		if err != nil {
			require.Zero(t, got)
			return
		}
		var m map[string]any
		require.NoError(t, json.Unmarshal(got.KV, &m))
		require.True(t, known(m["remote_host"].(string)) || strings.ContainsAny(m["remote_host"].(string), ".:"))
		require.Equal(t, true, m["do_remote_decode"])
		require.Equal(t, false, m["do_remote_prefill"])
		for _, key := range forbiddenKeys {
			require.NotContains(t, m, key)
		}
		for _, key := range got.Unknown {
			require.Contains(t, m, key)
			require.False(t, namesAddress(key))
		}
		require.LessOrEqual(t, len(m), len(callbackKeys)+maxUnknownKeys)
	})
}

func TestTheLegsOfAResponseAndOfAMessageDifferInTheirRanksOnly(t *testing.T) {
	p := profileOf(SGLang)
	for ep, row := range map[Endpoint]struct{ body, want string }{
		Responses: {
			`{"model":"m","input":"a","rid":"x","request_id":"y","bootstrap_room":9,"store":true,"background":true,"previous_response_id":"z","session_id":"s","max_output_tokens":5,"tools":[],"stream":false}`,
			`"model":"m","input":"a","max_output_tokens":5,"tools":[],"stream":true,"store":false,"request_id":"r","bootstrap_host":"h"`,
		},
		Messages: {
			`{"model":"m","messages":[],"rid":"x","bootstrap_room":[9],"routed_dp_rank":7,"max_tokens":5,"thinking":{"type":"enabled","budget_tokens":1024},"stop_sequences":["a"]}`,
			`"model":"m","messages":[],"max_tokens":5,"thinking":{"type":"enabled","budget_tokens":1024},"stop_sequences":["a"],"stream":true,"bootstrap_host":"h"`,
		},
	} {
		b := scan(t, row.body)
		r := &Rendezvous{Endpoint: ep, RID: "r", Host: "h", Port: 1, Room: 6, PrefillRank: 2, DecodeRank: 1}
		prefill, decode := join(p.EarlyProbe(b, nil, r, true, nil)), join(p.EarlyDecode(b, nil, r, "salt", true, nil))
		require.Equal(t, "{"+row.want+`,"bootstrap_port":1,"bootstrap_room":6,"routed_dp_rank":2,"disagg_prefill_dp_rank":2}`, strings.TrimSpace(prefill))
		require.Equal(t, strings.Replace(prefill, `"routed_dp_rank":2`, `"routed_dp_rank":1`, 1), decode)
		require.Equal(t, ep == Messages, p.Nameless(ep))
		require.False(t, profileOf(NIXLPull).Nameless(ep))
		r.PrefillRank, r.DecodeRank = -1, -1
		require.Equal(t, join(p.EarlyProbe(b, nil, r, false, nil)), join(p.EarlyDecode(b, nil, r, "", false, nil)))
	}
	require.False(t, p.Nameless(Chat))
}

func TestReadEarlyProbe(t *testing.T) {
	const layerwise = `{"choices":[{"finish_reason":"length"}],"prompt_token_ids":[1,2],"usage":{"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1}},"kv_transfer_params":null}`
	const role = `data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null,"matched_stop":null}],"usage":null}` + "\n\n"
	const last = `data: {"choices":[{"delta":{},"finish_reason":"length","matched_stop":null}],"usage":null}` + "\n\n"
	const usage = `data: {"choices":[],"usage":{"prompt_tokens":300,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":16}}}` + "\n\n"
	const done = "data: [DONE]\n\n"
	const message = `{"id":"msg_1","type":"message","content":[{"type":"text","text":"a"}],"stop_reason":"max_tokens","usage":{"input_tokens":284,"output_tokens":1,"cache_read_input_tokens":16}}`
	const messageEvents = "event: message_start\ndata: " + `{"type":"message_start","message":{"id":"msg_1","content":[],"usage":{"input_tokens":300,"output_tokens":0}}}` + "\n\n" +
		"event: content_block_delta\ndata: " + `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}` + "\n\n" +
		"event: message_delta\ndata: " + `{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":1}}` + "\n\nevent: message_stop\ndata: " + `{"type":"message_stop"}` + "\n\n"
	const failedEvent = "event: error\ndata: " + `{"type":"error","error":{"type":"api_error","message":"KVTransferError"}}` + "\n\n"
	const response = `{"id":"r","object":"response","status":"incomplete","error":null,"usage":{"input_tokens":300,"input_tokens_details":{"cached_tokens":16,"cache_write_tokens":0},"output_tokens":1}}`
	const created = `{"type":"response.created","response":{"id":"r","object":"response","status":"in_progress","error":null,"usage":null}}`
	const responseEvents = "event: response.created\ndata: " + created + "\n\n" + `data: {"type":"response.output_text.delta","delta":"a"}` + "\n\nevent: response.incomplete\ndata: " + `{"type":"response.incomplete","response":` + response + "}\n\n"
	const failedResponse = "data: " + created + "\n\n" + `data: {"type":"response.failed","response":{"status":"failed","usage":null,"error":{"code":"server_error","message":"KVTransferError"}}}` + "\n\n"
	whole := ProbeAnswer{PromptTokens: 300, CachedTokens: 16, FinishReason: "length"}
	for _, tc := range []struct {
		name, connector, answer string
		want                    ProbeAnswer
		err                     string
	}{
		{"layerwise returns no hand-off", AscendLayerwise, layerwise, ProbeAnswer{PromptTokens: 2, CachedTokens: 1, PromptTokenIDs: json.RawMessage(`[1,2]`), FinishReason: "length"}, ""},
		{"an end of sequence is as good", AscendLayerwise, strings.Replace(layerwise, "length", "stop", 1), ProbeAnswer{PromptTokens: 2, CachedTokens: 1, PromptTokenIDs: json.RawMessage(`[1,2]`), FinishReason: "stop"}, ""},
		{"layerwise was aborted", AscendLayerwise, `{"choices":[{"finish_reason":"abort"}]}`, ProbeAnswer{CachedTokens: -1, FinishReason: "abort", Aborted: true}, `finish_reason is "abort"`},
		{"layerwise answers no JSON", AscendLayerwise, "data: {}", ProbeAnswer{CachedTokens: -1}, "its answer is not JSON"},
		{"an error with status 200", AscendLayerwise, `{"error":{"message":"x"}}`, ProbeAnswer{CachedTokens: -1}, "an error came with status 200"},
		{"no choice", AscendLayerwise, `{}`, ProbeAnswer{CachedTokens: -1}, "finish_reason is missing"},
		{"an answer without end", AscendLayerwise, strings.Repeat(" ", MaxProbeAnswer+1), ProbeAnswer{CachedTokens: -1}, "more than 16777216"},

		{"SGLang's in one piece", SGLang, `{"choices":[{"finish_reason":"length","matched_stop":null}],"usage":{"prompt_tokens":300,"prompt_tokens_details":{"cached_tokens":16}}}`, whole, ""},
		{"SGLang's stream", SGLang, role + last + usage + done, whole, ""},
		{"without [DONE]", SGLang, role + last + usage, whole, ""},
		{"with other line ends, comments and names", SGLang, ": hello\r\nevent: x\r\n" + strings.ReplaceAll(role+last+usage+done, "\n", "\r\n"), whole, ""},
		{"cut off", SGLang, role, ProbeAnswer{CachedTokens: -1}, "finish_reason is missing"},
		{"cut off in an event", SGLang, role + last[:30], ProbeAnswer{CachedTokens: -1}, "its answer is not JSON"},
		{"an error in the stream", SGLang, role + `data: {"error":{"message":"KV transfer failed"}}` + "\n\n" + done, ProbeAnswer{CachedTokens: -1}, "an error came with status 200"},
		{"aborted", SGLang, role + strings.Replace(last, "length", "abort", 1) + usage + done, ProbeAnswer{PromptTokens: 300, CachedTokens: 16, FinishReason: "abort", Aborted: true}, `finish_reason is "abort"`},
		{"at /generate", SGLang, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}`, ProbeAnswer{CachedTokens: -1, FinishReason: "abort", Aborted: true}, `finish_reason is "abort"`},
		{"at /generate, by an error of its own", SGLang, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"KVTransferError","status_code":500}}}`, ProbeAnswer{CachedTokens: -1, FinishReason: "abort"}, `finish_reason is "abort"`},
		{"aborted as if it were not, it counts fewer tokens", SGLang, role + last + strings.Replace(usage, "300", "150", 1) + done, ProbeAnswer{PromptTokens: 150, CachedTokens: 16, FinishReason: "length"}, ""},
		{"a message in one piece", SGLang, message, ProbeAnswer{PromptTokens: 300, CachedTokens: 16, FinishReason: "length"}, ""},
		{"a message that was aborted", SGLang, strings.Replace(message, "max_tokens", "end_turn", 1), ProbeAnswer{CachedTokens: -1}, "stop_reason is not max_tokens"},
		{"a message's stream", SGLang, messageEvents, ProbeAnswer{PromptTokens: 300, CachedTokens: -1, FinishReason: "length"}, ""},
		{"a message's stream that was aborted", SGLang, strings.Replace(messageEvents, "max_tokens", "end_turn", 1), ProbeAnswer{PromptTokens: 300, CachedTokens: -1}, "stop_reason is not max_tokens"},
		{"a message's stream that failed", SGLang, upTo(messageEvents, "event: message_delta") + failedEvent, ProbeAnswer{PromptTokens: 300, CachedTokens: -1}, "an error came with status 200"},
		{"a response in one piece", SGLang, response, whole, ""},
		{"a response's stream", SGLang, responseEvents, whole, ""},
		{"a response's stream that was cut off", SGLang, upTo(responseEvents, "event: response.incomplete"), ProbeAnswer{CachedTokens: -1}, "finish_reason is missing"},
		{"a response that failed", SGLang, failedResponse, ProbeAnswer{CachedTokens: -1}, "an error came with status 200"},
		{"nothing", SGLang, "", ProbeAnswer{CachedTokens: -1}, "finish_reason is missing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := profileOf(tc.connector).ReadEarlyProbe([]byte(tc.answer))
			if tc.err == "" {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, ErrPrefillFailed)
				require.ErrorContains(t, err, tc.err)
			}
			require.Equal(t, tc.want, got)
		})
	}
}

func upTo(text, mark string) string {
	before, _, _ := strings.Cut(text, mark)
	return before
}
