package gateway_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
)

// What a drain pulls of a hand-off that was read before are blocks of somebody
// else. An engine that keeps them for the prompt would answer the next one wrongly,
// even one with a hand-off that is right.
func TestADrainLeavesNothingInAPrefixCache(t *testing.T) {
	t.Parallel()
	engine := refengine.Config{PrefixCache: 64}
	c := start(t, options{dirty: true, decode: []refengine.Config{engine, engine, engine}, configure: turns})
	c.allUp()
	spent := func() (n int64) {
		for _, p := range c.prefill {
			n += p.Stats().SpentDrains
		}
		return n
	}
	asked := 0
	for i := range 5 {
		prompt := reftext.MakePrompt(uint64(i), 300)
		require.NoError(t, c.decode[i%3].SetFaults(refengine.Rule{Fault: refengine.SilentEnd, Leg: refengine.LegDecode, Count: 1}))
		for struck := false; !struck; { // until the engine has its turn
			require.Equal(t, "right", c.judge(prompt, `"stream":true,`))
			asked++
			c.settledRequests(asked)
			struck = c.records()[asked-1].Attempts == 2
		}
		c.eventually("it is drained", func() bool { return spent() == int64(i+1) })
		for range 3 {
			require.Equal(t, "right", c.judge(prompt, `"stream":true,`))
			asked++
		}
	}
	require.EqualValues(t, 5, spent())
	for _, d := range c.decode {
		require.Zero(t, d.Stats().BadHits)
	}
}

// The pool's TTL is for clients. What they left is drained when a slot is free, as
// long as its prefiller holds it.
func TestADrainOutlivesTheClientsWait(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:    []refengine.Config{{Slots: 1, C0: 10 * time.Millisecond}},
		configure: func(cfg *config.Config) { cfg.Pool.TTL = 200 * time.Millisecond },
	})
	leave := c.endless()
	for i := range 3 {
		require.Equal(t, http.StatusServiceUnavailable, c.post(chatPath, chat(fmt.Sprint("prompt ", i), "")).status)
	}
	time.Sleep(300 * time.Millisecond) // longer than the TTL of what came last
	require.Zero(t, c.sum("evenkeel_drains_total"), "they wait on")
	leave()
	c.eventually("they are drained", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == 3 })
	require.Zero(t, c.prefill[0].Stats().Pins)
}
