package board

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// The real policies on the real board, all of them: no assignment breaks a
// limit, no tick falls back, everybody gets a slot in the end.
func TestRealPoliciesOnTheBoard(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, Config{Policy: name, TickLimit: time.Hour})
			h.fleet(ranks(4, 3, 20_000))
			b := h.boards["m"]
			var waits []waiting
			for i := range 200 {
				waits = append(waits, h.put(pool.Entry{Prompt: 10 + i*7919%6000}))
			}
			for round := 0; len(waits) > 0; round++ {
				require.Less(t, round, 1000, "%d entries are never admitted", len(waits))
				var left []waiting
				var running []*Slot
				for _, w := range waits {
					if w.waits() {
						left = append(left, w)
					} else {
						running = append(running, w.slotNow(t))
					}
				}
				h.at = h.at.Add(50 * time.Millisecond)
				for _, s := range running {
					s.Progress(round)
				}
				h.release(running...)
				waits = left
			}
			require.EqualValues(t, 200, b.slots.released.slots)
			require.Zero(t, count(t, h.metrics.fallbacks.WithLabelValues("invalid")))
			require.Zero(t, count(t, h.metrics.fallbacks.WithLabelValues("panic")))
		})
	}
}

func TestAPromptBeyondThePolicysWatermarkIsTooLarge(t *testing.T) {
	h := newHand(t, Config{Policy: "pjsq-kv:watermark=0.1", TickLimit: time.Hour})
	h.fleet(ranks(1, 1, 1000))
	h.put(pool.Entry{Prompt: 900}).slotNow(t)
	require.ErrorIs(t, h.put(pool.Entry{Prompt: 901}).errNow(t), ErrTooLarge, "the policy would let it wait for ever")
}

func TestTheRealPoolBypass(t *testing.T) {
	h := newHand(t, Config{Policy: "br0:bypass", TickLimit: time.Hour})
	h.fleet(ranks(1, 1, 0))
	var slots []*Slot
	for range 3 { // one slot and the policy's margin of two
		slots = append(slots, h.put(pool.Entry{Prompt: 5}).slotNow(t))
	}
	w := h.put(pool.Entry{Prompt: 5})
	require.True(t, w.waits(), "the rank is at its cap")
	h.release(slots[0])
	w.slotNow(t)
}

func TestWhatOthersHoldIsLoadAndTakesRoom(t *testing.T) {
	for _, name := range []string{"evenkeel", "brh", "br0", "pjsq-kv", "jsq-kv"} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, Config{Policy: name, TickLimit: time.Hour})
			fleet := ranks(2, 3, 200_000)
			fleet[0].Others = 150_000
			h.fleet(fleet)
			var slots []*Slot
			for range 3 {
				slots = append(slots, h.put(pool.Entry{Prompt: 1000}).slotNow(t))
			}
			for _, s := range slots {
				require.Equal(t, fleet[1].ID, s.Worker)
			}
			h.release(slots...)
			require.Zero(t, h.status(h.at).Models[0].Workers[0].KVTokens, "ours")
			require.EqualValues(t, 150_000, h.status(h.at).Models[0].Workers[0].Others)
			fleet[1].Up = false
			h.fleet(fleet)
			if w := h.put(pool.Entry{Prompt: 60_000}); !strings.HasPrefix(name, "jsq") {
				require.True(t, w.waits(), "there is no room beside them")
				fleet[0].Others = 10_000
				h.fleet(fleet)
				w.slotNow(t)
			}
		})
	}
}
