package mooncake

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

const aResponse = `{"model":"m","input":"hi","instructions":"short","stream":true,"store":null,"max_output_tokens":9,"seed":5,"text":{"format":{"type":"json_object"}},"previous_response_id":null,"kv_transfer_params":{"x":1},"request_id":"mine","own":1}`

func TestLegsOfAResponse(t *testing.T) {
	b, err := ScanBody([]byte(aResponse), 0)
	require.NoError(t, err)
	p := Profile{Name: "p", Connector: NIXLPull}.WithDefaults()
	for name, row := range map[string]struct {
		got  [][]byte
		want string
	}{
		"the probe makes one token, and no engine keeps it": {p.ProbeBody(&b, Responses, &Patch{}, nil, nil),
			`{"model":"m","input":"hi","instructions":"short","own":1,"stream":false,"store":false,"max_output_tokens":1,"top_logprobs":0,"kv_transfer_params":` + string(pullProbe) + `}`},
		"a probe again after an end at once": {p.ProbeBody(&b, Responses, &Patch{IgnoreEOS: true}, nil, nil),
			`{"model":"m","input":"hi","instructions":"short","own":1,"stream":false,"store":false,"max_output_tokens":1,"top_logprobs":0,"ignore_eos":true,"kv_transfer_params":` + string(pullProbe) + `}`},
		"the answer": {p.DecodeBody(&b, Responses, nil, json.RawMessage(`{"k":1}`), "", true, nil),
			`{"model":"m","input":"hi","instructions":"short","max_output_tokens":9,"seed":5,"text":{"format":{"type":"json_object"}},"own":1,"stream":true,"store":false,"kv_transfer_params":{"k":1}}`},
		"the answer in one piece, computed there": {p.DecodeBody(&b, Responses, nil, nil, "", false, nil),
			`{"model":"m","input":"hi","instructions":"short","max_output_tokens":9,"seed":5,"text":{"format":{"type":"json_object"}},"own":1,"stream":false,"store":false}`},
		"a discard": {p.DiscardBody(&b, Responses, nil, json.RawMessage(`{"k":1}`), "s", nil),
			`{"model":"m","input":"hi","instructions":"short","own":1,"stream":false,"store":false,"max_output_tokens":1,"top_logprobs":0,"cache_salt":"s","kv_transfer_params":{"k":1}}`},
	} {
		t.Run(name, func(t *testing.T) { require.JSONEq(t, row.want, string(bytes.Join(row.got, nil))) })
	}
}

func TestTheProbeOfAResponseIsRead(t *testing.T) {
	answer := `{"object":"response","status":"incomplete","error":null,"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":4}},"kv_transfer_params":{"x":1}}`
	p := Profile{Name: "p", Connector: Opaque}.WithDefaults()
	got, err := p.ReadProbe([]byte(answer), nil, nil)
	require.NoError(t, err)
	require.Equal(t, 7, got.PromptTokens)
	require.Equal(t, 4, got.CachedTokens)
	require.Equal(t, "length", got.FinishReason)
	require.JSONEq(t, `{"x":1}`, string(got.KV))
}

const aMessage = `{"model":"m","max_tokens":2000,"system":"short","messages":[{"role":"user","content":"hi"}],"stream":true,"stop_sequences":["x"],"thinking":{"type":"enabled","budget_tokens":1024},"temperature":0.5,"metadata":{"user_id":"u"},"kv_transfer_params":{"x":1},"vllm_xargs":{"a":1}}`

