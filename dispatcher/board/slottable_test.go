package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
)

// Whatever happens in whatever order: every entry is answered once, the slot table
// equals a recount, no pooled rank holds more than its slots or its KV tokens,
// and when all is released nothing is charged.
func TestTheSlotTableEqualsARecount(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := testConfig()
		cfg.Window = time.Duration(rapid.SampledFrom([]int{0, 3}).Draw(rt, "window")) * time.Millisecond
		cfg.TTL = 100 * time.Millisecond
		pooled := rapid.Bool().Draw(rt, "pooled")
		if !pooled {
			cfg.Policy = "immediate"
		}
		h := newHand(t, cfg)
		var all requests
		fleet := ranks(4, 2, 200)
		fleet[2].Group, fleet[3].Group = "other", "other"
		for i := range fleet {
			fleet[i].Unpinned = rapid.Bool().Draw(rt, "strays")
			fleet[i].Engine = rapid.SampledFrom([]string{"", "e0", "e1"}).Draw(rt, "engine")
		}
		most := map[int32]int{} // slots a rank ever had since it was last empty
		h.fleet(fleet)
		rt.Repeat(map[string]func(*rapid.T){
			"enqueue": func(rt *rapid.T) {
				for range rapid.IntRange(1, 4).Draw(rt, "burst") {
					all.wait = append(all.wait,
						h.put(pool.Entry{Prompt: rapid.IntRange(0, 250).Draw(rt, "prompt"), Response: rapid.Bool().Draw(rt, "response")}))
				}
			},
			"withdraw": func(rt *rapid.T) {
				if len(all.wait) == 0 {
					rt.Skip()
				}
				w := rapid.SampledFrom(all.wait).Draw(rt, "entry")
				h.do(func(l *hand) { l.withdraw(w.entry) })
			},
			"progress": func(rt *rapid.T) {
				if len(all.held) == 0 {
					rt.Skip()
				}
				s := rapid.SampledFrom(all.held).Draw(rt, "slot")
				s.Started()
				s.Progress(rapid.IntRange(0, 50).Draw(rt, "generated"))
			},
			"recount": func(rt *rapid.T) {
				if len(all.held) == 0 {
					rt.Skip()
				}
				s := rapid.SampledFrom(all.held).Draw(rt, "slot")
				h.do(func(h *hand) { h.apply(Recount{"m", s.index, rapid.IntRange(0, 100).Draw(rt, "prompt")}) })
			},
			"release": func(rt *rapid.T) {
				h.release(all.leave(rt))
			},
			"set workers": func(rt *rapid.T) {
				var ws []Worker
				for _, w := range fleet {
					if rapid.IntRange(0, 4).Draw(rt, "gone") > 0 {
						w.Up = rapid.Bool().Draw(rt, "up")
						w.Slots = rapid.IntRange(0, 3).Draw(rt, "slots")
						ws = append(ws, w)
					}
				}
				h.fleet(ws)
			},
			"time passes": func(rt *rapid.T) {
				h.pass(time.Duration(rapid.IntRange(0, 60).Draw(rt, "ms")) * time.Millisecond)
			},
			"": func(rt *rapid.T) {
				all.collect(rt)
				checkBooks(rt, h, all.held, pooled, most)
			},
		})
		for len(all.held) > 0 { // what is released lets others in
			h.release(all.held...)
			all.held = all.held[:0]
			all.collect(rt)
		}
		h.apply(Shutdown{})
		all.collect(rt)
		require.Empty(rt, all.wait, "all answered")
		require.Empty(rt, all.held)
		checkBooks(rt, h, nil, pooled, most)
	})
}

func checkBooks(rt *rapid.T, h *hand, held []*Slot, pooled bool, most map[int32]int) {
	b := h.boards["m"]
	if b == nil {
		require.Empty(rt, held)
		return
	}
	slots, kvTokens := b.drift()
	require.Zero(rt, slots)
	require.Zero(rt, kvTokens)
	require.EqualValues(rt, len(held), b.slots.charged.slots-b.slots.released.slots)

	want := map[int32]int64{}
	for _, s := range held {
		record := s.record()
		whole, on := int64(record.prompt)+int64(s.Generated()), h.ranksOf(s)
		each := whole / int64(len(on))
		want[s.Worker] += whole - each*int64(len(on))
		for _, r := range on {
			want[r.ID] += each
		}
		require.Same(rt, s, h.slots[s.index])
	}
	h.count()
	for _, r := range b.ranks {
		b.refreshLoad(r)
	}
	for id, r := range b.ranks {
		require.Equal(rt, want[id], r.kv, "KV tokens of rank %d", id)
		for i, slot := range r.slots {
			record := b.slots.records[slot]
			require.Equal(rt, i, record.pos)
			require.Equal(rt, record.id, r.running[i].ID)
			require.Equal(rt, slot, r.running[i].Slot)
		}
		delete(want, id)
		// Slots may shrink below what runs; admissions never go above.
		most[id] = max(r.Slots, min(most[id], len(r.slots)))
		if pooled {
			require.LessOrEqual(rt, len(r.slots), most[id], "slots of rank %d", id)
		}
	}
	require.Empty(rt, want, "ranks of held slots that are unknown")
}

// ranksOf are the ranks on which the KV of a slot stands, its own among them.
func (h *hand) ranksOf(s *Slot) (on []*rank) {
	own := s.record().rank
	on = append(on, own)
	for _, r := range h.boards["m"].ranks {
		if s.record().engineChoosesRank && own.Engine != "" && r != own && r.present && r.Engine == own.Engine {
			on = append(on, r)
		}
	}
	return on
}
