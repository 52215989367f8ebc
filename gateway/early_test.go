package gateway_test

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const streamed = `"stream":true,`

// early is a proxy in front of engines whose connector wants the decode rank before the prefill.
func early(t *testing.T, connector refengine.Connector, o options) *cluster {
	t.Helper()
	if o.prefill == nil {
		o.prefill = []refengine.Config{{}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2}}
	}
	for i := range o.prefill {
		o.prefill[i].Connector = connector
	}
	for i := range o.decode {
		o.decode[i].Connector = connector
	}
	configure := o.configure
	o.configure = func(cfg *config.Config) {
		u, err := url.Parse(cfg.Engines.Prefill[0].URL)
		require.NoError(t, err)
		p := cfg.Profiles[config.DefaultProfile]
		p.Connector = string(connector)
		if connector == refengine.NIXLPush {
			p.Bind = mooncake.BindArrival
		}
		if p.BootstrapPort, err = strconv.Atoi(u.Port()); connector != refengine.SGLang {
			p.BootstrapPort = 0
		}
		require.NoError(t, err)
		for i := range cfg.Engines.Prefill { // a reference engine's rooms are at its own port
			if connector == refengine.SGLang && i > 0 {
				name, q := fmt.Sprintf("p%d", i), p
				u, err := url.Parse(cfg.Engines.Prefill[i].URL)
				require.NoError(t, err)
				q.BootstrapPort, err = strconv.Atoi(u.Port())
				require.NoError(t, err)
				cfg.Profiles[name] = q
				cfg.Engines.Prefill[i].Profile = name
			}
		}
		cfg.Profiles[config.DefaultProfile] = p
		cfg.SelfTest = false
		if connector == refengine.AscendLayerwise {
			cfg.Bind.Listen = "127.0.0.1:0"
		}
		if configure != nil {
			configure(cfg)
		}
	}
	return start(t, o)
}

// judgeAll has so many requests at once judged, with texts of their own.
func (c *cluster) judgeAll(n int, more string) (verdicts map[string]int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	verdicts = map[string]int{}
	for i := range n {
		wg.Go(func() {
			v := c.judge(fmt.Sprintf("prompt %d of many", i), more)
			mu.Lock()
			defer mu.Unlock()
			verdicts[v]++
		})
	}
	wg.Wait()
	return verdicts
}

// A prefill engine that restarts is another one to decode engines.
func TestAPrefillEngineThatRestartsIsNamedAnew(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(string(connector), func(t *testing.T) {
			t.Parallel()
			c := early(t, connector, options{dirty: true})
			require.Equal(t, "right", c.judge("one two", `"stream":true,`))
			require.Equal(t, "right", c.judge("one two three", `"stream":true,`))
			c.prefill[0].Kill()
			require.NoError(t, c.prefill[0].Revive())
			c.eventually("it is served again", func() bool { return c.judge("four five six", `"stream":true,`) == "right" })
			require.Equal(t, "right", c.judge("seven eight", `"stream":true,`))
		})
	}
}

var earlyConnectors = []refengine.Connector{refengine.AscendLayerwise, refengine.SGLang, refengine.NIXLPush}

// As long as the address of a prefill engine that pushes is not known, its requests are bound after their prefill. Their KV
// has a lease then, like that of any hand-off: they wait for a slot in the decode engine's own queue, which renews it.
func TestAHandOffOfAPushHasALease(t *testing.T) {
	t.Parallel()
	const lease = 8 * time.Second
	c := early(t, refengine.NIXLPush, options{
		dirty:   true, // a machine that stands still at a deadline loses a hand-off, not an answer
		prefill: []refengine.Config{{KVHoldTimeout: lease}, {KVHoldTimeout: lease}}, decode: []refengine.Config{{Slots: 1, KVHoldTimeout: lease}},
		profile:   mooncake.Profile{KVHoldTimeout: lease},
		configure: func(cfg *config.Config) { cfg.Dispatch.Beyond, cfg.Prefill.Policy = 4, "round-robin" },
	})
	c.allUp()
	leave := c.endless() // tells where one of the prefill engines is reached
	got := c.judging(strings.Repeat("waits ", 300), streamed)
	c.eventually("it is in the decode engine's queue", func() bool { return c.sum("evenkeel_rank_beyond_slots") > 0 })
	time.Sleep(lease + time.Second) // beyond the lease: that is what is tested
	require.Positive(t, c.prefill[0].Stats().Renewals+c.prefill[1].Stats().Renewals)
	leave()
	require.Equal(t, "right", <-got)
	require.EqualValues(t, 2, c.prefill[0].Stats().Pulls+c.prefill[1].Stats().Pulls)
	require.Zero(t, c.sum("evenkeel_bind_orphan_tokens"))
}

// A prefill engine that broke off may have written: no other one goes on for the same decode leg, whose blocks may be
// lost.
func TestNoSecondPrefillForABrokenOne(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.AscendLayerwise, options{prefill: []refengine.Config{{}}, decode: []refengine.Config{{}, {}}, dirty: true})
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Count: 1}))
	require.Equal(t, "right", c.judge("one two three", streamed))
	decodes, lost := int64(0), 0.0
	for _, d := range c.decode {
		s := d.Stats()
		decodes += s.Decodes
		require.Zero(t, s.MixedPushes)
	}
	require.EqualValues(t, 2, decodes)
	c.eventually("the blocks are kept on the rank's account", func() bool { lost = c.sum("evenkeel_bind_orphan_tokens"); return lost > 0 })
	for _, d := range c.decode {
		d.Kill()
		require.NoError(t, d.Revive())
	}
	c.eventually("another process has its blocks back", func() bool { return c.sum("evenkeel_bind_orphan_tokens") == 0 })
}
