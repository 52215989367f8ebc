package board

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
)

// orphan releases a slot whose KV its engine may keep.
func (h *hand) orphan(s *Slot) {
	h.do(func(h *hand) { h.giveBack(s, Outcome{Kind: Failed, Orphaned: true}) })
}

func (h *hand) gauged(worker int32, inUse int64) {
	h.do(func(h *hand) {
		h.count()
		h.apply(Gauged{worker, inUse, h.at})
	})
}

// outlasts is what becomes of 600 of a rank's 1000 KV tokens, of requests that have left it, while
// another one decodes.
type outlasts struct {
	name string
	do   func(h *hand)
	want int64 // of the 600
}

// check has requests leave the rank of a fleet. A prompt of so many tokens has no room then, and
// gets in once some is there again.
func (c *outlasts) check(t *testing.T, fleet []Worker, prompt int, leave func(h *hand), left func(w *WorkerStatus) int64) {
	t.Run(c.name, func(t *testing.T) {
		h := newHand(t, realConfig("pjsq-kv:watermark=0"))
		h.fleet(fleet)
		h.put(pool.Entry{Prompt: 100}).slotNow(t).Started()
		leave(h)
		worker := func() *WorkerStatus { return &h.status(h.at).Models[0].Workers[0] }
		require.EqualValues(t, 600, left(worker()))
		require.Equal(t, 1, worker().Used, "slots are given back")
		require.EqualValues(t, 100, worker().KVTokens, "no step reads it")
		waits := h.put(pool.Entry{Prompt: prompt})
		require.True(t, waits.waits(), "its room is taken")
		h.at = h.at.Add(time.Millisecond)
		c.do(h)
		h.do()
		require.Equal(t, c.want, left(worker()))
		require.Equal(t, c.want == 600, waits.waits())
		require.Zero(t, h.status(h.at).Drift)
	})
}

func TestAnOrphanHasItsRoomUntilItIsSeenToBeGone(t *testing.T) {
	fleet := early(ranks(1, 4, 1000))
	fleet[0].Process = 7
	for _, c := range []outlasts{
		{"nothing tells", func(*hand) {}, 600},
		{"the fleet is told again", func(h *hand) { h.fleet(fleet) }, 600},
		{"its process is not known now", func(h *hand) { h.fleet(early(ranks(1, 4, 1000))) }, 600},
		{"its process is another one", func(h *hand) {
			next := slices.Clone(fleet)
			next[0].Process = 8
			h.fleet(next)
		}, 0},
		{"it left the fleet", func(h *hand) {
			h.release(h.slotsOf(0)...)
			h.fleet(nil)
			h.fleet(fleet)
		}, 0},
		{"gauges show it and what runs", func(h *hand) { h.gauged(0, 700) }, 600},
		{"gauges show nearly as much", func(h *hand) { h.gauged(0, 501) }, 600},
		{"gauges show that one of the two is gone", func(h *hand) { h.gauged(0, 500) }, 400},
		{"gauges show that the larger one is gone", func(h *hand) { h.gauged(0, 101+200) }, 400},
		{"gauges show what runs", func(h *hand) { h.gauged(0, 100) }, 0},
		{"the gauges are old", func(h *hand) {
			h.at = h.at.Add(time.Minute)
			h.apply(Gauged{0, 100, h.at.Add(-gaugeLife - 1)})
		}, 600},
		{"the gauges are older than it is", func(h *hand) { h.apply(Gauged{0, 100, h.at.Add(-time.Second)}) }, 600},
	} {
		c.check(t, fleet, 401, func(h *hand) {
			h.orphan(h.put(pool.Entry{Prompt: 200}).slotNow(t))
			h.orphan(h.put(pool.Entry{Prompt: 400}).slotNow(t))
		}, func(w *WorkerStatus) int64 { return w.Orphans })
	}
}

func TestManyOrphans(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(ranks(1, 4, 1000)) // a prefill engine may also write to a rank that was bound late
	for range mostOrphans + 9 {
		h.orphan(h.put(pool.Entry{Prompt: 10}).slotNow(t))
	}
	r := h.boards["m"].ranks[0]
	require.Len(t, r.orphans, mostOrphans)
	require.EqualValues(t, 10*(mostOrphans+9), r.orphanedKV, "none is forgotten")
	s := h.put(pool.Entry{Prompt: 10}).slotNow(t)
	h.apply(Recount{"m", s.index, 5000})
	h.orphan(s)
	require.EqualValues(t, 1, r.usableCapacity(), "0 would be unlimited")
	require.Zero(t, h.status(h.at).Drift)
}

