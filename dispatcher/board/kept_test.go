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
		ws[i].Keeps, ws[i].Process = keeps, 7
	}
	return ws
}

// answered releases a slot after so many tokens of an answer whose KV its engine keeps.
func (h *hand) answered(s *Slot, tokens int) {
	h.do(func(h *hand) { h.giveBack(s, Outcome{Kind: Finished, Generated: tokens, Kept: true}) })
}

func TestWhatAnEngineKeepsHasItsRoomUntilItsTime(t *testing.T) {
	fleet := keeping(ranks(1, 4, 1000))
	worker := func(h *hand) WorkerStatus { return h.status(h.at).Models[0].Workers[0] }
	for _, c := range []struct {
		name string
		do   func(h *hand)
		want int64
	}{
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
			next[0].Keeps = 0
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
		t.Run(c.name, func(t *testing.T) {
			h := newHand(t, realConfig("pjsq-kv:watermark=0"))
			h.fleet(fleet)
			h.put(pool.Entry{Prompt: 100}).slotNow(t).Started()
			h.answered(h.put(pool.Entry{Prompt: 150}).slotNow(t), 50)
			h.answered(h.put(pool.Entry{Prompt: 300}).slotNow(t), 100)
			require.EqualValues(t, 600, worker(h).Kept)
			require.Equal(t, 1, worker(h).Used, "slots are given back")
			require.EqualValues(t, 100, worker(h).KVTokens, "no step reads it")
			waits := h.put(pool.Entry{Prompt: 301})
			require.True(t, waits.waits(), "its room is taken")
			h.at = h.at.Add(time.Millisecond)
			c.do(h)
			h.do()
			require.Equal(t, c.want, worker(h).Kept)
			require.Equal(t, c.want == 600, waits.waits())
			require.Zero(t, h.status(h.at).Drift)
		})
	}
}

func TestOnlyWhatIsAnsweredIsKept(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(keeping(ranks(1, 4, 1000)))
	h.release(h.put(pool.Entry{Prompt: 400}).slotNow(t))
	require.Zero(t, h.boards["m"].ranks[0].kept.Tokens())
	h.fleet(ranks(1, 4, 1000))
	h.answered(h.put(pool.Entry{Prompt: 400}).slotNow(t), 1)
	require.Zero(t, h.boards["m"].ranks[0].kept.Tokens(), "an engine without the flag keeps nothing")
}

func TestAPromptMayWaitInTheEngineForWhatItKeeps(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv:watermark=0"))
	fleet := keeping(ranks(1, 4, 1000))
	fleet[0].Beyond = 1
	h.fleet(fleet)
	h.answered(h.put(pool.Entry{Prompt: 800}).slotNow(t), 1)
	waits := h.put(pool.Entry{Prompt: 900, Deadline: h.at.Add(10 * time.Second)})
	require.True(t, waits.waits())
	h.pass(10 * time.Second)
	require.True(t, waits.slotNow(t).Beyond, "its queue renews the hold of the hand-off")
}

func TestKeepingDoesNotTouchTheHeap(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(keeping(ranks(2, 4, 1e6)))
	b := h.boards["m"]
	turn := func() {
		h.at = h.at.Add(keeps / 100)
		b.keep(b.ranks[0], &charge{prompt: 100}, 10, h.at)
		b.gaugedKept(b.ranks[0], Gauged{0, 4000, h.at})
		h.apply(&h.tick)
	}
	for range 300 {
		turn()
	}
	require.Positive(t, b.ranks[0].kept.Tokens())
	require.Zero(t, testing.AllocsPerRun(200, turn))
}

// Whatever is bound, answered, restarted, gauged and waited for: what was kept is there or was given up, a copy of the boards has
// the same, and nothing is kept by an engine that has restarted.
func TestWhatIsKeptAndGivenUpAgree(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHand(t, testConfig())
		fleet := keeping(ranks(3, 3, 2000))
		for i := range fleet {
			fleet[i].Engine, fleet[i].Strays = "d", true
		}
		h.fleet(fleet)
		var waits []waiting
		var held []*Slot
		draw := func() (s *Slot) {
			if len(held) == 0 {
				rt.Skip()
			}
			i := rapid.IntRange(0, len(held)-1).Draw(rt, "slot")
			s = held[i]
			held = slices.Delete(held, i, i+1)
			return s
		}
		rt.Repeat(map[string]func(*rapid.T){
			"enqueue": func(rt *rapid.T) {
				waits = append(waits, h.put(pool.Entry{Prompt: rapid.IntRange(1, 300).Draw(rt, "prompt"), Response: rapid.Bool().Draw(rt, "response")}))
			},
			"start": func(rt *rapid.T) {
				s := draw()
				s.Started()
				s.Progress(rapid.IntRange(0, 20).Draw(rt, "generated"))
				held = append(held, s)
			},
			"answer":  func(rt *rapid.T) { h.answered(draw(), rapid.IntRange(-1, 100).Draw(rt, "tokens")) },
			"release": func(*rapid.T) { h.release(draw()) },
			"restart": func(rt *rapid.T) {
				i := rapid.IntRange(0, len(fleet)-1).Draw(rt, "rank")
				fleet = slices.Clone(fleet)
				fleet[i].Process++
				h.fleet(fleet)
				if r := h.boards["m"].ranks[fleet[i].ID]; r.kept.Tokens() != 0 {
					rt.Fatalf("rank %d keeps %d tokens of another process", r.ID, r.kept.Tokens())
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
				waits = slices.DeleteFunc(waits, func(w waiting) bool {
					select {
					case r := <-w.result:
						if r.Slot != nil {
							held = append(held, r.Slot)
						}
						return true
					default:
						return false
					}
				})
				require.Zero(rt, h.status(h.at).Drift)
				copied := h.Clone()
				for id, r := range h.boards["m"].ranks {
					require.Equal(rt, r.kept.Tokens(), copied.boards["m"].ranks[id].kept.Tokens())
				}
				copied.Apply(&Tick{"m"}, h.at.Add(2*keeps))
				for _, r := range copied.boards["m"].ranks {
					require.Zero(rt, r.kept.Tokens(), "all of it is over then")
				}
			},
		})
	})
}
