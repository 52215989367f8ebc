package gateway_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// A prefill engine of the config that starts again at its address has none of
// the KV that was prefilled there, and whoever asks it for that KV may get
// another prompt's. Each sign of the restart is enough by itself.
func TestHandoffsFromBeforeARestartAreNotUsed(t *testing.T) {
	t.Parallel()
	long := time.Hour
	for _, row := range []struct {
		name     string
		scrape   time.Duration
		health   time.Duration
		noticed  func(c *cluster)
		restarts float64
	}{
		{"another start time in its metrics", 50 * time.Millisecond, long, func(c *cluster) {
			require.NoError(c, c.prefill[0].Revive())
		}, 1},
		{"another engine id in a hand-off", 0, long, func(c *cluster) {
			require.NoError(c, c.prefill[0].Revive())
			c.send(chat("a prompt after the restart", `"stream":true,"max_tokens":2,`))
			c.eventually("it was prefilled", func() bool { return c.metric("evenkeel_pool_entries") == 2 })
		}, 1},
		{"a connection that is refused", 0, 20 * time.Millisecond, func(c *cluster) {
			c.eventually("it is down", func() bool { return c.get("/readyz").status == http.StatusServiceUnavailable })
			require.NoError(c, c.prefill[0].Revive())
			c.eventually("it is up", func() bool { return c.get("/readyz").status == http.StatusOK })
		}, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{
				dirty: true, decode: []refengine.Config{{Slots: 1}},
				configure: func(cfg *config.Config) {
					cfg.Prefill.Scrape.Interval, cfg.Health.Interval = row.scrape, row.health
				},
			})
			leave := c.endless()
			got := c.judging("a prompt that waits", `"stream":true,`)
			c.eventually("it waits in the pool", func() bool { return c.metric("evenkeel_pool_entries") == 1 })
			c.prefill[0].Kill()
			row.noticed(c)
			another := c.logs.FilterMessageSnippet("restarted; prompts whose KV")
			c.eventually("the restart is seen", func() bool {
				another = c.logs.FilterMessageSnippet("restarted; prompts whose KV")
				return another.Len() > 0
			})
			leave()
			require.Equal(t, "right", <-got)
			c.settled(true)
			require.Zero(t, c.decode[0].Stats().Unknown, "no decode engine was sent for KV that is gone")
			require.Zero(t, c.prefill[0].Stats().Unknown)
			require.EqualValues(t, row.restarts, c.logs.FilterMessageSnippet("restarted; prompts whose KV").Len(), "signs of one restart are one restart")
			require.Equal(t, 1, c.logs.FilterMessageSnippet("tried again").Len(), "what was prefilled after the restart is used")
		})
	}
}
