package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

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
