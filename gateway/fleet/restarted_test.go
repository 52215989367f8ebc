package fleet_test

import (
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
		name    string
		scrape  time.Duration
		health  time.Duration
		noticed func(b *bed)
		again   int // how many prompts are prefilled again
	}{
		{"another start time in its metrics", 50 * time.Millisecond, long, func(b *bed) {
			require.NoError(b, b.Prefill[0].Revive())
		}, 1},
		{"another engine id in a hand-off", 0, long, func(b *bed) {
			require.NoError(b, b.Prefill[0].Revive())
			b.Send(chat("a prompt after the restart", `"stream":true,"max_tokens":2,`))
			b.Eventually("it was prefilled", func() bool { return b.Metric("evenkeel_pool_entries") == 2 })
		}, 2}, // the hand-off that tells of it, too
		{"a connection that is refused", 0, 20 * time.Millisecond, func(b *bed) {
			b.Eventually("it is down", func() bool { return !b.ready() })
			require.NoError(b, b.Prefill[0].Revive())
			b.Eventually("it is up", func() bool { return b.ready() })
		}, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, options{
				dirty: true, decode: []refengine.Config{{Slots: 1}},
				configure: func(cfg *config.Config) {
					cfg.Prefill.Scrape.Interval, cfg.Health.Interval = row.scrape, row.health
				},
			})
			leave := b.Endless()
			got := b.Judging("a prompt that waits", `"stream":true,`)
			b.Eventually("it waits in the pool", func() bool { return b.Metric("evenkeel_pool_entries") == 1 })
			b.Prefill[0].Kill()
			row.noticed(b)
			another := b.logs.FilterMessageSnippet("restarted; prompts whose KV")
			b.Eventually("the restart is seen", func() bool {
				another = b.logs.FilterMessageSnippet("restarted; prompts whose KV")
				return another.Len() > 0
			})
			leave()
			require.Equal(t, "right", <-got)
			b.settled(true)
			require.Zero(t, b.Decode[0].Stats().Unknown, "no decode engine was sent for KV that is gone")
			require.Zero(t, b.Prefill[0].Stats().Unknown)
			require.Equal(t, 1, b.logs.FilterMessageSnippet("restarted; prompts whose KV").Len(),
				"signs of one restart are one restart")
			require.Equal(t, row.again, b.logs.FilterMessageSnippet("tried again").Len(), "what was prefilled after the restart is used")
		})
	}
}
