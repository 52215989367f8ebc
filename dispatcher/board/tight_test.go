package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestAnEngineThatPreemptsTwiceIsKeptEmptier(t *testing.T) {
	h := newHand(t, realConfig("br0:watermark=0.1"))
	h.fleet(ranks(2, 9, 1000))
	preempted := func(after time.Duration) {
		h.at = h.at.Add(after)
		h.do(func(l *hand) { l.preempted(1) })
	}
	tight := func() bool { return h.status(h.at).Models[0].Workers[1].Tight }
	preempted(0)
	preempted(11 * time.Second)
	require.False(t, tight(), "not within ten seconds")
	preempted(10 * time.Second)
	require.True(t, tight())
	require.False(t, h.status(h.at).Models[0].Workers[0].Tight, "the other rank")

	first, second := h.put(pool.Entry{Prompt: 850}).slotNow(t), h.put(pool.Entry{Prompt: 850})
	require.EqualValues(t, 0, first.Worker)
	require.True(t, second.waits(), "800 is what rank 1 takes now")
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 800}).slotNow(t).Worker)

	h.release(h.slotsOf(1)[0])
	h.pass(59 * time.Second)
	require.True(t, tight())
	require.True(t, second.waits())
	h.pass(time.Second)
	require.False(t, tight())
	h.look()
	require.EqualValues(t, 1, second.slotNow(t).Worker)
}

func TestTheDoubledWatermarkIsWhatPoliciesWillKeepFree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := rapid.Float64Range(0, 0.9).Draw(t, "watermark")
		capacity := rapid.Int64Range(1, 1<<22).Draw(t, "capacity")
		r := &rank{Worker: Worker{Capacity: capacity}}
		now := time.Now()
		r.pressure.until = now.Add(1)
		doubled := max(w, min(2*w, tightMost))
		require.InDelta(t, float64(capacity)*(1-doubled), float64(policy.KVBudget(r.capacity(w, now), w)), 2)
		require.LessOrEqual(t, r.capacity(w, now), capacity)
		require.Equal(t, capacity, r.capacity(w, now.Add(1)))
	})
}
