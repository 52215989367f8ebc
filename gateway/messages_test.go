package gateway_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/openai/answertest"
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