// Whatever is bound, orphaned, restarted and gauged: what was charged is held, orphaned or
// released, no rank gets more than orphans have left of it, and no orphan lasts longer than its
// process.
func TestOrphansAreCountedOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := testConfig()
		h := newHand(t, cfg)
		fleet := early(ranks(3, 3, 500))
		for i := range fleet {
			fleet[i].Process, fleet[i].Engine, fleet[i].Unpinned = 1, "d", true
		}
		h.fleet(fleet)
		want := map[int32][]int64{} // orphans of each rank, by our own count
		var all requests
		rt.Repeat(map[string]func(*rapid.T){
			"enqueue": func(rt *rapid.T) {
				all.wait = append(all.wait, h.put(pool.Entry{Prompt: rapid.IntRange(1, 300).Draw(rt, "prompt")}))
			},
			"enqueue a response that needs no hand-off": func(rt *rapid.T) {
				w := h.make(pool.Entry{Prompt: rapid.IntRange(1, 300).Draw(rt, "prompt"), Response: true})
				w.entry.Early = false
				all.wait = append(all.wait, w)
				h.do(func(h *hand) { h.enqueue(w) })
			},
			"start": func(rt *rapid.T) {
				s := all.leave(rt)
				s.Started()
				s.Progress(rapid.IntRange(0, 20).Draw(rt, "generated"))
				all.held = append(all.held, s)
			},
			"release": func(rt *rapid.T) { h.release(all.leave(rt)) },
			"orphan": func(rt *rapid.T) {
				s := all.leave(rt)
				r := h.boards["m"].ranks[s.Worker]
				if tokens := int64(s.record().prompt); r.present && s.record().process == r.Process && !s.record().engineChoosesRank {
					want[s.Worker] = append(want[s.Worker], tokens)
				}
				h.orphan(s)
			},
			"recount": func(rt *rapid.T) {
				s := all.leave(rt)
				h.do(func(h *hand) { h.apply(Recount{"m", s.index, rapid.IntRange(1, 100).Draw(rt, "prompt")}) })
				all.held = append(all.held, s)
			},
			"restart": func(rt *rapid.T) {
				i := rapid.IntRange(0, 2).Draw(rt, "rank")
				fleet[i].Process++
				delete(want, int32(i))
				h.fleet(fleet)
			},
			"gauge": func(rt *rapid.T) {
				h.at = h.at.Add(time.Millisecond)
				i := rapid.Int32Range(0, 2).Draw(rt, "rank")
				inUse := rapid.Int64Range(0, 500).Draw(rt, "in use")
				missing := -inUse
				for _, s := range all.held {
					if s.Worker == i && s.started && !s.record().engineChoosesRank { // that may have its KV elsewhere
						missing += int64(s.record().prompt) + int64(s.Generated())
					}
				}
				for _, tokens := range want[i] {
					missing += tokens
				}
				want[i] = slices.DeleteFunc(want[i], func(tokens int64) bool {
					if tokens > missing {
						return false
					}
					missing -= tokens
					return true
				})
				h.gauged(i, inUse)
			},
			"": func(rt *rapid.T) {
				require.Empty(rt, all.collect(rt))
				require.Zero(rt, h.status(h.at).Drift)
				for id, r := range h.boards["m"].ranks {
					var sum int64
					for _, tokens := range want[id] {
						sum += tokens
					}
					require.Equal(rt, sum, r.orphanedKV)
				}
			},
		})
		h.release(all.held...)
		for i := range fleet {
			fleet[i].Process++
		}
		h.fleet(fleet)
		for _, w := range all.wait {
			h.withdraw(w.entry)
		}
		h.release(h.slotsOf(0)...)
		h.release(h.slotsOf(1)...)
		h.release(h.slotsOf(2)...)
		b := h.boards["m"]
		require.Equal(rt, b.slots.charged, b.slots.released)
	})
}

// An engine that has restarted holds no KV of a request that it got before, however late that
// request ends.
func TestARequestOfAnEarlierProcessLeavesNoOrphan(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv:watermark=0"))
	fleet := early(ranks(1, 4, 2000))
	fleet[0].Process, fleet[0].KeepsKVFor = 7, time.Hour
	h.fleet(fleet)
	lost, answered := h.put(pool.Entry{Prompt: 600}).slotNow(t), h.put(pool.Entry{Prompt: 600}).slotNow(t)
	fleet = slices.Clone(fleet)
	fleet[0].Process = 8
	h.fleet(fleet)
	h.orphan(lost)
	h.answered(answered, 100)
	require.EqualValues(t, 2000, h.boards["m"].ranks[0].usableCapacity())
	require.Zero(t, h.status(h.at).Drift)
}

// A gauge that is older than a request shows nothing of it, so it does not show that an orphan is
// gone.
func TestAnOrphanStaysIfTheGaugeIsOlderThanARequest(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv:watermark=0"))
	h.fleet(early(ranks(1, 4, 2000)))
	h.orphan(h.put(pool.Entry{Prompt: 600}).slotNow(t))
	h.pass(time.Second)
	read := h.at // the gauge shows the 600 tokens of the orphan
	h.pass(time.Second)
	h.put(pool.Entry{Prompt: 700}).slotNow(t).Started()
	h.pass(time.Second)
	h.do(func(h *hand) {
		h.count()
		h.apply(Gauged{0, 600, read})
	})
	require.EqualValues(t, 600, h.status(h.at).Models[0].Workers[0].Orphans)
}
