package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
)

// rooms are engines of SGLang that tell how much of a prompt was cached.
func rooms(o options) options {
	if o.prefill == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, DPMode: "internal", PromptTokensDetails: true}}
	}
	return o
}

// The official client asks for responses in bench/outside/api.
func TestResponsesOfSGLang(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, rooms(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	r := c.post(responsesPath, respond(prompt, `"stream":true,`), "X-Request-Id", "response")
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"), "both engines had a part in it")
	wholeText(t, key, answertest.ReadResponse(t, r.body).Text)
	kept := c.receipt("response")
	require.Equal(t, 300, kept.PromptTokens)
	require.Equal(t, reftext.NaturalLength(key), kept.OutputTokens)
	r = c.post(responsesPath, respond(prompt, `"tools":[{"type":"web_search"}],`))
	require.Equal(t, http.StatusBadRequest, r.status, "it would generate twice in one room")
	c.settled(false)
	for _, e := range append(c.prefill, c.decode...) {
		require.Zero(t, e.Stats().Crashes)
		require.Zero(t, e.Stats().DuplicateIDs)
	}
}

func TestMessagesOfSGLang(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, rooms(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	t.Run("not streamed", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, ""))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		got := answertest.ReadWholeMessage(t, r.body)
		wholeText(t, key, got.Text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, answertest.Spent{Input: 300, Output: natural}, got.Usage)
	})
	t.Run("streamed, with the prompt counted at the start", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`), "X-Request-Id", "message")
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := answertest.ReadMessage(t, r.body)
		wholeText(t, key, got.Text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, answertest.Spent{Input: 300}, got.First)
		require.Equal(t, answertest.Spent{Output: natural}, got.Usage)
		kept := c.receipt("message")
		require.Equal(t, 300, kept.PromptTokens)
		require.Equal(t, natural, kept.OutputTokens)
	})
	t.Run("an answer that is cut says so", func(t *testing.T) {
		for _, stream := range []bool{false, true} {
			r := c.post(messagesPath, strings.Replace(wordsOf(prompt, fmt.Sprintf(`"stream":%t,`, stream)), "4000", "5", 1))
			read := answertest.ReadWholeMessage
			if stream {
				read = answertest.ReadMessage
			}
			got := read(t, r.body)
			require.Equal(t, "max_tokens", got.Stop)
			require.Equal(t, reftext.Text(key, 5), got.Text())
		}
	})
	t.Run("tools", func(t *testing.T) {
		tools := `"tools":[{"name":"look_up","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"look_up"},`
		whole := answertest.ReadWholeMessage(t, c.post(messagesPath, wordsOf(prompt, tools)).body)
		require.Equal(t, "tool_use", whole.Stop)
		require.Equal(t, "look_up", whole.Content[0].Name)
		got := answertest.ReadMessage(t, c.post(messagesPath, wordsOf(prompt, tools+`"stream":true,`)).body)
		require.Equal(t, "tool_use", got.Stop)
		require.Equal(t, "look_up", got.Content[0].Name)
		require.JSONEq(t, string(whole.Content[0].Input), got.Args)
	})
	t.Run("tokens are counted by one engine", func(t *testing.T) {
		r := c.post(messagesPath+"/count_tokens", fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}]}`, model, prompt))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.JSONEq(t, `{"input_tokens":300}`, r.body)
		require.Equal(t, "passed-through", r.header.Get("X-Evenkeel-Route"))
	})
	c.settled(false)
	for _, e := range append(c.prefill, c.decode...) {
		require.Zero(t, e.Stats().Crashes)
	}
}

func TestThinkingOfSGLang(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, options{prefill: []refengine.Config{{ReasoningTokens: 3}}, decode: []refengine.Config{{ReasoningTokens: 3}}})
	key := reftext.OfUser("one two three").Answer
	thinks := `"thinking":{"type":"enabled","budget_tokens":1024},`
	for stream, read := range map[string]func(*testing.T, string) answertest.Message{"": answertest.ReadWholeMessage, `"stream":true,`: answertest.ReadMessage} {
		r := c.post(messagesPath, wordsOf("one two three", thinks+stream))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := read(t, r.body)
		require.Equal(t, []string{"thinking", "text"}, []string{got.Content[0].Type, got.Content[1].Type})
		require.Equal(t, reftext.Text(key, 3), got.Content[0].Thinking)
		wholeText(t, key, got.Content[0].Thinking+got.Text())
	}
}

// Where no id can be told, the end of the connection ends a leg.
func TestAClientOfSGLangLeaves(t *testing.T) {
	t.Parallel()
	for path, body := range map[string]func(prompt, more string) string{messagesPath: wordsOf, responsesPath: respond} {
		for _, more := range []string{`"stream":true,`, ""} {
			for _, when := range []string{"in the prefill", "in the answer"} {
				t.Run(path+" "+more+" "+when, func(t *testing.T) {
					t.Parallel()
					c := early(t, refengine.SGLang, options{dirty: when == "in the prefill"}) // KV is on its way, or awaited
					rule, e, prefilled := refengine.Rule{Fault: refengine.Slow, DelayMS: 3000}, c.prefill[0], int64(0)
					if when == "in the answer" {
						rule, e, prefilled = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, AfterTokens: 3}, c.decode[0], 1
						if more == "" {
							rule = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders}
						}
					}
					require.NoError(t, e.SetFaults(rule))
					leave, wait := c.sendTo(path, body("a long story", more))
					c.eventually("both legs are there", func() bool {
						p, d := c.prefill[0].Stats(), c.decode[0].Stats()
						return p.Requests == 1 && d.Requests == 1 && p.Finished == prefilled && d.Tokens >= prefilled
					})
					leave()
					wait()
					c.settled(prefilled == 0)
					require.Equal(t, []string{"client_closed"}, c.outcomes())
					require.NoError(t, e.SetFaults())
					require.Equal(t, http.StatusOK, c.post(path, body("a b", more)).status)
				})
			}
		}
	}
}

// SGLang answers 400 to a response that failed for want of KV. It is not the client's fault.
func TestAResponseOfSGLangThatFails(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, options{dirty: true, decode: []refengine.Config{{}, {}}})
	for _, e := range c.decode {
		require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}))
	}
	for path, body := range map[string]func(prompt, more string) string{messagesPath: wordsOf, responsesPath: respond} {
		for _, more := range []string{`"stream":true,`, ""} {
			r := c.post(path, body("a b", more))
			require.Equal(t, http.StatusBadGateway, r.status, "%s %s", path, r.body)
			require.True(t, json.Valid([]byte(r.body)))
		}
	}
}
