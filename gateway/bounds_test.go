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
)

// What a request may ask for is set by the operator, and of what engines bound themselves they say so.
func TestAnOperatorSaysWhatARequestMayAskFor(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{DPSize: 2, Slots: 64}}, configure: func(cfg *config.Config) {
		cfg.Limits.Answers, cfg.Limits.AnswersPerPrompt, cfg.Limits.StopStrings = 800, 30, 20
	}})
	r := c.post(chatPath, chat("one two", `"n":30,"max_tokens":3,"seed":1,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, whole(t, r.body), 30)
	require.Contains(t, r.body, `"completion_tokens":90`)

	prompts := make([]string, 700) // whose answers are more than the numbers of two letters
	for i := range prompts {
		prompts[i] = fmt.Sprint("prompt ", i)
	}
	list, err := json.Marshal(prompts)
	require.NoError(t, err)
	r = c.post(completionPath, fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%s}`, model, list))
	require.Equal(t, http.StatusOK, r.status, r.body)
	var answer struct {
		Choices []struct {
			Index int
			Text  string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &answer))
	require.Len(t, answer.Choices, len(prompts))
	for i, choice := range answer.Choices {
		require.Equal(t, i, choice.Index)
		require.NotEmpty(t, choice.Text)
	}

	stops := strings.TrimSuffix(strings.Repeat(`"zzz",`, 20), ",")
	r = c.post(chatPath, chat(reftext.MakePrompt(1, 20), `"stop":[`+stops+`],"max_tokens":3,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	prefills := c.prefill[0].Stats().Requests
	for _, body := range []string{chat("a", `"n":31,`), chat("a", `"stop":[`+stops+`,"z"],`), strings.Replace(completion("a", `"n":30,`), `"a"`, `[`+strings.TrimSuffix(strings.Repeat(`"a",`, 27), ",")+`]`, 1)} {
		path := chatPath
		if strings.Contains(body, `"prompt"`) {
			path = completionPath
		}
		r = c.post(path, body)
		require.Equal(t, http.StatusBadRequest, r.status, body)
		require.Contains(t, r.body, `"invalid_value"`)
	}
	require.Equal(t, prefills, c.prefill[0].Stats().Requests)

	decodes := c.decode[0].Stats().Requests
	r = c.post(chatPath, chat("a", `"logprobs":true,"top_logprobs":21,`))
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Contains(t, r.body, "top_logprobs", "in the engine's own words")
	require.NotContains(t, r.body, `"invalid_value"`)
	require.Equal(t, decodes, c.decode[0].Stats().Requests, "the prefill engine says it, before it computes anything")
}
