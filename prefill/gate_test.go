package prefill

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The golden examples of G16, and the ways between them.
func TestGate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before bool // closed
		state  kvState
		closed bool
	}{
		{"G16: a full gauge of an engine that holds nothing of ours is frozen", false, kvState{scraped: .97, own: .10}, false},
		{"G16: a full gauge counts while something of ours is there", false, kvState{scraped: .97, live: 3, own: .40}, true},
		{"G16: our own accounts close it whatever the gauge says", false, kvState{scraped: .30, live: 9, own: .93}, true},
		{"G16: an engine that does not tell its gauge is gated by our accounts", false, kvState{scraped: math.NaN(), live: 3, own: .10}, false},
		{"the threshold itself closes", false, kvState{scraped: math.NaN(), live: 1, own: .90}, true},
		{"just below the threshold stays open", false, kvState{scraped: .89, live: 1, own: .89}, false},
		{"just below the threshold stays closed", true, kvState{scraped: .89, live: 1, own: .10}, true},
		{"0.02 below the threshold opens", true, kvState{scraped: .8799, live: 1, own: .8799}, false},
		{"a gauge that reports nothing says nothing", true, kvState{scraped: math.NaN(), live: 1, own: .10}, false},
		{"a frozen gauge does not keep it closed", true, kvState{scraped: .97, own: .10}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := gate{closed: tt.before}
			g.update(tt.state, 0.90, time.Unix(0, 0))
			require.Equal(t, tt.closed, g.closed, "gate.update(%+v) from closed=%v", tt.state, tt.before)
		})
	}
}

// G17: own 0.93, all orphans, nothing live for 6 s.
func TestOneCanaryPassesEveryFiveSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := newTier(t, up("p0/0"))
		hold(t, tier, "p0/0", orphaned, 93_000)
		mustWait(t, tier, request(0))

		time.Sleep(6 * time.Second)
		canary := acquire(t, tier, request(1))
		time.Sleep(time.Second)
		mustWait(t, tier, request(2))

		canary.Release()
		time.Sleep(canaryEvery - 1)
		mustWait(t, tier, request(3)) // idle again only since the canary ended
		time.Sleep(time.Nanosecond)
		acquire(t, tier, request(4)).Release()
	})
}

func TestAWaitingRequestBecomesTheCanary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := newTier(t, up("p0/0"))
		hold(t, tier, "p0/0", orphaned, 93_000)
		start := time.Now()
		lease, err := tier.Acquire(t.Context(), Request{ID: "r", Model: testModel, PromptTokens: 10})
		require.NoError(t, err)
		require.Equal(t, canaryEvery, time.Since(start))
		require.Equal(t, canaryEvery, lease.Wait)
		require.True(t, lease.canary)
	})
}

func TestNoCanaryWhileSomethingIsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := newTier(t, up("p0/0"))
		hold(t, tier, "p0/0", orphaned, 90_000)
		hold(t, tier, "p0/0", pooled, 3_000)
		time.Sleep(time.Minute)
		mustWait(t, tier, request(1))
	})
}

func TestKVIsHeldUntilTheFirstDecodeEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := newTier(t, up("p0/0"))
		lease := acquire(t, tier, Request{PromptTokens: 90_000})
		mustWait(t, tier, request(1))
		lease.Answered(Usage{}, time.Now().Add(time.Hour))
		mustWait(t, tier, request(2))
		lease.Dispatched()
		mustWait(t, tier, request(3))
		lease.Release()
		acquire(t, tier, request(4)).Release()
		requireIdle(t, tier)
	})
}

func TestAnOrphanIsHeldUntilTheEnginesTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := newTier(t, up("p0/0"))
		lease := acquire(t, tier, Request{PromptTokens: 90_000})
		lease.Answered(Usage{}, time.Now().Add(3*time.Second)) // before a canary could pass
		lease.Orphan()
		start := time.Now()
		next, err := tier.Acquire(t.Context(), Request{ID: "r", Model: testModel, PromptTokens: 10})
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, time.Since(start), "served when the orphan expired")
		require.False(t, next.canary)
		next.Release()
		requireIdle(t, tier)
	})
}

func TestTheEnginesCountReplacesTheEstimate(t *testing.T) {
	tier := newTier(t, up("p0/0"))
	lease := acquire(t, tier, Request{PromptTokens: 10})
	lease.Answered(Usage{PromptTokens: 95_000}, time.Time{})
	require.EqualValues(t, 95_000, tier.Status()[0].KVTokens)
	mustWait(t, tier, request(1))
	lease.Release()
	requireIdle(t, tier)
}
