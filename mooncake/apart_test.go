package mooncake

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBodiesOfTokenIDsKeepWhatTheClientSent(t *testing.T) {
	const asked = `{"request_id":"mine","model":"m","token_ids":[1, 2],"max_tokens":"not its place","sampling_params":{"n":2,"temperature":0.5,"max_tokens":9,"min_tokens":3,"seed":4,"stop":["a"],"extra_args":{"kv_transfer_params":{}},"_eos_token_id":7},"output_mode":"text","priority":3,"kv_transfer_params":{"remote_host":"elsewhere"},"newer":true}`
	b, err := ScanFor(Tokens, []byte(asked), 0)
	require.NoError(t, err)
	derendered, err := ScanFor(Tokens, []byte(`{"token_ids":[1],"output_mode":"derender","sampling_params":{}}`), 0)
	require.NoError(t, err)
	p := Profile{Connector: NIXLPull}.WithDefaults()
	text := func(segments [][]byte) string { return string(bytes.Join(segments, nil)) }
	for _, row := range []struct{ name, got, want string }{
		{"the probe has one token", text(p.ProbeBody(&b, Tokens, nil, nil, nil)),
			`{"model":"m","max_tokens":"not its place","output_mode":"text","newer":true,"token_ids":[1, 2],"stream":false,"kv_transfer_params":` + string(pullProbe) + `,"sampling_params":{"temperature":0.5,"max_tokens":1,"min_tokens":1}}`},
		{"the probe does not parse what it makes", text(p.ProbeBody(&derendered, Tokens, nil, nil, nil)),
			`{"token_ids":[1],"stream":false,"kv_transfer_params":` + string(pullProbe) + `,"sampling_params":{"max_tokens":1,"min_tokens":1}}`},
		{"the decode leg is asked for one answer", text(p.DecodeBody(&b, Tokens, &Patch{SeedOffset: 1}, json.RawMessage(`{"a":1}`), "", true, nil)),
			`{"model":"m","token_ids":[1, 2],"max_tokens":"not its place","output_mode":"text","newer":true,"stream":true,"stream_options":` + string(usageEachStep) +
				`,"kv_transfer_params":{"a":1},"sampling_params":{"temperature":0.5,"max_tokens":9,"min_tokens":3,"stop":["a"],"seed":5}}`},
		{"a leg that goes on has a longer prompt", text(p.DecodeBody(&b, Tokens, &Patch{Resume: &Resume{Method: ResumePrompt, IDs: json.RawMessage(`[1, 2,8]`), Tokens: 1, Limit: 8, LimitKey: "max_tokens"}}, nil, "", true, nil)),
			`{"model":"m","max_tokens":"not its place","output_mode":"text","newer":true,"token_ids":[1, 2,8],"stream":true,"stream_options":` + string(usageEachStep) +
				`,"sampling_params":{"temperature":0.5,"seed":4,"stop":["a"],"max_tokens":8,"min_tokens":2}}`},
		{"a discard has one token and a salt", text(p.DiscardBody(&b, Tokens, nil, json.RawMessage(`{"a":1}`), "salt", nil)),
			`{"model":"m","token_ids":[1, 2],"max_tokens":"not its place","newer":true,"stream":false,"cache_salt":"salt","kv_transfer_params":{"a":1},"sampling_params":{"temperature":0.5,"max_tokens":1}}`},
	} {
		require.JSONEq(t, row.want, row.got, row.name)
	}
}

func TestBodiesOfGenerate(t *testing.T) {
	for _, row := range []struct{ name, asked, want string }{
		{"token ids", `{"model":"m","input_ids":[1,2],"rid":"mine","sampling_params":{"max_new_tokens":9,"n":2,"sampling_seed":4},"bootstrap_host":"elsewhere","http_worker_ipc":"x"}`,
			`{"model":"m","input_ids":[7],"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"rid":"r","bootstrap_host":"p","bootstrap_port":8998,"bootstrap_room":5,"routed_dp_rank":1,"disagg_prefill_dp_rank":0,"sampling_params":{"max_new_tokens":9,"sampling_seed":5}}`},
		{"a text", `{"text":["a","b"]}`,
			`{"text":[7],"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"rid":"r","bootstrap_host":"p","bootstrap_port":8998,"bootstrap_room":5,"routed_dp_rank":1,"disagg_prefill_dp_rank":0,"sampling_params":{}}`},
	} {
		b, err := ScanFor(Generate, []byte(row.asked), 0)
		require.NoError(t, err)
		p := Profile{Connector: SGLang}.WithDefaults()
		r := &Rendezvous{Endpoint: Generate, RID: "r", Host: "p", Port: 8998, Room: 5, PrefillRank: 0, DecodeRank: 1}
		got := bytes.Join(p.EarlyDecode(&b, &Patch{SeedOffset: 1, Prompt: json.RawMessage(`[7]`)}, r, "", true, nil), nil)
		require.JSONEq(t, row.want, string(got), row.name)
	}
}

func TestWhatAFormHas(t *testing.T) {
	b, err := ScanFor(Generate, []byte(`{"input_ids":[1],"prompt":"not its place","sampling_params":{"max_new_tokens":9,"prompt":1,"new":2}}`), 0)
	require.NoError(t, err)
	require.Equal(t, "sampling_params.max_new_tokens", b.Name("max_tokens"))
	require.Equal(t, "input_ids", b.Name("prompt"))
	all := map[string]string{}
	for word, v := range b.All() {
		all[word] = string(v)
	}
	require.Equal(t, map[string]string{"prompt": "[1]", "max_tokens": "9", "sampling_params": `{"max_new_tokens":9,"prompt":1,"new":2}`}, all)
	b.Set("max_tokens", []byte("10"))
	got, _ := b.Get("max_tokens")
	require.Equal(t, "10", string(got))
	require.Equal(t, 1, b.Count("max_tokens"))
	require.JSONEq(t, `{"input_ids":[1],"prompt":"not its place","sampling_params":{"prompt":1,"new":2,"max_new_tokens":10}}`, string(bytes.Join(b.Splice(nil, nil, nil), nil)))
	_, err = ScanFor(Tokens, []byte(`{"sampling_params":3}`), 0)
	require.NoError(t, err, "what stands there is not for us to judge")
}
