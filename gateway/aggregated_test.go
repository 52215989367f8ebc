package gateway_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

func together(more func(*config.Config)) options {
	return options{
		mixed: []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			if more != nil {
				more(cfg)
			}
		},
	}
}

// Where each engine prefills and decodes, no answer speaks of engines that there are not.
func TestWithoutPairsNobodyIsToldOfThem(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"one group":                 {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, dirty: true},
		"nobody has told its model": {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal", Model: "other"}}, dirty: true},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, o)
			told := func(r reply, status int, code string) {
				t.Helper()
				require.Equal(t, status, r.status, r.body)
				require.NotContains(t, r.body, "prefill")
				require.NotContains(t, r.body, "decode")
				require.Contains(t, r.body, code)
			}
			if name == "one group" {
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
				told(c.post(chatPath, chat("a", "")), http.StatusServiceUnavailable, `"engine_unavailable"`)
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
				told(c.post(chatPath, chat("a", "")), http.StatusBadGateway, `"engine_failed"`)
				require.NoError(t, c.decode[0].SetFaults())
			}
			c.decode[0].Kill()
			c.eventually("the proxy is not ready", func() bool { ok, _ := c.gw.Ready(); return !ok })
			for path, body := range map[string]string{chatPath: chat("a", ""), completionPath: completion("a", `"stream":true,`), responsesPath: respond("a", ""), messagesPath: wordsOf("a", "")} {
				r := c.post(path, body)
				if name != "one group" {
					require.Equal(t, http.StatusNotFound, r.status, r.body)
					continue
				}
				if told(r, http.StatusServiceUnavailable, "(down)"); path != messagesPath {
					require.Contains(t, r.body, `"engine_unavailable"`)
				}
			}
			_, why := c.gw.Ready()
			require.Equal(t, "no healthy aggregated engine", why)
		})
	}
}
