package gateway_test

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const latePulls = "evenkeel_late_pulls_total"

// longLease is the hold of tests that lose nothing: a loaded machine stops their process for a second or two, and signs of
// life are believed for three eighths of the hold.
const longLease = 8 * time.Second

// frozen is a core that stands still until its faults are cleared.
var frozen = standsStill(time.Hour)

// standsStill is a fault of an engine whose core stands still for so long, while its API server answers.
func standsStill(d time.Duration) refengine.Rule {
	return refengine.Rule{Fault: refengine.Standstill, DelayMS: int(d.Milliseconds())}
}

// leased is a cluster of engines whose holds are leases that decode engines renew. canary: how long one may take; 0: none is sent.
func leased(t *testing.T, connector refengine.Connector, decodes int, canary time.Duration, p mooncake.Profile) *cluster {
	p.Connector, p.KVHoldTimeout = string(connector), longLease
	o := options{
		dirty: true, late: true, profile: p,
		prefill:   []refengine.Config{{Connector: connector, KVHoldTimeout: longLease}},
		configure: func(cfg *config.Config) { cfg.Health.Interval, cfg.Health.Canary = 100*time.Millisecond, canary },
	}
	for range decodes {
		o.decode = append(o.decode, refengine.Config{Connector: connector, KVHoldTimeout: longLease, PrefixCache: 1000})
	}
	return start(t, o)
}

// A decode engine whose core stands still for longer than the lease renews no hold, and decodes another prompt's KV when it
// goes on. Requests that were sent to it go to another engine in time, and it gets nothing new meanwhile.
func TestAnEngineThatStandsStillForLongerThanTheLease(t *testing.T) {
	t.Parallel()
	c := leased(t, refengine.NIXLPull, 2, config.Default().Health.Canary, mooncake.Profile{})
	require.NoError(t, c.decode[0].SetFaults(frozen))
	require.Equal(t, map[string]int{"right": 8}, c.judgeAll(8, streamed))
	require.NotZero(t, c.metric(latePulls), "some were sent to the engine that stood still")
	sent := c.decode[0].Stats().Decodes
	require.Equal(t, map[string]int{"right": 8}, c.judgeAll(8, streamed))
	require.Equal(t, sent, c.decode[0].Stats().Decodes, "it gets nothing new while it is silent")
	require.NoError(t, c.decode[0].SetFaults())
	c.eventually("it gets requests again", func() bool {
		require.Equal(t, "right", c.judge("another prompt", streamed))
		return c.decode[0].Stats().Decodes > sent
	})
	require.Zero(t, c.prefill[0].Stats().ExpiredPulls, "nothing pulled what was given away")
}

// An answer in one piece has no first event that could come in time. If the engine stood still, it is thrown away when it
// comes. The engine has cached the wrong KV by then, and no later request may find it there.
func TestWhatAnEngineCachedAfterItStoodStillIsNotFoundAgain(t *testing.T) {
	t.Parallel()
	c := leased(t, refengine.NIXLPull, 1, 0, mooncake.Profile{NonStream: mooncake.NonStreamPassthrough})
	require.NoError(t, c.decode[0].SetFaults(standsStill(2*longLease)))
	prompt := strings.Repeat("a prompt whose blocks the decode engine caches ", 40)
	require.Equal(t, "right", c.judge(prompt, ""))
	require.NotZero(t, c.prefill[0].Stats().ExpiredPulls, "the engine has decoded another prompt's KV")
	require.NotZero(t, c.metric(latePulls))
	for range 3 {
		require.Equal(t, "right", c.judge(prompt, streamed))
	}
	require.Zero(t, c.decode[0].Stats().BadHits)
}

// queuedBehindAStream is a request in the queue of a decode engine that makes steps for another stream until leave is called.
// The verdict on its answer comes from got.
func queuedBehindAStream(t *testing.T, noRenewals bool) (c *cluster, leave func(), got <-chan string) {
	const step = 20 * time.Millisecond // quicker events would pile up in the socket while the machine is loaded, and be no signs of life
	c = start(t, options{
		profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: longLease},
		prefill: []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: longLease}},
		decode:  []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: longLease, NoRenewals: noRenewals, Slots: 1, C0: step}},
		dirty:   true, late: noRenewals,
		configure: func(cfg *config.Config) {
			cfg.Engines.Decode[0].Slots = 4 // more than it runs, so the others wait in its queue
		},
	})
	leave = c.endless()
	got = c.judging("one two three", streamed)
	c.eventually("it waits in the engine's queue", func() bool { return c.decode[0].Stats().Waiting == 1 })
	return c, leave, got
}

// A decode engine that makes steps renews the hold of requests in its queue. Such an answer is believed however late it begins.
func TestAnEngineThatIsOnlyFullIsBelieved(t *testing.T) {
	t.Parallel()
	c, leave, got := queuedBehindAStream(t, false)
	c.eventually("its lease is long over and renewed", func() bool { return c.prefill[0].Stats().Renewals >= 10 }) // six in a lease
	leave()
	require.Equal(t, "right", <-got)
	require.Zero(t, c.metric(latePulls))
	require.EqualValues(t, 2, c.prefill[0].Stats().Requests, "it was prefilled once")
}

// An engine older than the leases renews nothing although its core makes steps. The prefill engine counts the hand-offs that
// it has given away, and is asked before an answer is believed that can be right only because of renewals.
func TestThePrefillEngineIsAskedWhatItGaveAway(t *testing.T) {
	t.Parallel()
	c, leave, got := queuedBehindAStream(t, true)
	c.eventually("the prefill engine has given its KV away", func() bool { return c.prefill[0].Stats().Leaks == 1 })
	leave()
	require.Equal(t, "right", <-got)
	require.EqualValues(t, 1, c.metric(latePulls))
}

// A prefill engine that pushes frees the blocks at its lease though it is still writing them, because the decode engine
// stands still. The decode engine does not renew the lease of a request that was bound before the prefill.
func TestAPushIntoAnEngineThatStandsStill(t *testing.T) {
	t.Parallel()
	c := leased(t, refengine.NIXLPush, 1, 0, mooncake.Profile{Bind: mooncake.BindArrival})
	require.Equal(t, "right", c.judge("where the prefill engine is reached is learned with this", streamed))
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 3000, Count: 1}))
	got := c.judging("one two three", streamed)
	c.eventually("the decode engine has blocks for it", func() bool { return c.decode[0].Stats().KVUsed > 0 })
	require.NoError(t, c.decode[0].SetFaults(standsStill(2*longLease)))
	require.Equal(t, "right", <-got)
	require.NotZero(t, c.metric(latePulls))
	require.Equal(t, "right", c.judge("one two three", streamed))
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
