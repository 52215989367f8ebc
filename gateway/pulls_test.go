package gateway_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// What a decode engine computes of prompts whose KV was handed over is counted,
// and neither what it pulls nor what it is to compute itself is.
func TestPullsThatFellShortAreCounted(t *testing.T) {
	t.Parallel()
	o := conditional(func(cfg *config.Config) { cfg.Health.Interval = 50 * time.Millisecond })
	o.dirty = true // a prompt that was lost is computed by the decode engine, as the last step wants it
	var scraped atomic.Int64
	o.decode[0].OnRequest = func(path string, _ http.Header) {
		if path == "/metrics" {
			scraped.Add(1)
		}
	}
	c := start(t, o)
	const short = "evenkeel_engine_short_pulled_tokens_total"
	long := strings.Repeat("a prompt of many words goes here ", 100)
	ask := func(n int, as string) {
		t.Helper()
		for range n {
			r := c.post(chatPath, chat(as+long, `"max_tokens":2,`))
			require.Equal(t, http.StatusOK, r.status, r.body)
		}
	}
	scrapes := func() {
		t.Helper()
		before := scraped.Load()
		c.eventually("some scrapes, of which any may be the one that counts wrongly", func() bool { return scraped.Load() > before+6 })
	}
	scrapes()
	ask(3, "handed over ")
	ask(3, "handed over ") // the decode rank has it by now, and may compute the rest
	c.post(chatPath, chat("short", `"max_tokens":2,`))
	scrapes()
	require.Contains(t, c.get("/metrics").body, short)
	require.Zero(t, c.sum(short))
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.LostKV, Leg: refengine.LegDecode}))
	ask(1, "lost on the way ")
	c.eventually("it is counted", func() bool { return c.sum(short) > 100 })
}
