package gateway_test

import (
	"net/http"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
)

func TestATrustedCallerChoosesTheWay(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c := start(t, conditional(func(cfg *config.Config) {
		cfg.KeysFile = file
		cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways
	}))
	ask := func(key, way, prompt string) reply {
		return c.Post(refclient.ChatPath, talk(`"max_tokens":4,`, prompt), "Authorization", "Bearer "+key, "X-Evenkeel-Disaggregate", way)
	}
	way := func(key, way, prompt string) string { return ask(key, way, prompt).Header.Get("X-Evenkeel-Route") }
	long := reftext.MakePrompt(4, 3000)
	require.Equal(t, "local-prefill", way("ek-ops", "auto", "hi"))
	require.Equal(t, "disaggregated", way("ek-ops", "auto", long))
	require.Equal(t, "disaggregated", way("ek-ops", "always", "hi"))
	require.Equal(t, "local-prefill", way("ek-ops", "never", reftext.MakePrompt(5, 3000)))
	require.Equal(t, "disaggregated", way("ek-team", "never", "hi"), "not trusted: without effect")
	r := ask("ek-ops", "sometimes", "hi")
	require.Equal(t, http.StatusBadRequest, r.Status)
	require.Equal(t, "bad_target", r.Header.Get("X-Evenkeel-Reason"))
	require.EqualValues(t, 1, c.Metric(`evenkeel_local_prefill_requests_total{reason="asked"}`))
	require.Equal(t, "local-prefill", way("ek-ops", "auto", long), "its rank has it")
	require.Equal(t, http.StatusOK, c.Ask("POST", c.admin+"/reset_prefix_cache", "").Status)
	require.Equal(t, "disaggregated", way("ek-ops", "auto", long), "no engine has anything any more")
}
