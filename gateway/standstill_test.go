package gateway_test

import (
	"fmt"
	"net/url"
	"strconv"
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

// Either engine of a pair stands still for longer than each time that it or the other one promises. No answer is wrong, and
// all goes on afterwards. The table of docs/failures.md says what ends each wait.
func TestEitherEngineStandsStillForLongerThanItPromises(t *testing.T) {
	t.Parallel()
	const promise = 3 * time.Second // a machine that pauses the test for less breaks none
	for _, row := range []struct {
		name      string
		connector refengine.Connector
		bind      string
	}{
		{"ascend-mooncake-v1", refengine.AscendMooncake, ""},
		{"vllm-mooncake", refengine.VLLMMooncake, ""},
		{"nixl-pull", refengine.NIXLPull, ""},
		{"nixl-push", refengine.NIXLPush, ""},
		{"nixl-push, bound at arrival", refengine.NIXLPush, mooncake.BindArrival},
		{"ascend-layerwise", refengine.AscendLayerwise, mooncake.BindArrival},
		{"sglang", refengine.SGLang, mooncake.BindArrival},
	} {
		for _, side := range []string{"prefill", "decode"} {
			t.Run(row.name+", the "+side+" engine", func(t *testing.T) {
				t.Parallel()
				engines := refengine.Config{KVHoldTimeout: promise, BootstrapTimeout: promise, WaitingTimeout: promise, PrefixCache: 1000}
				o := options{
					prefill: []refengine.Config{engines}, decode: []refengine.Config{engines}, dirty: true, late: true,
					configure: func(cfg *config.Config) {
						cfg.Limits.ProbeTimeout, cfg.Bind.CallbackTimeout, cfg.Bind.Grace = 2*promise, promise, promise/2
						for name, p := range cfg.Profiles {
							p.FirstEventTimeout = 2 * promise
							if row.bind == "" || row.connector == refengine.NIXLPush {
								p.KVHoldTimeout = promise
							}
							if row.connector == refengine.VLLMMooncake {
								u, err := url.Parse(cfg.Engines.Prefill[0].URL)
								require.NoError(t, err)
								p.BootstrapPort, err = strconv.Atoi(u.Port())
								require.NoError(t, err)
							}
							cfg.Profiles[name] = p
						}
					},
				}
				var c *cluster
				if row.bind != "" {
					c = early(t, row.connector, o)
				} else {
					o.prefill[0].Connector, o.decode[0].Connector = row.connector, row.connector
					o.profile = mooncake.Profile{Connector: string(row.connector), KVHoldTimeout: promise}
					c = start(t, o)
				}
				require.Equal(t, "right", c.judge("where the engines are reached is learned with this", streamed))
				stands := map[string]*refengine.Engine{"prefill": c.prefill[0], "decode": c.decode[0]}[side]
				require.NoError(t, stands.SetFaults(standsStill(4*promise)))
				for verdict, n := range c.judgeAll(6, streamed) {
					require.Contains(t, []string{"right", "500", "502", "503", "504"}, verdict, "%d of 6", n)
				}
				require.NoError(t, stands.SetFaults())
				c.eventually("it serves again", func() bool { return c.judge("prompt 0 of many", streamed) == "right" })
				for i := range 6 {
					require.Equal(t, "right", c.judge(fmt.Sprintf("prompt %d of many", i), streamed))
				}
				require.Zero(t, c.decode[0].Stats().BadHits)
			})
		}
	}
}
