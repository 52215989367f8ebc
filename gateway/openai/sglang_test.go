package openai

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// SGLang would obey these keys, and no client may send them to it. Other engines ignore them.
func TestKeysThatNoClientSetsForSGLang(t *testing.T) {
	forms := map[mooncake.Endpoint]string{
		mooncake.Chat: `{"model":"m","messages":[{"role":"user","content":"a b"}],%s"max_tokens":2}`, mooncake.Completions: `{"model":"m","prompt":"a b",%s"max_tokens":2}`,
	}
	parse := func(ep mooncake.Endpoint, member string) *Request {
		req, fail := Parse(ep, fmt.Appendf(nil, forms[ep], member), Limits{})
		require.Nil(t, fail, "other engines' clients may")
		return req
	}
	for key, v := range map[string]string{
		"custom_logit_processor": `"gASVAAAA"`, "custom_params": `{"a":1}`, "session_params": `{"id":"x"}`, "lora_path": `"/tmp/x"`,
		"input_ids": `[1,2]`, "input_embeds": `[[0.5]]`, "stop_regex": `"(a+)+$"`,
	} {
		for ep := range forms {
			fail := parse(ep, fmt.Sprintf("%q:%s,", key, v)).CheckForSGLang(0)
			require.NotNil(t, fail, key)
			require.Equal(t, []any{400, key, CodeUnsupported}, []any{fail.Status, fail.Param, fail.Code})
			require.Nil(t, parse(ep, fmt.Sprintf("%q:null,", key)).CheckForSGLang(0), key)
		}
	}
	for likeliest, most := range map[string]int{"20": 0, "21": 30, "30": 30} {
		require.Nil(t, parse(mooncake.Chat, `"logprobs":true,"top_logprobs":`+likeliest+`,`).CheckForSGLang(most), likeliest)
		require.Nil(t, parse(mooncake.Completions, `"logprobs":`+likeliest+`,`).CheckForSGLang(most), likeliest)
	}
	for likeliest, most := range map[string]int{"21": 0, "31": 30, "-1": 30} { // the scheduler of SGLang would ask for them, and end
		fail := parse(mooncake.Chat, `"logprobs":true,"top_logprobs":`+likeliest+`,`).CheckForSGLang(most)
		require.Equal(t, []any{400, "top_logprobs"}, []any{fail.Status, fail.Param}, likeliest)
		fail = parse(mooncake.Completions, `"logprobs":`+likeliest+`,`).CheckForSGLang(most)
		require.Equal(t, []any{400, "logprobs"}, []any{fail.Status, fail.Param}, likeliest)
	}
	const ids = `"return_token_ids":true,`
	fail := parse(mooncake.Chat, ids).CheckForSGLang(0)
	require.NotNil(t, fail)
	require.Equal(t, []any{400, "return_token_ids", CodeUnsupported}, []any{fail.Status, fail.Param, fail.Code})
	require.Nil(t, parse(mooncake.Completions, ids).CheckForSGLang(0))
}
