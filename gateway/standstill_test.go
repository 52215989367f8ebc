package gateway_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// standsStill is a fault of an engine whose core stands still for so long, while its API server answers.
func standsStill(d time.Duration) refengine.Rule {
	return refengine.Rule{Fault: refengine.Standstill, DelayMS: int(d.Milliseconds())}
}

// A decode engine whose core stands still for longer than the lease renews no hold, and decodes another prompt's KV when it
// goes on. Requests that were sent to it go to another engine in time, and it gets nothing new meanwhile.
func TestAnEngineThatStandsStillForLongerThanTheLease(t *testing.T) {
	t.Parallel()
	// A loaded machine stops this process for a second or two, and signs of life are believed for three eighths of the hold.
	const lease = 8 * time.Second
	e := refengine.Config{Connector: refengine.NIXLPull, KVHoldTimeout: lease, PrefixCache: 1000}
	c := start(t, options{
		dirty: true, prefill: []refengine.Config{e}, decode: []refengine.Config{e, e}, profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: lease},
		configure: func(cfg *config.Config) {
			cfg.Health.Interval, cfg.Health.Canary = 100*time.Millisecond, config.Default().Health.Canary
		},
	})
	require.NoError(t, c.decode[0].SetFaults(standsStill(time.Hour)))
	require.Equal(t, map[string]int{"right": 8}, c.judgeAll(8, streamed))
	require.NotZero(t, c.metric("evenkeel_late_pulls_total"), "some were sent to the engine that stood still")
	sent := c.decode[0].Stats().Decodes
	require.Equal(t, map[string]int{"right": 8}, c.judgeAll(8, streamed))
	require.Equal(t, sent, c.decode[0].Stats().Decodes, "it gets nothing new while it is silent")
	require.NoError(t, c.decode[0].SetFaults())
	c.eventually("it gets requests again", func() bool {
		require.Equal(t, "right", c.judge("another prompt", streamed))
		return c.decode[0].Stats().Decodes > sent
	})
	c.settled(true) // nothing pulled what was given away
}
