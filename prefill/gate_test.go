package prefill

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/ledger"
)

// Own 0.93, all orphans, nothing live for 6 s.
func TestOneCanaryPassesEveryFiveSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("p0/0"))
		hold(t, scheduler, "p0/0", orphaned, 93_000)
		mustWait(t, scheduler, request(0))

		time.Sleep(6 * time.Second)
		canary := acquire(t, scheduler, request(1))
		time.Sleep(time.Second)
		mustWait(t, scheduler, request(2))

		canary.Release()
		time.Sleep(ledger.CanaryEvery - 1)
		mustWait(t, scheduler, request(3)) // idle again only since the canary ended
		time.Sleep(time.Nanosecond)
		acquire(t, scheduler, request(4)).Release()
	})
}

func TestAWaitingRequestBecomesTheCanary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("p0/0"))
		hold(t, scheduler, "p0/0", orphaned, 93_000)
		start := time.Now()
		lease, err := scheduler.Acquire(t.Context(), Request{ID: "r", Model: testModel, PromptTokens: 10})
		require.NoError(t, err)
		require.Equal(t, ledger.CanaryEvery, time.Since(start))
		require.Equal(t, ledger.CanaryEvery, lease.Wait)
		require.True(t, lease.canary)
	})
}

// An engine that answers prompts while its metrics do not come is full only for as long as
// it could have said so again, not until the scrape that is under way has ended.
func TestAGateThatAGaugeClosedOpensWhenTheGaugeIsTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gauges{sample: Sample{KVUsage: .97}}
		scheduler := scraped(t, g, up("a"))
		hold(t, scheduler, "a", pooled, 10_000) // so that the gauge counts
		g.set(func(g *gauges) { g.takes = time.Hour })
		begun := time.Now() // the first scrape has just been answered
		waits := start(t.Context(), scheduler, request(1))
		served := <-waits
		require.NoError(t, served.err)
		require.Equal(t, 4*500*time.Millisecond, time.Since(begun), "three more scrapes would have come")
		require.False(t, served.lease.canary)
		acquire(t, scheduler, request(2)).Release()
		require.True(t, scheduler.Status()[0].GateOpen)
		require.Nil(t, scheduler.Status()[0].ScrapedUsage)
		served.lease.Release()

		g.set(func(g *gauges) { g.takes = 0 })
		time.Sleep(10 * time.Second)
		mustWait(t, scheduler, request(3)) // it says again that it is full
	})
}

// With an interval of 0 the accounts alone move the gate, also when it was closed before.
func TestAGaugeThatIsReadNoMoreDoesNotKeepTheGateClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := scraped(t, &gauges{sample: Sample{KVUsage: .97}}, up("a"))
		hold(t, scheduler, "a", pooled, 10_000)
		mustWait(t, scheduler, request(1))
		next := scheduler.cfg
		next.Scrape.Interval = 0
		require.NoError(t, scheduler.Configure(next))
		acquire(t, scheduler, request(2)).Release()
	})
}

func TestNoCanaryWhileSomethingIsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("p0/0"))
		hold(t, scheduler, "p0/0", orphaned, 90_000)
		hold(t, scheduler, "p0/0", pooled, 3_000)
		time.Sleep(time.Minute)
		mustWait(t, scheduler, request(1))
	})
}

func TestKVIsHeldUntilTheFirstDecodeEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("p0/0"))
		lease := acquire(t, scheduler, Request{PromptTokens: 90_000})
		mustWait(t, scheduler, request(1))
		lease.Answered(Usage{}, time.Now().Add(time.Hour))
		mustWait(t, scheduler, request(2))
		lease.Dispatched()
		mustWait(t, scheduler, request(3))
		lease.Release()
		acquire(t, scheduler, request(4)).Release()
		requireIdle(t, scheduler)
	})
}

func TestAnOrphanIsHeldUntilTheEnginesTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("p0/0"))
		lease := acquire(t, scheduler, Request{PromptTokens: 90_000})
		lease.Answered(Usage{}, time.Now().Add(3*time.Second)) // before a canary could pass
		lease.Orphan()
		start := time.Now()
		next, err := scheduler.Acquire(t.Context(), Request{ID: "r", Model: testModel, PromptTokens: 10})
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, time.Since(start), "served when the orphan expired")
		require.False(t, next.canary)
		next.Release()
		requireIdle(t, scheduler)
	})
}

func TestTheEnginesCountReplacesTheEstimate(t *testing.T) {
	scheduler := newScheduler(t, up("p0/0"))
	lease := acquire(t, scheduler, Request{PromptTokens: 10})
	lease.Answered(Usage{PromptTokens: 95_000}, time.Time{})
	require.EqualValues(t, 95_000, scheduler.Status()[0].KVTokens)
	mustWait(t, scheduler, request(1))
	lease.Release()
	requireIdle(t, scheduler)
}
