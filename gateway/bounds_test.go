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

// Engines take a whole number in each form that JSON has for it, and a request without a model for one of theirs. So does evenkeel.
func TestWhatEnginesTakeIsTaken(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{}))
	for _, row := range []struct{ path, body string }{
		{chatPath, `{"messages":[{"role":"user","content":"one two"}],"max_tokens":4.0,"n":2.0,"seed":7.0}`},
		{chatPath, `{"model":"","messages":[{"role":"user","content":"one two"}],"max_completion_tokens":4e0,"stream":true}`},
		{completionPath, `{"model":null,"prompt":"one two","max_tokens":40e-1,"seed":7.0,"logprobs":1.0}`},
		{completionPath, `{"prompt":["one","two"],"max_tokens":4.0,"n":1.0}`},
		{responsesPath, `{"input":"one two","max_output_tokens":4.0}`},
		{messagesPath, `{"max_tokens":4.0,"messages":[{"role":"user","content":"one two"}]}`},
		{messagesPath + "/count_tokens", `{"messages":[{"role":"user","content":"one two"}]}`},
		{"/tokenize", `{"prompt":"one two"}`},
	} {
		r := c.post(row.path, row.body)
		require.Equal(t, http.StatusOK, r.status, "%s %s: %s", row.path, row.body, r.body)
		require.NotContains(t, r.body, `"error":{`)
	}
	several := start(t, options{decode: []refengine.Config{{}, pooling()}})
	several.served("emb", 1)
	for _, path := range []string{chatPath, completionPath, "/v1/embeddings"} {
		r := several.post(path, `{"messages":[{"role":"user","content":"a"}],"prompt":"a","input":"a"}`)
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
		require.Contains(t, r.body, `"missing_required_parameter"`)
	}
	several.decode[1].Kill() // which of two is meant is not known because one is away
	several.eventually("it is down", func() bool { return several.sum("evenkeel_engine_up") == 2 })
	require.Equal(t, http.StatusBadRequest, several.post(chatPath, `{"messages":[{"role":"user","content":"a"}]}`).status)
}
