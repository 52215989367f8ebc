package gateway_test

import (
	"fmt"
	"net/http"
	"path/filepath"
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

func TestMessagesThatAreRefused(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{}))
	turn := func(content string) string {
		return `{"model":"ref","max_tokens":5,"messages":[{"role":"user","content":` + content + `}]}`
	}
	for name, row := range map[string]struct{ body, says string }{
		"no JSON":                         {`{`, "not acceptable"},
		"no messages":                     {`{"model":"ref","max_tokens":5}`, `no "messages"`},
		"no turn":                         {`{"model":"ref","max_tokens":5,"messages":[]}`, "at least one"},
		"no length":                       {`{"model":"ref","messages":[{"role":"user","content":"a"}]}`, `no "max_tokens"`},
		"a length of nothing":             {strings.Replace(turn(`"a"`), "5", "0", 1), "an integer"},
		"a length twice":                  {strings.Replace(turn(`"a"`), `"max_tokens":5`, `"max_tokens":5,"max_tokens":6`, 1), "once"},
		"a budget above the length":       {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","budget_tokens":1024},"max_tokens"`, 1), "below"},
		"a budget of little":              {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","budget_tokens":4},"max_tokens"`, 1), "1024"},
		"two ways to think":               {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","type":"disabled"},"max_tokens"`, 1), "thinking.type"},
		"a system of a number":            {strings.Replace(turn(`"a"`), `"max_tokens"`, `"system":5,"max_tokens"`, 1), "a list of blocks"},
		"a template":                      {strings.Replace(turn(`"a"`), `"max_tokens"`, `"chat_template_kwargs":{"chat_template":"x"},"max_tokens"`, 1), "not allowed"},
		"a block of no type":              {turn(`[{"text":"a"}]`), `no "type"`},
		"a block that nobody knows":       {turn(`[{"type":"hologram"}]`), "hologram"},
		"a picture from anywhere":         {turn(`[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]`), "messages[0].content[0].source.url: media must come"},
		"a picture of two places":         {turn(`[{"type":"image","source":{"type":"base64","data":"AA","url":"http://10.0.0.1/"}}]`), "source.url"},
		"a picture that a tool found":     {turn(`[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"x"},{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]}]`), "content[0].content[1].source.url"},
		"a picture before it":             {strings.Replace(turn(`"a"`), `"max_tokens"`, `"system":[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}],"max_tokens"`, 1), "system[0].source.url"},
		"a picture whose tokens to count": {`count` + turn(`[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]`), "source.url"},
		"a count of nothing":              {`count{"messages":[]}`, "at least one"},
	} {
		t.Run(name, func(t *testing.T) {
			path := messagesPath
			body, count := strings.CutPrefix(row.body, "count")
			if count {
				path += "/count_tokens"
			}
			r := c.post(path, body)
			require.Equal(t, http.StatusBadRequest, r.status, r.body)
			kind, says := answertest.Refused(t, r.body)
			require.Equal(t, "invalid_request_error", kind)
			require.Contains(t, says, row.says)
		})
	}
	for name, row := range map[string]struct {
		r    reply
		want int
		kind string
	}{
		"another model":   {c.post(messagesPath, strings.Replace(wordsOf("a", ""), model, "nope", 1)), http.StatusNotFound, "not_found_error"},
		"another method":  {c.ask(http.MethodGet, c.url+messagesPath, ""), http.StatusMethodNotAllowed, "invalid_request_error"},
		"a packed body":   {c.post(messagesPath, wordsOf("a", ""), "Content-Encoding", "br"), http.StatusUnsupportedMediaType, "invalid_request_error"},
		"a body too long": {c.post(messagesPath, strings.Repeat(" ", 33<<20)), http.StatusRequestEntityTooLarge, "request_too_large"},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, row.r.err)
			require.Equal(t, row.want, row.r.status, row.r.body)
			kind, _ := answertest.Refused(t, row.r.body)
			require.Equal(t, row.kind, kind)
		})
	}
	require.Zero(t, c.prefill[0].Stats().Requests)
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

// Anthropic's clients send their key as x-api-key.
func TestTheKeyOfAMessage(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "team ek-team , rpm: 4")
	c := start(t, takesMessages(options{configure: func(cfg *config.Config) { cfg.KeysFile = file }}))
	for name, header := range map[string][]string{
		"no key": nil, "an unknown one": {"X-Api-Key", "ek-teat"}, "none of it": {"X-Api-Key", ""}, "with a scheme": {"X-Api-Key", "Bearer ek-team"},
		"another Authorization counts": {"X-Api-Key", "ek-team", "Authorization", "Bearer wrong"},
	} {
		for _, body := range []string{wordsOf("a", ""), wordsOf(strings.Repeat("a", 10<<10), "")} { // a long one is refused by its head
			r := c.post(messagesPath, body, header...)
			require.Equal(t, http.StatusUnauthorized, r.status, name)
			kind, _ := answertest.Refused(t, r.body)
			require.Equal(t, "authentication_error", kind)
		}
	}
	require.Equal(t, http.StatusOK, c.post(messagesPath, wordsOf("a", ""), "X-Api-Key", "ek-team").status)
	require.Equal(t, http.StatusOK, c.post(messagesPath, wordsOf("a", ""), "Authorization", "Bearer ek-team", "X-Api-Key", "anything").status)
	require.Equal(t, http.StatusOK, c.post(chatPath, chat("a", ""), "X-Api-Key", "ek-team").status)
	require.Equal(t, http.StatusOK, c.post(messagesPath+"/count_tokens", wordsOf("a", ""), "X-Api-Key", "ek-team").status)
	r := c.post(messagesPath, wordsOf("a", ""), "X-Api-Key", "ek-team")
	require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
	kind, _ := answertest.Refused(t, r.body)
	require.Equal(t, "rate_limit_error", kind)
	require.NotEmpty(t, r.header.Get("Retry-After"))
}

// A message that vllm-ascend gives back for want of memory cannot be told from a whole one.
func TestEnginesOfAscendDoNotServeMessages(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	r := c.post(messagesPath, wordsOf("a", ""))
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	kind, says := answertest.Refused(t, r.body)
	require.Equal(t, "not_found_error", kind)
	require.Equal(t, `/v1/messages is not served for "ref": this model has decode engines of vllm-ascend, which may end an answer early when they `+
		"have no memory left, and this endpoint would not say so; use /v1/chat/completions, or ask the operator whether the connector of the engines is right, and for gives_back: false", says)
	require.Zero(t, c.prefill[0].Stats().Requests)
}
