package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/receipt"
)

// decisions asks for receipts.
func (c *cluster) decisions(query string) []receipt.Receipt {
	c.Helper()
	r := c.get("/decisions" + query)
	require.Equal(c, http.StatusOK, r.status, r.body)
	var got struct {
		Receipts []receipt.Receipt `json:"receipts"`
	}
	require.NoError(c, json.Unmarshal([]byte(r.body), &got))
	return got.Receipts
}

// receipt waits until a request has ended and returns what was kept of it.
func (c *cluster) receipt(id string) receipt.Receipt {
	c.Helper()
	var r receipt.Receipt
	c.eventually("the receipt of "+id+" is closed", func() bool {
		if c.get("/decisions?id="+id).status != http.StatusOK {
			return false
		}
		r = c.decisions("?id=" + id)[0]
		return r.State == receipt.Ended
	})
	return r
}

func TestAReceiptSaysWhereARequestWentAndWhy(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{{PromptTokensDetails: true, PrefixCache: 64}, {PromptTokensDetails: true, PrefixCache: 64}}})
	c.allUp()
	r := c.post(chatPath, chat("what became of this", `"stream":true,"max_tokens":5,`), "X-Request-Id", "mine-1")
	require.Equal(t, http.StatusOK, r.status)
	require.Equal(t, "mine-1", r.header.Get("X-Request-Id"))
	got := c.receipt("mine-1")
	require.Equal(t, "mine-1", got.ClientID)
	require.Equal(t, "ok", got.Outcome)
	require.Equal(t, "disaggregated", got.Route)
	require.Equal(t, chatPath, got.Endpoint)
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
	require.Len(t, c.decisions("?model="+model), 1)
	require.Empty(t, c.decisions("?model=other"))
	require.NotContains(t, c.get("/decisions").body, "what became", "no word of the prompt")
	require.Equal(t, http.StatusNotFound, c.get("/decisions?id=nobody").status)
	require.Equal(t, http.StatusBadRequest, c.get("/decisions?n=0").status)
}

// Two clients may send the same X-Request-Id, and one the id of another's
// request: who asks for a request gets that one first, and sees the others.
func TestTheReceiptOfOneClientIsNotTakenForAnothers(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	c.allUp()
	ask := func(id string) {
		require.Equal(t, http.StatusOK, c.post(chatPath, chat("hello", `"max_tokens":1,`), "X-Request-Id", id).status)
	}
	ask("same")
	first := c.receipt("same")
	ask("same")
	c.eventually("both are there", func() bool { return len(c.decisions("?id=same")) == 2 })
	ask(first.ID)
	c.eventually("the third is there", func() bool { return len(c.decisions("?id="+first.ID)) == 2 })
	require.Equal(t, first, c.decisions("?id=" + first.ID)[0])
	require.Equal(t, []receipt.Receipt{first}, c.decisions("?n=1&id="+first.ID))
}

func TestAReceiptIsThereWhileTheRequestRuns(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	leave := c.endless("X-Request-Id", "long")
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
}

func TestAReceiptHasEveryAttempt(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{{}, {}}, configure: turns})
	c.allUp()
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
	var got receipt.Receipt
	c.eventually("a request meets the busy engine first", func() bool {
		r := c.post(chatPath, chat("again", `"max_tokens":2,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		got = c.receipt(r.header.Get("X-Request-Id"))
		return len(got.Attempts) > 1
	})
	first, second := got.Attempts[0], got.Attempts[1]
	require.Equal(t, 503, first.Status)
	require.True(t, first.Again)
	require.Contains(t, first.Cause, "503")
	require.Nil(t, first.Decode)
	require.Equal(t, 2, second.N)
	require.NotEqual(t, first.Prefill.Candidate, second.Prefill.Candidate)
	require.False(t, second.Again)
	require.NotNil(t, second.Decode)
	require.Equal(t, "ok", got.Outcome)
	require.GreaterOrEqual(t, second.At, first.At)
}

func TestARefusedRequestHasAReceipt(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	r := c.post(chatPath, strings.Replace(chat("x", ""), model, "nobody", 1))
	require.Equal(t, http.StatusNotFound, r.status)
	got := c.receipt(r.header.Get("X-Request-Id"))
	require.Equal(t, "model_not_found", got.Outcome)
	require.Equal(t, 404, got.Status)
	require.Equal(t, "nobody", got.Model)
	require.Empty(t, got.Attempts)
}

func TestTheLegsOfAFanOutAreAttemptsOfOneReceipt(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	r := c.post(chatPath, chat("two of them", `"n":2,"max_tokens":3,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := c.receipt(r.header.Get("X-Request-Id"))
	require.Len(t, got.Attempts, 2)
	legs := map[string]bool{}
	for _, a := range got.Attempts {
		legs[a.Leg] = true
		require.NotNil(t, a.Prefill)
		require.NotNil(t, a.Decode)
	}
	require.Equal(t, map[string]bool{"aa": true, "ab": true}, legs)
	require.Equal(t, 6, got.OutputTokens)
}

func TestReceiptsCanBeTurnedOff(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Admin.Receipts = 0 }})
	require.Equal(t, http.StatusOK, c.post(chatPath, chat("x", "")).status)
	require.Equal(t, http.StatusNotFound, c.get("/decisions").status)
}

func TestAReceiptOfAForwardNamesThePeer(t *testing.T) {
	t.Parallel()
	us, eu := pair(t, options{configure: remote}, options{})
	r := us.post(chatPath, chat("far away", `"max_tokens":3,`), "X-Request-Id", "far")
	require.Equal(t, "forwarded", r.header.Get("X-Evenkeel-Route"), r.body)
	here := us.receipt("far")
	require.Equal(t, "eu-1", here.Peer)
	require.Len(t, here.Attempts, 1)
	require.Equal(t, "eu-1", here.Attempts[0].Peer)
	require.Positive(t, here.Attempts[0].Waits.Transfer)
	there := eu.receipt(here.ID)
	require.Equal(t, "us-1", there.Origin)
	require.NotNil(t, there.Attempts[0].Decode, fmt.Sprintf("%+v", there))
}
