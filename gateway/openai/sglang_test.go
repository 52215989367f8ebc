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
			fail := parse(ep, fmt.Sprintf("%q:%s,", key, v)).ForSGLang()
			require.NotNil(t, fail, key)
			require.Equal(t, []any{400, key, CodeUnsupported}, []any{fail.Status, fail.Param, fail.Code})
			require.Nil(t, parse(ep, fmt.Sprintf("%q:null,", key)).ForSGLang(), key)
		}
	}
	const ids = `"return_token_ids":true,`
	fail := parse(mooncake.Chat, ids).ForSGLang()
	require.NotNil(t, fail)
	require.Equal(t, []any{400, "return_token_ids", CodeUnsupported}, []any{fail.Status, fail.Param, fail.Code})
	require.Nil(t, parse(mooncake.Completions, ids).ForSGLang())
}
