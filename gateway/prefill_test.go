package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
)

func TestOperatorsSeeAndChangeThePrefillTier(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Prefill.Policy = "lmetric" }})
	require.Equal(t, "right", c.judge("one", `"stream":true,`))

	var o prefill.Overview
	require.NoError(t, json.Unmarshal([]byte(c.get("/prefill").body), &o))
	require.Equal(t, "lmetric", o.Policy)
	require.Contains(t, o.Policies, "finish")
	require.Len(t, o.Candidates, 1)
	require.True(t, o.Candidates[0].CanStart)
	require.NotNil(t, o.Candidates[0].AnswerAgeMs)
	require.NotZero(t, o.Index.PromptTokens)

	require.JSONEq(t, `{"policy":"gorgo:qs=2"}`, c.ask("PUT", c.admin+"/prefill/policy", `{"policy":"gorgo:qs=2"}`).body)
	r := c.ask("PUT", c.admin+"/prefill/policy", `{"policy":"best"}`)
	require.Equal(t, http.StatusBadRequest, r.status)
	code, _, _ := failure(t, r)
	require.Equal(t, "bad_policy", code)
	require.Contains(t, r.body, "there are round-robin")

	var scores []prefill.Scored
	body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}]}`, model)
	require.NoError(t, json.Unmarshal([]byte(c.ask("POST", c.admin+"/prefill/score", body).body), &scores))
	require.Len(t, scores, 12)
	for _, s := range scores {
		require.Equal(t, o.Candidates[0].ID, s.Candidate)
		require.True(t, s.Scores[0].Chosen)
	}
	unknown := c.ask("POST", c.admin+"/prefill/score", `{"model":"none","prompt":"x"}`)
	require.Equal(t, http.StatusNotFound, unknown.status)
	require.Contains(t, unknown.body, "model_not_found")
	require.JSONEq(t, `[]`, c.get("/prefill/hotspots").body)
	require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/prefill/index", "").status)
	require.Equal(t, http.StatusNotFound, c.ask("DELETE", c.admin+"/prefill/index?candidate=p9", "").status)
}

// A session is named by a header, which anybody may send, or in the body; the
// same name from another caller is another one.
func TestARequestNamesItsSession(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "a ek-a", "b ek-b")
	c := start(t, options{prefill: make([]refengine.Config, 3), configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.ExposeRoute, cfg.Prefill.Policy = file, true, "random"
		cfg.Prefill.Affinity.Enabled, cfg.Prefill.Affinity.LoadFactor = true, 100 // whatever the load
	}})
	for i, row := range []struct{ name, key, header, more string }{
		{"by header", "ek-a", "s", `"user":"u",`},
		{"of another caller", "ek-b", "s", ""},
		{"by prompt_cache_key", "ek-a", "", `"prompt_cache_key":"k","user":"u",`},
		{"by user", "ek-a", "", `"user":"u",`},
	} {
		engines := map[string]bool{}
		for range 6 {
			r := c.post("/v1/completions", fmt.Sprintf(`{"model":%q,%s"max_tokens":1,"prompt":"hi"}`, model, row.more), "Authorization", "Bearer "+row.key, "X-Evenkeel-Session", row.header)
			require.Equal(t, http.StatusOK, r.status, r.body)
			engines[r.header.Get("X-Evenkeel-Prefill")] = true
		}
		require.Len(t, engines, 1, row.name)
		require.EqualValues(t, i+1, c.metric(`evenkeel_affinity_total{outcome="new"}`), row.name)
		require.EqualValues(t, 5*(i+1), c.metric(`evenkeel_affinity_total{outcome="kept"}`), row.name)
	}
	ends := func(value string) int {
		body := fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":"hi"}`, model)
		return c.post("/v1/completions", body, "Authorization", "Bearer ek-a", "X-Evenkeel-Session", "s", "X-Evenkeel-Session-End", value).status
	}
	require.Equal(t, http.StatusOK, ends("true"))
	require.Equal(t, http.StatusOK, ends("false"))
	require.EqualValues(t, 5, c.metric(`evenkeel_affinity_total{outcome="new"}`), "the session that had ended began anew")
	require.Equal(t, http.StatusBadRequest, ends("soon"))
}

