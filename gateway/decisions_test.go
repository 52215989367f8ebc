package gateway_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/receipt"
)

// decisions asks for receipts.
func (c *cluster) decisions(query string) []receipt.Receipt {
	c.Helper()
	r := c.get("/decisions" + query)
	require.Equal(c, http.StatusOK, r.Status, r.Body)
	var got struct {
		Receipts []receipt.Receipt `json:"receipts"`
	}
	require.NoError(c, json.Unmarshal([]byte(r.Body), &got))
	return got.Receipts
}

// receipt waits until a request has ended and returns what was kept of it.
func (c *cluster) receipt(id string) receipt.Receipt {
	c.Helper()
	var r receipt.Receipt
	c.Eventually("the receipt of "+id+" is closed", func() bool {
		if c.get("/decisions?id="+id).Status != http.StatusOK {
			return false
		}
		r = c.decisions("?id=" + id)[0]
		return r.State == receipt.Ended
	})
	return r
}

func TestReceiptsOfRequests(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{{Answers: refengine.Answers{PromptTokensDetails: true},
		KV: refengine.KV{PrefixCache: 64}},
		{Answers: refengine.Answers{PromptTokensDetails: true}, KV: refengine.KV{PrefixCache: 64}}}})
	c.allUp()
	t.Run("one is there while its request runs", func(t *testing.T) {
		leave := c.Endless("X-Request-Id", "long")
		got := c.decisions("?id=long")[0]
		require.Equal(t, "streaming", got.State)
		require.Equal(t, "streaming", got.Attempts[0].State)
		require.NotNil(t, got.Attempts[0].Decode)
		require.Empty(t, got.Outcome)
		require.Len(t, c.decisions("?running=1"), 1)
		require.Empty(t, c.decisions(""), "it has not ended")
		leave()
		got = c.receipt("long")
		require.Equal(t, "client_closed", got.Outcome)
		require.Contains(t, got.Attempts[0].Cause, "streaming")
		require.Empty(t, c.decisions("?running=1"))
	})
	t.Run("it says where the request went and why", func(t *testing.T) {
		r := c.Post(refclient.ChatPath, chat("what became of this", `"stream":true,"max_tokens":5,`), "X-Request-Id", "mine-1")
		require.Equal(t, http.StatusOK, r.Status)
		require.Equal(t, "mine-1", r.Header.Get("X-Request-Id"))
		got := c.receipt("mine-1")
		require.Equal(t, "mine-1", got.ClientID)
		require.Equal(t, "ok", got.Outcome)
		require.Equal(t, "disaggregated", got.Route)
		require.Equal(t, refclient.ChatPath, got.Endpoint)
		require.True(t, got.Stream)
		require.Equal(t, 5, got.OutputTokens)
		require.Positive(t, got.PromptTokens)
		require.Positive(t, got.TTFT)
		require.GreaterOrEqual(t, got.Total, got.TTFT)
		w := got.Waits
		require.InDelta(t, got.Total, w.Parse+w.Queue+w.Prefill+w.Pool+w.Transfer+w.Relay, max(2, got.Total/5), "the phases are the whole of it")

		require.Len(t, got.Attempts, 1)
		a := got.Attempts[0]
		require.Equal(t, 1, a.N)
		p, d := a.Prefill, a.Decode
		require.NotNil(t, p)
		require.Equal(t, 2, p.Eligible)
		require.Len(t, p.Best, 2)
		require.True(t, p.Best[0].Chosen)
		require.Equal(t, p.Candidate, p.Best[0].Name)
		require.NotNil(t, p.Best[1].Score, "the other was compared")
		require.Equal(t, got.PromptTokens, p.Prompt)
		require.NotNil(t, d)
		require.Equal(t, "evenkeel", d.Policy)
		require.Equal(t, 2, d.Able)
		require.Equal(t, 1, d.Waiting)
		require.Len(t, d.Best, 2)
		require.True(t, d.Best[0].Chosen)
		require.Equal(t, d.Rank, d.Best[0].Name)
		require.Equal(t, "more", d.Better)
		require.InDelta(t, d.Score, *d.Best[0].Score, 1e-6)

		require.Equal(t, got, c.decisions("?id=" + got.ID)[0], "by our id, too")
		require.Len(t, c.decisions("?model="+model), 2)
		require.Empty(t, c.decisions("?model=other"))
		require.NotContains(t, c.get("/decisions").Body, "what became", "no word of the prompt")
		require.Equal(t, http.StatusNotFound, c.get("/decisions?id=nobody").Status)
		require.Equal(t, http.StatusBadRequest, c.get("/decisions?n=0").Status)
	})
}
