package dispatcher

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

func TestEveryEntryButADrainFreesItsPlaceOnce(t *testing.T) {
	cfg := testConfig()
	cfg.Places = pool.NewSemaphore(100)
	cfg.TTL = time.Minute
	h := newHand(t, cfg)
	used := func(want int, why string) {
		t.Helper()
		require.Equal(t, want, cfg.Places.Used(), why)
	}
	put := func(e pool.Entry) waitingEntry {
		require.True(t, cfg.Places.TryAcquire())
		return h.put(e)
	}
	put(pool.Entry{})
	used(0, "refused, for there is no rank")

	h.fleet(ranks(1, 1, 100))
	put(pool.Entry{Prompt: 101})
	used(0, "refused as too large")
	s := put(pool.Entry{}).slotNow(t)
	used(0, "assigned")
	w := put(pool.Entry{})
	used(1, "waits")
	h.do(func(r *scheduler) { r.apply(board.Withdraw{Entry: w.Entry}) }, func(r *scheduler) { r.apply(board.Withdraw{Entry: w.Entry}) })
	used(0, "withdrawn, twice")
	put(pool.Entry{})
	h.pass(time.Minute)
	used(0, "expired")

	require.True(t, cfg.Places.TryAcquire(), "of somebody else")
	drain := h.put(pool.Entry{Discard: true})
	h.release(s)
	drain.slotNow(t)
	used(1, "a drain holds no place")
}

func TestProgressDoesNotAllocate(t *testing.T) {
	s, n := &Slot{}, 0
	require.Zero(t, testing.AllocsPerRun(100, func() { n++; s.Progress(n); s.ReportStarted() }))
}

func TestEnqueueLocalAnswersAtOnce(t *testing.T) {
	places := pool.NewSemaphore(1)
	d, err := Start(t.Context(), Config{Config: board.Config{TTL: time.Minute}, Places: places})
	require.NoError(t, err)
	d.SetWorkers(ranks(2, 2, 0))
	local := &board.Local{Threshold: 256, InFlight: 512, Ranks: []board.LocalRank{{Worker: 0, Tokens: 10}, {Worker: 1, Tokens: 20}}}
	r := <-d.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 300}, local)
	require.NoError(t, r.Err)
	require.EqualValues(t, 0, r.Slot.Worker)
	r2 := <-d.EnqueueLocal(&pool.Entry{ID: 2, Model: "m", Prompt: 300}, &board.Local{Threshold: 256, InFlight: 512})
	require.ErrorIs(t, r2.Err, board.ErrNotLocal)
	d.CorrectPrompt(r.Slot, 250)
	status := d.Status(t.Context())
	require.Zero(t, status.Drift)
	require.EqualValues(t, 250, status.Models[0].Workers[0].KVTokens, "as the rank counted")
	d.Release(r.Slot, board.Outcome{})
	d.CorrectPrompt(r.Slot, 400)
	require.Zero(t, d.Status(t.Context()).Drift)
	require.Zero(t, places.Used(), "a prompt without a hand-off never held a place")
}

// Whatever happens in whatever order, there is a place for each entry that waits.
func TestEveryEntryThatWaitsHasAPlace(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := testConfig()
		cfg.Window, cfg.TTL, cfg.Places = 3*time.Millisecond, 100*time.Millisecond, pool.NewSemaphore(1<<20)
		h := newHand(t, cfg)
		h.fleet(ranks(2, 2, 200))
		var waits []waitingEntry
		var held []*Slot
		rt.Repeat(map[string]func(*rapid.T){
			"enqueue": func(rt *rapid.T) {
				require.True(rt, cfg.Places.TryAcquire())
				waits = append(waits, h.put(pool.Entry{Prompt: rapid.IntRange(0, 250).Draw(rt, "prompt")}))
			},
			"withdraw": func(rt *rapid.T) {
				if len(waits) > 0 {
					w := rapid.SampledFrom(waits).Draw(rt, "entry")
					h.do(func(r *scheduler) { r.apply(board.Withdraw{Entry: w.Entry}) })
				}
			},
			"release": func(*rapid.T) {
				if len(held) > 0 {
					h.release(held[0])
					held = held[1:]
				}
			},
			"set workers": func(rt *rapid.T) { h.fleet(ranks(rapid.IntRange(0, 3).Draw(rt, "ranks"), 2, 200)) },
			"time passes": func(rt *rapid.T) { h.pass(time.Duration(rapid.IntRange(0, 60).Draw(rt, "ms")) * time.Millisecond) },
			"": func(rt *rapid.T) {
				waits = slices.DeleteFunc(waits, func(w waitingEntry) bool {
					if w.waits() {
						return false
					}
					if r := <-w.result; r.Slot != nil {
						held = append(held, r.Slot)
					}
					return true
				})
				require.Equal(rt, len(waits), cfg.Places.Used())
			},
		})
	})
}
