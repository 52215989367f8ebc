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

	first, small, second := h.put(pool.Entry{Prompt: 850}).slotNow(t), h.put(pool.Entry{Prompt: 10}).slotNow(t), h.put(pool.Entry{Prompt: 850})
	require.EqualValues(t, []int32{0, 1}, []int32{first.Worker, small.Worker})
	require.True(t, second.waits(), "800 is what rank 1 takes now")
	third := h.put(pool.Entry{Prompt: 790}).slotNow(t)
	require.EqualValues(t, 1, third.Worker)

	h.release(third)
	h.pass(59 * time.Second)
	require.True(t, tight())
	require.True(t, second.waits())
	h.pass(time.Second)
	require.False(t, tight())
	h.look()
	require.EqualValues(t, 1, second.slotNow(t).Worker)
}

// A prompt that fits a rank only where it is not tight does not wait for that where the rank is
// idle.
func TestATightRankThatIsIdleTakesALongPrompt(t *testing.T) {
	for _, spec := range []string{"evenkeel", "br0", "brh", "pjsq-kv"} {
		h := newHand(t, realConfig(spec+":watermark=0.1"))
		h.fleet(ranks(1, 9, 1000))
		h.do(func(l *hand) { l.preempted(0); l.preempted(0) })
		small := h.put(pool.Entry{Prompt: 10}).slotNow(t)
		long := h.put(pool.Entry{Prompt: 850})
		require.True(t, long.waits(), spec)
		other := h.put(pool.Entry{Prompt: 800})
		h.release(small)
		h.look()
		if long.waits() { // the other one was first
			h.release(other.slotNow(t))
			h.look()
		}
		require.True(t, h.status(h.at).Models[0].Workers[0].Tight, spec)
		long.slotNow(t)
	}
}

func TestTheDoubledWatermarkIsWhatPoliciesWillKeepFree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := rapid.Float64Range(0, 0.9).Draw(t, "watermark")
		capacity := rapid.Int64Range(1, 1<<22).Draw(t, "capacity")
		r := &rank{Worker: Worker{Capacity: capacity}}
		now := time.Now()
		r.pressure.tightUntil = now.Add(1)
		doubled := max(w, min(2*w, mostEmptyShare))
		require.InDelta(t, float64(capacity)*(1-doubled), float64(policy.KVBudget(r.policyCapacity(w, now, 0), w)), 2)
		require.LessOrEqual(t, r.policyCapacity(w, now, 0), capacity)
		require.Equal(t, capacity, r.policyCapacity(w, now.Add(1), 0))
	})
}

// Who waits for the room that a tight rank keeps empty is looked at when the rank is tight no more.
func TestAnEntryIsLookedAtWhenARankIsTightNoMore(t *testing.T) {
	cfg := realConfig("pjsq-kv:watermark=0.05")
	cfg.TTL = 10 * time.Minute
	h := newHand(t, cfg)
	h.fleet(ranks(1, 4, 1000))
	h.put(pool.Entry{Prompt: 500}).slotNow(t).Started()
	h.do(func(h *hand) { h.preempted(0) })
	h.pass(time.Second)
	h.do(func(h *hand) { h.preempted(0) })
	until := h.at.Add(tightFor)
	w := h.put(pool.Entry{Prompt: 420})
	require.True(t, w.waits(), "the tight rank has no room")
	require.False(t, h.Next().After(until))
	h.at = until
	h.do()
	require.False(t, w.waits())
}
