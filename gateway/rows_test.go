package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// The logprobs of a prompt come from an engine that computes the prompt, or the request is refused before any engine has it. An
// engine that cannot compute them would end.
func TestLogprobsOfPromptsComeFromWhoComputesThem(t *testing.T) {
	t.Parallel()
	pair := func(connector refengine.Connector, version string) func(t *testing.T) *cluster {
		o := options{
			profile: mooncake.Profile{Connector: string(connector)},
			prefill: []refengine.Config{{Version: version}}, decode: []refengine.Config{{Version: version}, {Version: version}},
		}
		if connector == refengine.NIXLPush || connector == refengine.AscendLayerwise {
			return func(t *testing.T) *cluster { return early(t, connector, o) }
		}
		return func(t *testing.T) *cluster { return start(t, o) }
	}
	const first, alone, decodes = "refused", "by the prefill engine", "by a decode engine"
	for _, row := range []struct {
		name      string
		start     func(t *testing.T) *cluster
		one, many string
	}{
		{"vLLM before 0.31", pair(refengine.NIXLPull, "0.30.2"), alone, first},
		{"vLLM from 0.31 on", pair(refengine.NIXLPull, "0.31.0"), alone, decodes},
		{"likewise, bound early", pair(refengine.NIXLPush, "0.32.0"), alone, decodes},
		{"vllm-ascend", pair(refengine.AscendMooncake, "0.32.0"), alone, first},
		{"likewise, layer by layer", pair(refengine.AscendLayerwise, "0.32.0"), alone, first},
		{"ranks that do both", func(t *testing.T) *cluster { return start(t, together(nil)) }, decodes, decodes},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := row.start(t)
			for name, ask := range map[string]struct{ path, body, want, param string }{
				"echo and one token":      {completionPath, completion("one two three", `"echo":true,"logprobs":1,"max_tokens":1,`), row.one, ""},
				"echo and none":           {completionPath, completion("one two three", `"echo":true,"logprobs":1,"max_tokens":0,`), row.one, ""},
				"echo, streamed":          {completionPath, completion("one two three", `"echo":true,"logprobs":1,"max_tokens":1,"stream":true,"stream_options":{"include_usage":true},`), row.one, ""},
				"prompt_logprobs":         {chatPath, chat("one two three", `"prompt_logprobs":2,"max_tokens":1,`), row.one, ""},
				"two prompts":             {completionPath, `{"model":"ref","prompt":["one two","three"],"prompt_logprobs":0,"max_tokens":1}`, row.one, ""},
				"echo and more":           {completionPath, completion("one two three", `"echo":true,"logprobs":1,"max_tokens":5,`), row.many, "echo"},
				"prompt_logprobs of more": {chatPath, chat("one two three", `"prompt_logprobs":2,"max_tokens":5,`), row.many, "prompt_logprobs"},
			} {
				decoded, prefilled := c.asked()
				r := c.post(ask.path, ask.body)
				after, prefilledAfter := c.asked()
				switch ask.want {
				case first:
					require.Equal(t, http.StatusBadRequest, r.status, name)
					code, param, _ := failure(t, r)
					require.Equal(t, "unsupported_parameter", code, r.body)
					require.Equal(t, ask.param, param, r.body)
					require.Equal(t, prefilled, prefilledAfter, name)
				case alone:
					require.Equal(t, http.StatusOK, r.status, "%s: %s", name, r.body)
					require.Greater(t, prefilledAfter, prefilled, name)
				default:
					require.Equal(t, http.StatusOK, r.status, "%s: %s", name, r.body)
					require.Greater(t, after, decoded, name)
				}
				switch {
				case ask.want != decodes:
					require.Equal(t, decoded, after, "%s: no decode engine sees it", name)
					fallthrough
				case r.status == http.StatusOK && !strings.Contains(ask.body, `"stream":true`):
					require.Equal(t, r.status == http.StatusOK && !strings.Contains(ask.body, `"stream":true`), strings.Contains(r.body, `"prompt_logprobs":[`), "%s: %s", name, r.body)
				}
				if strings.Contains(ask.body, `"stream":true`) {
					require.Contains(t, r.body, `"text":"one two three`)
					require.Equal(t, 1, strings.Count(r.body, "[DONE]"))
					require.Equal(t, 1, strings.Count(r.body, `"finish_reason":"length"`))
					require.Equal(t, 1, strings.Count(r.body, `"completion_tokens":1`), r.body)
				}
			}
			for _, e := range append(append([]*refengine.Engine{}, c.prefill...), c.decode...) {
				require.Zero(t, e.Stats().Crashes)
			}
			c.settled(false)
		})
	}
}

// asked are the requests that decode engines, or ranks that do both, and prefill engines had so far.
func (c *cluster) asked() (decode, prefill int64) {
	for _, e := range c.decode {
		decode += e.Stats().Requests
	}
	for _, e := range c.prefill {
		prefill += e.Stats().Requests
	}
	return decode, prefill
}

// Beam search is one answer of one engine, and SGLang knows neither it nor prompt_logprobs.
func TestBeamSearchIsForEnginesThatDoBoth(t *testing.T) {
	t.Parallel()
	const beams = `"use_beam_search":true,"n":1,"max_tokens":4,`
	c := start(t, together(nil))
	r := c.post(chatPath, chat("one two three", beams))
	require.Equal(t, http.StatusOK, r.status, r.body)
	r = c.post(chatPath, chat("one two three", beams+`"stream":true,`))
	require.Equal(t, http.StatusBadRequest, r.status)
	c.settled(false)

	c = early(t, refengine.SGLang, options{})
	for _, more := range []string{beams, `"prompt_logprobs":1,`} {
		r = c.post(chatPath, chat("one two three", more))
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
	}
	for _, tokens := range []string{"1", "5"} {
		r = c.post(completionPath, completion("one two three", `"echo":true,"logprobs":1,"max_tokens":`+tokens+`,`))
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
		_, param, _ := failure(t, r)
		require.Equal(t, "echo", param)
	}
	r = c.post(chatPath, chat("one two three", `"echo":true,"max_tokens":4,`))
	require.Equal(t, http.StatusOK, r.status, "SGLang does not know it there: %s", r.body)
	c.settled(false)
}
