package gateway_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/mooncake"
)

const messagesPath = "/v1/messages"

// wordsOf is the body of a message to a prompt, with more members.
func wordsOf(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}

// takesMessages are engines that take hand-offs of messages.
func takesMessages(o options) options {
	o = nixl(o)
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			if list[i].Version == "" {
				list[i].Version = "0.32.0"
			}
		}
	}
	return o
}

// handedOff holds that a whole message, the first answer to its prompt, went through both engines and is right.
func handedOff(t *testing.T, r reply, prompt string) {
	t.Helper()
	key := reftext.OfUser(prompt).Answer
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
	require.NotContains(t, r.body, "kv_transfer_params")
	got := answertest.ReadWholeMessage(t, r.body)
	wholeText(t, key, got.Text())
	require.Equal(t, "end_turn", got.Stop)
	require.Equal(t, model, got.Model)
	require.Equal(t, answertest.Spent{Input: 300, Output: reftext.NaturalLength(key)}, got.Usage)
}

func TestMessages(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	t.Run("not streamed", func(t *testing.T) {
		handedOff(t, c.post(messagesPath, wordsOf(prompt, "")), prompt)
	})
	t.Run("streamed, with prefill's cached tokens, and both engines had a part in it", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`), "X-Request-Id", "message")
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		require.Equal(t, "text/event-stream; charset=utf-8", r.header.Get("Content-Type"))
		got := answertest.ReadMessage(t, r.body)
		require.Equal(t, []string{"message_start", "content_block_start", "content_block_delta"}, got.Kinds[:3])
		require.Equal(t, []string{"content_block_stop", "message_delta", "message_stop"}, got.Kinds[len(got.Kinds)-3:])
		require.NotEmpty(t, got.ID)
		wholeText(t, key, got.Text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, answertest.Spent{Input: 300}, got.First, "no engine tells of cached tokens there")
		require.Equal(t, answertest.Spent{Input: 44, Output: natural, Cached: 256}, got.Usage, "two blocks that the first request left in prefill's prefix cache")
		kept := c.receipt("message")
		require.Equal(t, messagesPath, kept.Endpoint)
		require.Equal(t, 300, kept.PromptTokens)
		require.Equal(t, 256, kept.CachedTokens)
		require.Equal(t, natural, kept.OutputTokens)
	})
	t.Run("an answer that is cut says so, and why", func(t *testing.T) {
		body := strings.Replace(wordsOf(prompt, ""), "4000", "5", 1)
		got := answertest.ReadWholeMessage(t, c.post(messagesPath, body).body)
		require.Equal(t, "max_tokens", got.Stop)
		require.Equal(t, reftext.Text(key, 5), got.Text())
		stop := strings.Fields(reftext.Text(key, 5))[2]
		got = answertest.ReadWholeMessage(t, c.post(messagesPath, wordsOf(prompt, fmt.Sprintf(`"stop_sequences":[%q],`, stop))).body)
		require.Equal(t, "stop_sequence", got.Stop)
		require.True(t, strings.HasPrefix(reftext.Text(key, 5), got.Text()))
	})
	t.Run("a conversation, and what stands before it", func(t *testing.T) {
		body := fmt.Sprintf(`{"model":%q,"max_tokens":4000,"system":[{"type":"text","text":"be short","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"one two"},{"role":"assistant","content":[{"type":"text","text":"three"}]},{"role":"user","content":[{"type":"text","text":"four"}]}]}`, model)
		p, err := reftext.Render(true, []byte(`{"messages":[{"role":"system","content":"be short"},{"role":"user","content":"one two"},{"role":"assistant","content":"three"},{"role":"user","content":"four"}]}`))
		require.NoError(t, err)
		wholeText(t, p.Answer, answertest.ReadWholeMessage(t, c.post(messagesPath, body).body).Text())
	})
	t.Run("tools", func(t *testing.T) {
		tools := `"tools":[{"name":"look_up","input_schema":{"type":"object","properties":{"image_url":{"type":"string"}}}}],"tool_choice":{"type":"tool","name":"look_up"},`
		whole := answertest.ReadWholeMessage(t, c.post(messagesPath, wordsOf(prompt, tools)).body)
		require.Equal(t, "tool_use", whole.Stop)
		require.Equal(t, "look_up", whole.Content[0].Name)
		got := answertest.ReadMessage(t, c.post(messagesPath, wordsOf(prompt, tools+`"stream":true,`)).body)
		require.Equal(t, "tool_use", got.Stop)
		require.Equal(t, "tool_use", got.Content[0].Type)
		require.Equal(t, "look_up", got.Content[0].Name)
		require.JSONEq(t, string(whole.Content[0].Input), got.Args)
		back := fmt.Sprintf(`{"model":%q,"max_tokens":9,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"look_up","input":{"source":{"url":"http://10.0.0.1/"}}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"b"}]}]}]}`, model)
		require.Equal(t, http.StatusOK, c.post(messagesPath, back).status, "a URL among a tool's arguments is no medium")
	})
	t.Run("thinking, whose budget no leg of one token has", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"thinking":{"type":"enabled","budget_tokens":1024},"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		wholeText(t, key, answertest.ReadMessage(t, r.body).Text())
	})
	t.Run("tokens are counted by one engine", func(t *testing.T) {
		r := c.post(messagesPath+"/count_tokens", fmt.Sprintf(`{"model":%q,"system":"a b","messages":[{"role":"user","content":"c d e"}],"tools":[]}`, model))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Contains(t, r.body, `"input_tokens":`)
		require.Equal(t, "passed-through", r.header.Get("X-Evenkeel-Route"))
	})
}

// An engine before vLLM 0.27 knows no cache_salt at /v1/messages: what is discarded would stay in its prefix cache.
func TestAMessageGoesWholeToAnEngineThatTakesNoHandOffForIt(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{
		decode: []refengine.Config{{Version: "0.26.0"}}, profile: mooncake.Profile{AllowLocalPrefill: true}, configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
	}))
	prompt := reftext.MakePrompt(3, 500)
	r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "local-prefill", r.header.Get("X-Evenkeel-Route"))
	wholeText(t, reftext.OfUser(prompt).Answer, answertest.ReadMessage(t, r.body).Text())
	require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="endpoint"}`))
	require.Zero(t, c.prefill[0].Stats().Requests)
	r = c.post(responsesPath, respond(prompt, ""))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"), "a response is split as before")
}
