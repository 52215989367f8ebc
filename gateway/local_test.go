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
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// conditional is a cluster whose decode ranks may compute short prompts.
func conditional(more func(*config.Config)) options {
	return options{
		profile: mooncake.Profile{AllowLocalPrefill: true},
		decode:  []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateConditional
			cfg.Prefill.Index.TokenizeTimeout = patience // a busy machine counts the prompt, too
			if more != nil {
				more(cfg)
			}
		},
	}
}

// talk is a chat of turns, the user's first.
func talk(more string, turns ...string) string {
	var messages []string
	for i, text := range turns {
		messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%q}`, [...]string{"user", "assistant"}[i%2], text))
	}
	return fmt.Sprintf(`{%s"model":%q,"messages":[%s]}`, more, model, strings.Join(messages, ","))
}

// say posts a chat, checks its answer and returns it with the way it took.
func (c *cluster) say(body string, header ...string) (text, route string) {
	c.Helper()
	p, err := reftext.Render(true, []byte(body))
	require.NoError(c, err)
	r := c.post(chatPath, body, header...)
	require.NoError(c, r.err)
	require.Equal(c, http.StatusOK, r.status, r.body)
	if strings.Contains(body, `"stream":true`) {
		text = read(c.T, r.body).text[0]
	} else {
		text = whole(c.T, r.body)[0]
	}
	wholeText(c.T, p.Answer, text)
	return text, r.header.Get("X-Evenkeel-Route")
}

func TestATrustedCallerChoosesTheWay(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c := start(t, conditional(func(cfg *config.Config) {
		cfg.KeysFile = file
		cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways
	}))
	ask := func(key, way, prompt string) reply {
		return c.post(chatPath, talk(`"max_tokens":4,`, prompt), "Authorization", "Bearer "+key, "X-Evenkeel-Disaggregate", way)
	}
	way := func(key, way, prompt string) string { return ask(key, way, prompt).header.Get("X-Evenkeel-Route") }
	long := reftext.MakePrompt(4, 3000)
	require.Equal(t, "local-prefill", way("ek-ops", "auto", "hi"))
	require.Equal(t, "disaggregated", way("ek-ops", "auto", long))
	require.Equal(t, "disaggregated", way("ek-ops", "always", "hi"))
	require.Equal(t, "local-prefill", way("ek-ops", "never", reftext.MakePrompt(5, 3000)))
	require.Equal(t, "disaggregated", way("ek-team", "never", "hi"), "not trusted: without effect")
	r := ask("ek-ops", "sometimes", "hi")
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Equal(t, "bad_target", r.header.Get("X-Evenkeel-Reason"))
	require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="asked"}`))
	require.Equal(t, "local-prefill", way("ek-ops", "auto", long), "its rank has it")
	require.Equal(t, http.StatusOK, c.ask("POST", c.admin+"/reset_prefix_cache", "").status)
	require.Equal(t, "disaggregated", way("ek-ops", "auto", long), "no engine has anything any more")
}