func TestAnswersSayWhichWayTheyCame(t *testing.T) {
	t.Parallel()
	body := fmt.Sprintf(`{"model":%q,"max_tokens":4,"messages":[{"role":"user","content":%q}]}`, model, strings.Repeat("the same long story ", 200))
	c := start(t, options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }})
	first := c.post(chatPath, body)
	require.Equal(t, http.StatusOK, first.status)
	require.Equal(t, "0", first.header.Get("X-Evenkeel-Hit-Tokens"))
	second := c.post(chatPath, body)
	require.NotEqual(t, "0", second.header.Get("X-Evenkeel-Hit-Tokens"))
	require.Equal(t, "1", second.header.Get("X-Evenkeel-Attempts"))
	require.Equal(t, "lmetric", second.header.Get("X-Evenkeel-Policy"), "finish knows no times yet")
	require.Equal(t, "disaggregated", second.header.Get("X-Evenkeel-Route"))
	require.NotEmpty(t, second.header.Get("X-Evenkeel-Prefill"))
	require.Equal(t, "model_not_found", c.post(chatPath, strings.Replace(body, model, "none", 1)).header.Get("X-Evenkeel-Reason"))

	hidden := start(t, options{})
	for name := range hidden.post(chatPath, body).header {
		require.NotContains(t, strings.ToLower(name), "evenkeel")
	}
}

func TestATrustedCallerChoosesThePrefillPolicy(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c := start(t, options{configure: func(cfg *config.Config) { cfg.KeysFile, cfg.ExposeRoute = file, true }})
	body := fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`, model)
	ask := func(key, policy string) reply {
		return c.post(chatPath, body, "Authorization", "Bearer "+key, "X-Evenkeel-Policy", policy)
	}
	require.Equal(t, "gorgo", ask("ek-ops", "gorgo:qs=2").header.Get("X-Evenkeel-Policy"))
	require.Equal(t, "lmetric", ask("ek-team", "gorgo").header.Get("X-Evenkeel-Policy"), "not trusted: without effect")
	r := ask("ek-ops", "best")
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Equal(t, "bad_policy", r.header.Get("X-Evenkeel-Reason"))
}

func TestATrustedCallerChoosesTheEngines(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c := start(t, options{
		prefill:   []refengine.Config{{}, {}},
		configure: func(cfg *config.Config) { cfg.KeysFile, cfg.ExposeRoute = file, true },
	})
	body := fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`, model)
	ask := func(key, header, value string) reply {
		return c.post(chatPath, body, "Authorization", "Bearer "+key, header, value)
	}
	for _, s := range c.candidates() {
		for range 3 {
			r := ask("ek-ops", "X-Evenkeel-Target-Prefill", s.ID)
			require.Equal(t, s.ID, r.header.Get("X-Evenkeel-Prefill"), r.body)
		}
	}
	for _, w := range c.gw.Status(t.Context()).Dispatch.Models[0].Workers {
		before := c.finished(w.Name)
		for range 3 {
			require.Equal(t, http.StatusOK, ask("ek-ops", "X-Evenkeel-Target-Decode", w.Name).status)
		}
		require.EqualValues(t, before+3, c.finished(w.Name))
	}
	for _, header := range []string{"X-Evenkeel-Target-Prefill", "X-Evenkeel-Target-Decode"} {
		r := ask("ek-ops", header, "p9/0")
		require.Equal(t, http.StatusBadRequest, r.status)
		require.Equal(t, "bad_target", r.header.Get("X-Evenkeel-Reason"))
		require.Equal(t, http.StatusOK, ask("ek-team", header, "p9/0").status, "not trusted: without effect")
	}
}

// finished counts the answers of a decode rank, by the request log.
func (c *cluster) finished(rank string) (n int) {
	c.Helper()
	text, err := os.ReadFile(c.requestLog)
	require.NoError(c, err)
	return strings.Count(string(text), fmt.Sprintf("%q:%q", "rank", rank))
}
