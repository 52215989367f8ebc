package messages

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheChatOfAMessage(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}],"own":1}`: `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}]}`,
		`{"model":"m","max_tokens":5,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image","source":{}}]},{"role":"assistant","content":[{"type":"tool_use","name":"f","input":{"x":1}}]},{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"r"}]}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"any"},"stop_sequences":["x"],"stream":true,"cache_salt":"z","temperature":0.5,"kv_transfer_params":{"do_remote_decode":true}}`: `{"model":"m","max_tokens":5,"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":"f{\"x\":1}"},{"role":"tool","content":"r"}],"tools":[{"type":"function","function":{"name":"f","description":"","parameters":{"type":"object"}}}],"tool_choice":"required","stop":["x"],"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"cache_salt":"z","temperature":0.5,"kv_transfer_params":{"do_remote_decode":true}}`,
		`{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled","budget_tokens":1024},"kv_transfer_params":{"do_remote_decode":true},"tool_choice":{"type":"tool","name":"f"}}`: `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"}],"kv_transfer_params":{"do_remote_decode":true},"tool_choice":{"type":"function","function":{"name":"f"}}}`,
	} {
		chat, err := Chat([]byte(body), 32)
		require.NoError(t, err, body)
		require.JSONEq(t, want, string(chat))
	}
	for body, why := range map[string]string{
		`[`: "", `{"model":"m","messages":[{"role":"user","content":"a"}]}`: "max_tokens", `{"model":"m","max_tokens":5,"messages":[]}`: "at least one",
		`{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"hologram"}]}]}`:                                                                                  "hologram",
		`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled","budget_tokens":1024}}`:                                                 "less than max_tokens",
		`{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled","budget_tokens":1024},"kv_transfer_params":{"do_remote_prefill":true}}`: "less than max_tokens",
	} {
		_, err := Chat([]byte(body), 32)
		require.ErrorContains(t, err, why)
	}
	chat, err := Chat([]byte(`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled","budget_tokens":1024},"cache_salt":"z"}`), 26)
	require.NoError(t, err)
	require.JSONEq(t, `{"model":"","max_tokens":5,"messages":[{"role":"user","content":"a"}]}`, string(chat), "vLLM 0.26 does not know them")
	counted, err := Count([]byte(`{"model":"m","messages":[{"role":"user","content":"a"}]}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, string(counted))
}

func TestTheEventsOfAMessage(t *testing.T) {
	var w Writer
	require.Empty(t, w.Begin("x"))
	chat := strings.Join([]string{
		`data: {"id":"c","model":"m","choices":[{"delta":{"role":"assistant","content":""}}],"usage":{"prompt_tokens":4,"completion_tokens":0}}`,
		`: a comment`,
		`data: {"choices":[{"delta":{"reasoning":"hm"}}]}`,
		`data: {"choices":[{"delta":{"content":"a"}}]}`,
		`data: {"choices":[{"delta":{"tool_calls":[{"id":"1","function":{"name":"f"}}]}}]}`,
		`data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{}"}}]},"finish_reason":"tool_calls"}]}`,
		`data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}`,
		`data: [DONE]`,
	}, "\n\n") + "\n\n"
	require.Equal(t, strings.Join([]string{
		"event: message_start\ndata: " + `{"message":{"content":[],"id":"c","model":"m","role":"assistant","stop_reason":null,"stop_sequence":null,"type":"message","usage":{"input_tokens":4,"output_tokens":0}},"type":"message_start"}`,
		": a comment",
		"event: content_block_start\ndata: " + `{"content_block":{"thinking":"","type":"thinking"},"index":0,"type":"content_block_start"}`,
		"event: content_block_delta\ndata: " + `{"delta":{"thinking":"hm","type":"thinking_delta"},"index":0,"type":"content_block_delta"}`,
		"event: content_block_delta\ndata: " + `{"delta":{"signature":"signed","type":"signature_delta"},"index":0,"type":"content_block_delta"}`,
		"event: content_block_stop\ndata: " + `{"index":0,"type":"content_block_stop"}`,
		"event: content_block_start\ndata: " + `{"content_block":{"text":"","type":"text"},"index":1,"type":"content_block_start"}`,
		"event: content_block_delta\ndata: " + `{"delta":{"text":"a","type":"text_delta"},"index":1,"type":"content_block_delta"}`,
		"event: content_block_stop\ndata: " + `{"index":1,"type":"content_block_stop"}`,
		"event: content_block_start\ndata: " + `{"content_block":{"id":"1","input":{},"name":"f","type":"tool_use"},"index":2,"type":"content_block_start"}`,
		"event: content_block_delta\ndata: " + `{"delta":{"partial_json":"{}","type":"input_json_delta"},"index":2,"type":"content_block_delta"}`,
		"event: content_block_stop\ndata: " + `{"index":2,"type":"content_block_stop"}`,
		"event: message_delta\ndata: " + `{"delta":{"stop_reason":"tool_use","stop_sequence":null},"type":"message_delta","usage":{"cache_read_input_tokens":4,"input_tokens":0,"output_tokens":3}}`,
		"event: message_stop\ndata: " + `{"type":"message_stop"}`,
	}, "\n\n")+"\n\n", string(w.Events([]byte(chat))))

	w = Writer{}
	require.Contains(t, string(w.Events([]byte("data: {\"error\":{\"message\":\"no\"}}\n\n"))), "event: error\n")
	require.Empty(t, w.Events([]byte("data: [DONE]\n\n")), "vLLM ends there")
}

