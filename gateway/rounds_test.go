package gateway_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

// Whom the default policy holds for a round on ranks that prefill and decode: nobody who asks alone, but many who ask together, and
// nobody with patience 0. The log says for how long; on a machine with two idle cores 0.1 to 0.6 ms beside two answers, and 13 to 15 ms
// among 24 users.
func TestWhoIsHeldForARound(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		mixed: []refengine.Config{{DPSize: 4, Slots: 8, C0: 5e6, PrefillPerToken: 50e3, PrefillShared: 100e3, MaxBatchedTokens: 512}},
		configure: func(cfg *config.Config) {
			cfg.Dispatch.Policy = "evenkeel"
			cfg.Dispatch.TickLimit = time.Minute // on a busy machine no other policy stands in
		},
	})
	asks := func(client, n int) {
		for i := range n {
			prompt := reftext.MakePrompt(uint64(1000*client+i), 200+100*(client*7+i*3)%1200)
			r := c.post(chatPath, talk(`"stream":true,"max_tokens":24,`, prompt))
			require.Equal(t, http.StatusOK, r.status, r.body)
		}
	}
	held := func(name string, load func()) (mean float64) {
		sum, n := c.metric("evenkeel_round_hold_seconds_sum"), c.metric("evenkeel_round_hold_seconds_count")
		load()
		placed := c.metric("evenkeel_round_hold_seconds_count") - n
		require.Positive(t, placed)
		mean = (c.metric("evenkeel_round_hold_seconds_sum") - sum) / placed
		t.Logf("%s: %.0f requests were held for %.2f ms in the mean", name, placed, 1000*mean)
		return mean
	}

	alone := held("one at a time", func() { asks(1, 12) })
	require.Zero(t, alone)
	held("one at a time, beside two answers", func() {
		for range 2 {
			defer c.endless()()
		}
		asks(2, 12)
	})
	many := held("24 users", func() {
		var all sync.WaitGroup
		for i := range 24 {
			all.Go(func() { asks(3+i, 6) })
		}
		all.Wait()
	})
	require.Positive(t, many)
	require.Equal(t, http.StatusOK, c.ask(http.MethodPut, c.admin+"/policy", `{"policy":"evenkeel:patience=0"}`).status)
	require.Zero(t, held("with patience 0", func() {
		var all sync.WaitGroup
		for i := range 24 {
			all.Go(func() { asks(30+i, 2) })
		}
		all.Wait()
	}))
	c.settled(false)
}
