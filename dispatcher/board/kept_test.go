package board

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
)

const keeps = 480 * time.Second

// keeping is a fleet whose engines keep the KV of answers.
func keeping(ws []Worker) []Worker {
	for i := range ws {
		ws[i].KeepsKVFor, ws[i].Process = keeps, 7
	}
	return ws
}

// answered releases a slot after so many tokens of an answer whose KV its engine keeps.
func (h *hand) answered(s *Slot, tokens int) {
	h.do(func(h *hand) { h.giveBack(s, Outcome{Kind: Finished, Generated: tokens, Kept: true}) })
}

func TestWhatAnEngineKeepsHasItsRoomUntilItsTime(t *testing.T) {
	fleet := keeping(ranks(1, 4, 1000))
	for _, c := range []outlasts{
		{"nothing happens", func(*hand) {}, 600},
		{"nearly all of its time is over", func(h *hand) { h.pass(keeps - 2*time.Millisecond) }, 600},
		{"its time is over", func(h *hand) { h.pass(keeps) }, 0},
		{"the fleet is told again", func(h *hand) { h.fleet(fleet) }, 600},
		{"its process is another one", func(h *hand) {
			next := slices.Clone(fleet)
			next[0].Process = 8
			h.fleet(next)
		}, 0},
		{"its engine keeps nothing now", func(h *hand) {
			next := slices.Clone(fleet)
			next[0].KeepsKVFor = 0
			h.fleet(next)
		}, 0},
		{"it left the fleet", func(h *hand) {
			h.fleet(nil)
			h.release(h.slotsOf(0)...)
			h.fleet(fleet)
		}, 0},
		{"gauges show it and what runs", func(h *hand) { h.gauged(0, 700) }, 600},
		{"gauges show that the answers share something", func(h *hand) { h.gauged(0, 650) }, 550},
		{"gauges show what runs", func(h *hand) { h.gauged(0, 100) }, 0},
		{"the gauges are older than it is", func(h *hand) { h.apply(Gauged{0, 100, h.at.Add(-time.Second)}) }, 600},
	} {
		c.check(t, fleet, 301, func(h *hand) {
			h.answered(h.put(pool.Entry{Prompt: 150}).slotNow(t), 50)
			h.answered(h.put(pool.Entry{Prompt: 300}).slotNow(t), 100)
		}, func(w *WorkerStatus) int64 { return w.Kept })
	}
}

func TestOnlyWhatIsAnsweredIsKept(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(keeping(ranks(1, 4, 1000)))
	h.release(h.put(pool.Entry{Prompt: 400}).slotNow(t))
	require.Zero(t, h.boards["m"].ranks[0].keptKV.Tokens())
	h.fleet(ranks(1, 4, 1000))
	h.answered(h.put(pool.Entry{Prompt: 400}).slotNow(t), 1)
	require.Zero(t, h.boards["m"].ranks[0].keptKV.Tokens(), "an engine without the flag keeps nothing")
}

func TestKeepingDoesNotTouchTheHeap(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(keeping(ranks(2, 4, 1e6)))
	b := h.boards["m"]
	turn := func() {
		h.at = h.at.Add(keeps / 100)
		b.keepKV(b.ranks[0], &slotRecord{prompt: 100}, 10, h.at)
		b.correctKept(b.ranks[0], Gauged{0, 4000, h.at})
		h.apply(&h.tick)
	}
	for range 300 {
		turn()
	}
	require.Positive(t, b.ranks[0].keptKV.Tokens())
	require.Zero(t, testing.AllocsPerRun(200, turn))
}

// Whatever is bound, answered, restarted, gauged and waited for: what was kept is there or was
// given up, and nothing is kept by an engine that has restarted.
func TestWhatIsKeptAndGivenUpAgree(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHand(t, testConfig())
		fleet := keeping(ranks(3, 3, 2000))
		for i := range fleet {
			fleet[i].Engine, fleet[i].Unpinned = "d", true
		}
		h.fleet(fleet)
		var all requests
		rt.Repeat(map[string]func(*rapid.T){
			"enqueue": func(rt *rapid.T) {
				all.wait = append(all.wait,
					h.put(pool.Entry{Prompt: rapid.IntRange(1, 300).Draw(rt, "prompt"), Response: rapid.Bool().Draw(rt, "response")}))
			},
			"start": func(rt *rapid.T) {
				s := all.leave(rt)
				s.Started()
				s.Progress(rapid.IntRange(0, 20).Draw(rt, "generated"))
				all.held = append(all.held, s)
			},
			"answer":  func(rt *rapid.T) { h.answered(all.leave(rt), rapid.IntRange(-1, 100).Draw(rt, "tokens")) },
			"release": func(rt *rapid.T) { h.release(all.leave(rt)) },
			"restart": func(rt *rapid.T) {
				i := rapid.IntRange(0, len(fleet)-1).Draw(rt, "rank")
				fleet = slices.Clone(fleet)
				fleet[i].Process++
				h.fleet(fleet)
				if r := h.boards["m"].ranks[fleet[i].ID]; r.keptKV.Tokens() != 0 {
					rt.Fatalf("rank %d keeps %d tokens of another process", r.ID, r.keptKV.Tokens())
				}
			},
			"leave": func(rt *rapid.T) {
				h.fleet(fleet[:rapid.IntRange(0, len(fleet)-1).Draw(rt, "ranks")])
				h.fleet(fleet)
			},
			"gauge": func(rt *rapid.T) {
				h.gauged(int32(rapid.IntRange(0, 2).Draw(rt, "rank")), int64(rapid.IntRange(0, 2000).Draw(rt, "in use")))
			},
			"wait": func(rt *rapid.T) { h.pass(time.Duration(rapid.IntRange(0, int(keeps/2)).Draw(rt, "pause"))) },
			"": func(rt *rapid.T) {
				all.collect(rt)
				require.Zero(rt, h.status(h.at).Drift)
			},
		})
		h.pass(2 * keeps)
		for _, r := range h.boards["m"].ranks {
			require.Zero(rt, r.keptKV.Tokens(), "all of it is over then")
		}
	})
}
