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
		"the probe makes one token, and no engine keeps it": {p.ProbeBody(&b, Responses, &Leg{}, nil, nil),
			`{"model":"m","input":"hi","instructions":"short","own":1,"stream":false,"store":false,"max_output_tokens":1,"top_logprobs":0,"kv_transfer_params":` + string(pullProbe) + `}`},
		"a probe again after an end at once": {p.ProbeBody(&b, Responses, &Leg{IgnoreEOS: true}, nil, nil),
			`{"model":"m","input":"hi","instructions":"short","own":1,"stream":false,"store":false,"max_output_tokens":1,"top_logprobs":0,"ignore_eos":true,"kv_transfer_params":` + string(pullProbe) + `}`},
		"the answer": {p.DecodeBody(&b, Responses, nil, json.RawMessage(`{"k":1}`), true, nil),
			`{"model":"m","input":"hi","instructions":"short","max_output_tokens":9,"seed":5,"text":{"format":{"type":"json_object"}},"own":1,"stream":true,"store":false,"kv_transfer_params":{"k":1}}`},
		"the answer in one piece, computed there": {p.DecodeBody(&b, Responses, nil, nil, false, nil),
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
