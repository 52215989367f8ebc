package gateway_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// NIXL keeps a hand-off for a short lease only, which a decode engine renews for what
// is in its own queue. All slots are taken for much longer than the lease, and yet
// everybody is answered.
func TestWaitsLongerThanALeaseAreAnswered(t *testing.T) {
	t.Parallel()
	// A hand-off that has been bound at its deadline has a quarter of a second to be sent, the longest that there is. Decode
	// engines that nobody hears for hold/2-margin are taken for silent, so this is longer than a busy machine stands still.
	const hold, margin = 16 * time.Second, 4 * time.Second
	for _, stream := range []string{`"stream":true,`, ""} {
		t.Run(stream, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{
				dirty:     true, // a machine that stands still at a deadline loses a hand-off, not an answer
				prefill:   []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: hold}},
				decode:    []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: hold, Slots: 1}, {Connector: refengine.NIXLPull, KVHoldTimeout: hold, Slots: 1}},
				profile:   mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: hold, HoldMargin: margin, FirstEventTimeout: 2 * time.Second},
				configure: func(cfg *config.Config) { cfg.Dispatch.Beyond, cfg.Prefill.Retry.Attempts = 3, 10 },
			})
			c.allUp()
			leaves := []func(){c.endless(), c.endless()}
			const waiting = 5
			got := make(chan string, waiting)
			for i := range waiting {
				go func() { got <- c.judge(fmt.Sprint("prompt ", i), stream) }()
			}
			c.eventually("hand-offs are in the engines' queues", func() bool {
				return c.metric("evenkeel_beyond_slots_total") > 0 && c.sum("evenkeel_rank_beyond_slots") > 0
			})
			time.Sleep(hold + 3*time.Second) // beyond the lease and first_event_timeout: that is what is tested
			for _, leave := range leaves {
				leave()
			}
			for range waiting {
				require.Equal(t, "right", <-got)
			}
			renewals := int64(0)
			for _, p := range c.prefill {
				renewals += p.Stats().Renewals
			}
			require.Positive(t, renewals)
			c.eventually("nobody is there any more", func() bool { return c.sum("evenkeel_rank_beyond_slots") == 0 })
		})
	}
}

// A request that has its slot must begin, however long it has waited for it.
func TestFirstEventTimeoutCountsFromTheSlot(t *testing.T) {
	t.Parallel()
	// It waits in the pool for a second. Then it has a quarter of a second, the longest that there is,
	// to be sent; on a machine that takes longer it is prefilled again, and no engine has seen it.
	const hold, margin = 10 * time.Second, 9 * time.Second
	c := start(t, options{
		dirty:     true,
		prefill:   []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: hold}},
		decode:    []refengine.Config{{Connector: refengine.NIXLPull, KVHoldTimeout: hold, Slots: 1}},
		profile:   mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: hold, HoldMargin: margin, FirstEventTimeout: time.Second},
		configure: func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 10 },
	})
	leave := c.endless()
	before := c.decodes()
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders, Leg: refengine.LegDecode}))
	got := c.judging("a prompt", `"stream":true,`)
	c.eventually("it is in the engine's queue", func() bool { return c.sum("evenkeel_rank_beyond_slots") == 1 })
	time.Sleep(2 * time.Second) // beyond first_event_timeout
	select {
	case r := <-got:
		require.Fail(t, "it ended before it had a slot", r)
	default:
	}
	require.Equal(t, before+1, c.decodes(), "it was sent once")
	leave()
	require.Equal(t, "504", <-got)
}
