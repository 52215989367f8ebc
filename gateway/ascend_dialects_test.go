package gateway_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
)

// keeps are engines of vllm-ascend that run without the recompute scheduler.
func keeps(o options) options {
	o.profile.GivesBack = new(false)
	return o
}

func TestEnginesOfAscendThatGiveNothingBack(t *testing.T) {
	t.Parallel()
	c := start(t, keeps(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	t.Run("a message", func(t *testing.T) {
		handedOff(t, c.post(messagesPath, wordsOf(prompt, "")), prompt)
	})
	t.Run("a message in a stream", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := answertest.ReadMessage(t, r.body)
		wholeText(t, key, got.Text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, answertest.Spent{Input: 44, Output: natural, Cached: 256}, got.Usage)
	})
	t.Run("a tool by name, and a budget for thinking", func(t *testing.T) {
		more := `"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f"},"thinking":{"type":"enabled","budget_tokens":1024},`
		r := c.post(messagesPath, wordsOf("a", more))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Contains(t, r.body, `"type":"tool_use"`)
	})
	t.Run("a response", func(t *testing.T) {
		r := c.post(responsesPath, respond(prompt, ""))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		require.NotContains(t, r.body, "kv_transfer_params")
	})
	t.Run("a response in a stream", func(t *testing.T) {
		r := c.post(responsesPath, respond(prompt, `"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got := answertest.ReadResponse(t, r.body)
		require.Empty(t, got.Fail)
		wholeText(t, key, got.Text)
	})
}

// Without the recompute scheduler a rank that is full computes again what it has put aside, and the answer is whole.
func TestFullRanksOfAscendThatGiveNothingBack(t *testing.T) {
	t.Parallel()
	c := start(t, keeps(options{dirty: true, decode: []refengine.Config{{KVTokens: 1024, Slots: 16, C0: 2 * time.Millisecond}}}))
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 60)
			r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`))
			if r.status == http.StatusOK {
				wholeText(t, reftext.OfUser(prompt).Answer, answertest.ReadMessage(t, r.body).Text())
			} else {
				t.Errorf("%d %s", r.status, r.body)
			}
		})
	}
	wg.Wait()
	require.Positive(t, c.decode[0].Stats().Preemptions)
}