func TestWholeMessages(t *testing.T) {
	for chat, want := range map[string]string{
		`{"id":"c","model":"m","choices":[{"message":{"content":"a"},"finish_reason":"stop","stop_reason":"x"}],"usage":{"prompt_tokens":4,"completion_tokens":1},"kv_transfer_params":{"k":1}}`:     `{"id":"c","model":"m","type":"message","role":"assistant","content":[{"type":"text","text":"a"}],"stop_reason":"stop_sequence","stop_sequence":"x","usage":{"input_tokens":4,"output_tokens":1},"kv_transfer_params":{"k":1}}`,
		`{"id":"c","model":"m","choices":[{"message":{"content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\"a\":1}"}}]},"finish_reason":"stop"}],"kv_transfer_params":null}`: `{"id":"c","model":"m","type":"message","role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":1}}],"stop_reason":"tool_use","usage":{"input_tokens":0,"output_tokens":0}}`,
		`{"id":"c","model":"m","choices":[{"message":{"content":"","reasoning_content":"hm"},"finish_reason":"abort"}]}`:                                                                             `{"id":"c","model":"m","type":"message","role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"signed"}],"usage":{"input_tokens":0,"output_tokens":0}}`,
		`{"id":"c","model":"m","choices":[{"message":{"content":""},"finish_reason":"length"}]}`:                                                                                                     `{"id":"c","model":"m","type":"message","role":"assistant","content":[{"type":"text","text":""}],"stop_reason":"max_tokens","usage":{"input_tokens":0,"output_tokens":0}}`,
	} {
		got, status := new(Writer).Whole("", []byte(chat))
		require.Equal(t, 200, status)
		require.JSONEq(t, want, string(got))
	}
	_, status := new(Writer).Whole("", []byte(`{"error":{}}`))
	require.Zero(t, status)
	_, status = new(Writer).Whole("", []byte(`{"choices":[{"message":{"content":"","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{"}}]},"finish_reason":"length"}]}`))
	require.Equal(t, 400, status, "arguments that were cut short")
	body, status := new(Writer).Error(400, []byte(`{"error":{"type":"BadRequestError","message":"no","code":400}}`))
	require.Equal(t, 400, status)
	require.JSONEq(t, `{"type":"error","error":{"type":"BadRequestError","message":"no"}}`, string(body))
	body, _ = new(Writer).Error(502, []byte("text"))
	require.Equal(t, "text", string(body))
}

// An answer that vllm-ascend gives back has a stop reason that is no stop string. vLLM 0.32 takes
// it for one, unless the tools that were called are complete, and 0.27.1 tells neither.
func TestAMessageThatIsGivenBack(t *testing.T) {
	end := `data: {"choices":[{"delta":{},"finish_reason":"stop","stop_reason":"recomputed"}]}` + "\n\n" + `data: {"choices":[],"usage":{}}` + "\n\n"
	call := func(arguments string) string {
		return `data: {"choices":[{"delta":{"tool_calls":[{"id":"1","function":{"name":"f","arguments":"` + arguments + `"}}]}}]}` + "\n\n"
	}
	for _, tc := range []struct{ said, now, before string }{
		{"", `{"stop_reason":"stop_sequence","stop_sequence":"recomputed"}`, `{"stop_reason":"end_turn"}`},
		{call(`{`), `{"stop_reason":"stop_sequence","stop_sequence":"recomputed"}`, `{"stop_reason":"end_turn"}`},
		{call(`{}`), `{"stop_reason":"tool_use","stop_sequence":null}`, `{"stop_reason":"end_turn"}`},
	} {
		chat := []byte(`data: {"id":"c","model":"m","choices":[{"delta":{"role":"assistant"}}]}` + "\n\n" + tc.said + end)
		require.Contains(t, string(new(Writer).Events(chat)), `{"delta":`+tc.now)
		require.Contains(t, string((&Writer{Before32: true}).Events(chat)), `{"delta":`+tc.before)
	}
	whole := []byte(`{"choices":[{"message":{"content":"a"},"finish_reason":"stop","stop_reason":"recomputed"}]}`)
	now, _ := new(Writer).Whole("", whole)
	require.Contains(t, string(now), `"stop_reason":"stop_sequence","stop_sequence":"recomputed"`)
	before, _ := (&Writer{Before32: true}).Whole("", whole)
	require.Contains(t, string(before), `"stop_reason":"end_turn"`)
	require.NotContains(t, string(before), "recomputed")
}
