package gateway_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A decode engine stands still again and again, while callers ask for the same few prompts. Requests are under way under one
// cache_salt then while others have the next one. No answer is made of wrong KV, neither theirs nor a later one.
func TestTheSamePromptsOverChangesOfTheSalt(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	e := refengine.Config{Connector: refengine.NIXLPull, KVHoldTimeout: lease, PrefixCache: 1000}
	c := start(t, options{
		dirty: true, late: true, prefill: []refengine.Config{e}, decode: []refengine.Config{e},
		profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: lease},
		configure: func(cfg *config.Config) {
			for name, p := range cfg.Profiles {
				p.FirstEventTimeout = 4 * lease
				cfg.Profiles[name] = p
			}
		},
	})
	const callers, prompts = 12, 3
	over, done := make(chan struct{}), make(chan map[string]int, callers)
	for i := range callers {
		go func() {
			got := map[string]int{}
			for n := 0; ; n++ {
				select {
				case <-over:
					done <- got
					return
				default:
					got[c.judge(fmt.Sprintf("prompt %d", (i+n)%prompts), streamed)]++
				}
			}
		}()
	}
	for range 2 {
		c.decode[0].StandStill(2 * lease)
		time.Sleep(5 * lease / 2)
	}
	close(over)
	for range callers {
		for verdict, n := range <-done {
			require.Contains(t, []string{"right", "500", "502", "503", "504"}, verdict, "%d of them", n)
		}
	}
	require.NotZero(t, c.metric("evenkeel_late_pulls_total"), "some KV was not certainly kept until it was read")
	for i := range 2 * prompts {
		require.Equal(t, "right", c.judge(fmt.Sprintf("prompt %d", i%prompts), streamed), "prompt %d", i%prompts)
	}
	require.Zero(t, c.decode[0].Stats().BadHits)
}