func TestLegsOfAMessage(t *testing.T) {
	b, err := ScanBody([]byte(aMessage), 0)
	require.NoError(t, err)
	p := Profile{Name: "p", Connector: NIXLPull}.WithDefaults()
	const kept = `"model":"m","system":"short","messages":[{"role":"user","content":"hi"}],"temperature":0.5,"metadata":{"user_id":"u"}`
	for name, row := range map[string]struct {
		got  [][]byte
		want string
	}{
		"the probe makes one token": {p.ProbeBody(&b, Messages, &Patch{}, nil, nil),
			`{` + kept + `,"thinking":{"type":"enabled","budget_tokens":1024},"stream":false,"max_tokens":1,"stop_sequences":["{"],"kv_transfer_params":` + string(pullProbe) + `}`},
		"a probe again has no word for the end": {p.ProbeBody(&b, Messages, &Patch{IgnoreEOS: true}, nil, nil),
			`{` + kept + `,"thinking":{"type":"enabled","budget_tokens":1024},"stream":false,"max_tokens":1,"stop_sequences":["{"],"kv_transfer_params":` + string(pullProbe) + `}`},
		"the answer": {p.DecodeBody(&b, Messages, nil, json.RawMessage(`{"k":1}`), "", true, nil),
			`{` + kept + `,"max_tokens":2000,"stop_sequences":["x"],"thinking":{"type":"enabled","budget_tokens":1024},"stream":true,"kv_transfer_params":{"k":1}}`},
		"the answer in one piece, computed there": {p.DecodeBody(&b, Messages, nil, nil, "", false, nil),
			`{` + kept + `,"max_tokens":2000,"stop_sequences":["x"],"thinking":{"type":"enabled","budget_tokens":1024},"stream":false}`},
		"a discard has no budget for thinking": {p.DiscardBody(&b, Messages, nil, json.RawMessage(`{"k":1}`), "s", nil),
			`{` + kept + `,"stream":false,"max_tokens":1,"stop_sequences":["{"],"cache_salt":"s","kv_transfer_params":{"k":1}}`},
	} {
		t.Run(name, func(t *testing.T) { require.JSONEq(t, row.want, string(bytes.Join(row.got, nil))) })
	}
	written, err := ScanBody([]byte(`{"thinking":{"type":"en\u0061bled","budget_tokens":2000}}`), 0)
	require.NoError(t, err)
	require.NotContains(t, string(bytes.Join(p.DiscardBody(&written, Messages, nil, nil, "s", nil), nil)), "thinking", "however it is written")
	still, err := ScanBody([]byte(`{"thinking":{"type":"disabled"}}`), 0)
	require.NoError(t, err)
	require.Contains(t, string(bytes.Join(p.DiscardBody(&still, Messages, nil, nil, "s", nil), nil)), "disabled", "it shapes the prompt")
}

func TestTheProbeOfAMessageIsRead(t *testing.T) {
	p := Profile{Name: "p", Connector: Opaque}.WithDefaults()
	for answer, want := range map[string]ProbeAnswer{
		`{"type":"message","content":[],"stop_reason":"max_tokens","usage":{"input_tokens":3,"cache_read_input_tokens":4,"output_tokens":1},"kv_transfer_params":{"x":1}}`: {PromptTokens: 7, CachedTokens: 4, FinishReason: "length"},
		`{"type":"message","stop_reason":"stop_sequence","stop_sequence":"{","usage":{"input_tokens":3},"kv_transfer_params":{"x":1}}`:                                     {PromptTokens: 3, CachedTokens: -1, FinishReason: "length"},
		`{"type":"message","stop_reason":"end_turn","usage":{"input_tokens":3,"cache_read_input_tokens":0,"cache_creation_input_tokens":2},"kv_transfer_params":{"x":1}}`:  {PromptTokens: 5, FinishReason: "stop"},
		`{"type":"message","usage":{"input_tokens":3,"output_tokens":1},"kv_transfer_params":{"x":1}}`:                                                                     {PromptTokens: 3, CachedTokens: -1},
		`{"type":"message","stop_reason":null,"usage":{"cache_read_input_tokens":9,"input_tokens":3,"cache_read_input_tokens":-1},"kv_transfer_params":{"x":1}}`:           {PromptTokens: 3, CachedTokens: -1},
		`{"type":"message","usage":{"input_tokens":1e3,"cache_read_input_tokens":null},"stop_reason":"tool_use","kv_transfer_params":{"x":1}}`:                             {CachedTokens: -1, FinishReason: "stop"},
	} {
		got, err := p.ReadProbe([]byte(answer), nil, nil)
		require.NoError(t, err, answer)
		require.JSONEq(t, `{"x":1}`, string(got.KV))
		got.KV = nil
		require.Equal(t, want, got, answer)
	}
	_, err := p.ReadProbe([]byte(`{"type":"error","error":{"type":"internal_error","message":"no"}}`), nil, nil)
	require.ErrorIs(t, err, ErrBadHandoff)
}
