package board

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine/circuit"
	"evenkeel/pool"
)

var (
	baseOnly = NewNames([]string{"base"})
	withX    = NewNames([]string{"base", "x"})
)

// naming has ranks list names.
func naming(ws []Worker, lists ...*Names) []Worker {
	for i := range ws {
		ws[i].Lists = lists[i%len(lists)]
	}
	return ws
}

func dense(ws []Worker) []Worker {
	for i := range ws {
		ws[i].Barrier = false
	}
	return ws
}

func TestARequestGoesToARankThatListsItsName(t *testing.T) {
	for name, of := range map[string]func([]Worker) []Worker{
		"of a pooled policy": func(ws []Worker) []Worker { return ws }, "of an immediate one": dense,
		"of ranks that prefill, too": func(ws []Worker) []Worker { mixed(ws); return ws }, "of ranks that are bound early": func(ws []Worker) []Worker { early(ws); return ws },
		"of two groups": func(ws []Worker) []Worker {
			ws[1].Group = "other"
			return ws
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			h.fleet(of(naming(ranks(2, 8, 0), baseOnly, withX)))
			for range 3 { // 0 is the emptier one, and would be chosen
				require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 10, Name: "x"}).slotNow(t).Worker)
			}
			require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 10, Name: "base"}).slotNow(t).Worker)
			require.ErrorIs(t, h.put(pool.Entry{Prompt: 1, Name: "y"}).errNow(t), ErrNotListed)
			require.Zero(t, h.boards["m"].restrictedCount)
		})
	}
}

// A policy that keeps less of a rank's KV room empty takes larger prompts at once, also for a name
// that only some ranks list.
func TestANewPolicyTakesLargerPromptsForANameThatFewRanksList(t *testing.T) {
	h := newHand(t, Config{Policy: "br0:watermark=0.5", TickLimit: time.Hour})
	h.fleet(naming(ranks(2, 8, 100), baseOnly, withX))
	for _, name := range []string{"x", "base"} {
		require.ErrorIs(t, h.put(pool.Entry{Prompt: 60, Name: name}).errNow(t), ErrTooLarge)
	}
	require.NoError(t, h.setPolicy("br0:watermark=0"))
	h.pass(0)
	for _, name := range []string{"x", "base"} {
		h.put(pool.Entry{Prompt: 60, Name: name}).slotNow(t)
	}
	require.NoError(t, h.setPolicy("br0:watermark=0.5"))
	for _, name := range []string{"x", "base"} {
		require.ErrorIs(t, h.put(pool.Entry{Prompt: 60, Name: name}).errNow(t), ErrTooLarge)
	}
}

// The rank that alone lists a name is spared, and the other is full, so that no policy decides. A
// request for the name gets each slot that becomes free all the same.
func TestANameThatOnlyASparedRankListsIsServedWhileTheOthersAreFull(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(naming(ranks(2, 1, 0), withX, baseOnly))
	for range circuit.Limit {
		h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
	}
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker)
	first := h.put(pool.Entry{Prompt: 1, Name: "x"}).slotNow(t)
	second := h.put(pool.Entry{Prompt: 1, Name: "x"})
	require.True(t, second.waits())
	h.do(func(l *hand) { l.giveBack(first, Outcome{Kind: Cancelled}) })
	require.Zero(t, second.slotNow(t).Worker)
}

// Where all ranks of a group list a name, its policy sees the requests for it.
func TestAPolicySeesTheNamesOfItsWholeGroup(t *testing.T) {
	h := newHand(t, testConfig())
	ws := naming(ranks(4, 1, 0), baseOnly, baseOnly, withX, withX)
	ws[2].Group, ws[3].Group = "other", "other"
	h.fleet(ws)
	h.shown = &Round{}
	require.EqualValues(t, 2, h.put(pool.Entry{Name: "x"}).slotNow(t).Worker)
	require.Equal(t, "other", h.shown.Group)
	require.Len(t, h.shown.Snapshot.Pool, 1)
	ws[2].Lists = baseOnly
	h.fleet(ws)
	h.shown = &Round{}
	require.EqualValues(t, 3, h.put(pool.Entry{Name: "x"}).slotNow(t).Worker)
	require.Empty(t, h.shown.Snapshot.Pool, "no policy saw it")
}

// Requests for a name that few ranks list have no right of way: who came first goes first, whatever
// it asks for.
func TestANameIsNotServedFirst(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(naming(ranks(2, 1, 0), baseOnly, withX))
	busy := [...]*Slot{h.put(pool.Entry{}).slotNow(t), h.put(pool.Entry{}).slotNow(t)}
	if busy[0].Worker != 1 {
		busy[0], busy[1] = busy[1], busy[0]
	}
	old := h.put(pool.Entry{Name: "base"})
	h.pass(time.Millisecond)
	named := h.put(pool.Entry{Name: "x"})
	h.pass(time.Millisecond)
	young := h.put(pool.Entry{Name: "base"})
	h.release(busy[0])
	h.pass(0)
	slot := old.slotNow(t)
	require.EqualValues(t, 1, slot.Worker)
	require.True(t, named.waits())
	h.release(busy[1])
	h.pass(0)
	require.EqualValues(t, 0, young.slotNow(t).Worker, "which the named one cannot have")
	h.release(slot)
	h.pass(0)
	require.EqualValues(t, 1, named.slotNow(t).Worker)
}

// A request waits for ranks that list its name while these are full, and no longer than any request
// waits.
func TestARequestWaitsForItsName(t *testing.T) {
	cfg := testConfig()
	cfg.TTL = time.Minute
	h := newHand(t, cfg)
	h.fleet(naming(ranks(2, 1, 100), baseOnly, withX))
	busy := h.put(pool.Entry{Name: "x"}).slotNow(t)
	second, third := h.put(pool.Entry{Name: "x"}), h.put(pool.Entry{Name: "x", Avoid: []int32{1}})
	h.pass(2 * avoidFor / 3)
	require.True(t, second.waits() && third.waits(), "rank 0 is free")
	h.release(busy)
	h.pass(0)
	require.EqualValues(t, 1, second.slotNow(t).Worker)
	h.pass(time.Minute)
	require.ErrorIs(t, third.errNow(t), ErrPoolTimeout)
	require.ErrorIs(t, h.put(pool.Entry{Name: "x", Prompt: 101}).errNow(t), ErrTooLarge)
	require.Zero(t, h.boards["m"].restrictedCount)
}

// An adapter is loaded and unloaded while requests for it wait.
func TestListsChangeWhileRequestsWait(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(naming(ranks(2, 1, 0), baseOnly, withX))
	var busy []*Slot
	for range 2 {
		busy = append(busy, h.put(pool.Entry{Name: "base"}).slotNow(t))
	}
	first, second := h.put(pool.Entry{Name: "x"}), h.put(pool.Entry{Name: "x"})
	h.fleet(naming(ranks(2, 1, 0), withX))
	require.Zero(t, h.boards["m"].restrictedCount, "all ranks list it")
	h.release(busy[0])
	h.pass(0)
	require.Equal(t, busy[0].Worker, first.slotNow(t).Worker)
	h.fleet(naming(ranks(2, 1, 0), withX, baseOnly))
	require.Equal(t, 1, h.boards["m"].restrictedCount)
	h.fleet(naming(ranks(2, 1, 0), baseOnly))
	require.ErrorIs(t, second.errNow(t), ErrNotListed)
	require.ErrorIs(t, h.put(pool.Entry{Name: "x"}).errNow(t), ErrNotListed)
	require.Zero(t, h.boards["m"].restrictedCount)
}

// The ranks that list a name are down: that is waited out as an outage of all ranks is.
func TestAnOutageOfAllThatListAName(t *testing.T) {
	h := newHand(t, testConfig())
	ws := naming(ranks(2, 1, 0), baseOnly, withX)
	h.fleet(ws)
	h.put(pool.Entry{Name: "x"}).slotNow(t)
	was := h.put(pool.Entry{Name: "x"})
	ws[1].Up, ws[1].Down = false, true
	h.fleet(ws)
	require.ErrorIs(t, h.put(pool.Entry{Name: "x"}).errNow(t), ErrNoWorkers, "as where all ranks are down")
	require.Equal(t, h.at.Add(outageGrace), h.Next(), "the timer")
	h.pass(outageGrace - 1)
	require.True(t, was.waits())
	ws[0].Lists = NewNames([]string{"base", "y"}) // what is listed elsewhere ends no outage
	h.fleet(ws)
	h.pass(1)
	require.ErrorIs(t, was.errNow(t), ErrNoWorkers)
	ws[1].Awaited, ws[1].Down = true, false
	h.fleet(ws)
	held := h.put(pool.Entry{Name: "x"})
	h.pass(2 * outageGrace)
	require.True(t, held.waits(), "it is waited for")
	ws[1].Awaited, ws[1].Up = false, true
	h.release(h.slotsOf(1)...)
	h.fleet(ws)
	require.EqualValues(t, 1, held.slotNow(t).Worker)
}

func TestAPromptIsComputedWhereItsNameIsListed(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(naming(ranks(2, 1, 0), baseOnly, withX))
	offer := func(name string) waiting {
		w := h.make(pool.Entry{Prompt: 10, Name: name})
		w.local = &Local{Ranks: []LocalRank{{0, 5}, {1, 9}}, Threshold: 100, InFlight: 100}
		h.do(func(h *hand) { h.enqueue(w) })
		return w
	}
	require.EqualValues(t, 1, offer("x").slotNow(t).Worker, "0 would compute less")
	require.ErrorIs(t, offer("x").errNow(t), ErrNotLocal)
	require.ErrorIs(t, offer("y").errNow(t), ErrNotListed)
	require.EqualValues(t, 0, offer("base").slotNow(t).Worker)
}

// Whatever engines list, and whenever that changes: a request gets a slot of a rank that lists its
// name, or an error, and the board counts no more requests as restricted than there are.
func TestNamesLoseNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := testConfig()
		cfg.TTL = time.Minute
		h := newHand(t, cfg)
		n := rapid.IntRange(1, 5).Draw(t, "ranks")
		ws := ranks(n, rapid.IntRange(1, 3).Draw(t, "slots"), 100)
		lists := []*Names{baseOnly, withX, NewNames([]string{"base", "y"}), NewNames([]string{"base", "x", "y"})}
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			mixed(ws)
		case 1:
			dense(ws)
		}
		change := func() {
			for i := range ws {
				ws[i].Lists = rapid.SampledFrom(lists).Draw(t, "lists")
				ws[i].Group = fmt.Sprint(rapid.IntRange(0, 1).Draw(t, "group"))
				ws[i].Up = rapid.IntRange(0, 4).Draw(t, "up") > 0
				ws[i].Down = !ws[i].Up && rapid.Bool().Draw(t, "down")
			}
			h.fleet(ws)
		}
		change()
		var all []waiting
		var held []*Slot
		collect := func() {
			left := all[:0]
			for _, w := range all {
				if w.waits() {
					left = append(left, w)
					continue
				}
				r := <-w.result
				if r.Err == nil {
					held = append(held, r.Slot)
					require.True(t, ws[r.Slot.Worker].Lists.Has(w.entry.Name), "%s on rank %d", w.entry.Name, r.Slot.Worker)
					require.True(t, ws[r.Slot.Worker].Up)
				} else if errors.Is(r.Err, ErrNotListed) {
					for _, x := range ws {
						require.False(t, x.Lists.Has(w.entry.Name))
					}
				}
			}
			all = left
			restricted := 0
			for _, w := range all {
				if h.boards["m"].isRestricted(w.entry) {
					restricted++
				}
			}
			require.Equal(t, restricted, h.boards["m"].restrictedCount)
			require.Len(t, all, h.boards["m"].pool.Len())
		}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			switch rapid.IntRange(0, 5).Draw(t, "event") {
			case 0, 1, 2:
				e := pool.Entry{Prompt: rapid.IntRange(1, 60).Draw(t, "prompt"),
					Name: rapid.SampledFrom([]string{"", "base", "x", "y"}).Draw(t, "name")}
				if rapid.IntRange(0, 4).Draw(t, "avoids") == 0 {
					e.Avoid = []int32{rapid.Int32Range(0, int32(n-1)).Draw(t, "avoid")}
				}
				all = append(all, h.put(e))
			case 3:
				if len(held) > 0 {
					i := rapid.IntRange(0, len(held)-1).Draw(t, "released")
					h.release(held[i])
					held = append(held[:i], held[i+1:]...)
				}
			case 4:
				h.pass(rapid.SampledFrom([]time.Duration{time.Millisecond, avoidFor}).Draw(t, "time"))
			case 5:
				change()
			}
			collect()
		}
		for i := range ws {
			ws[i].Up, ws[i].Down, ws[i].Lists = true, false, lists[3]
		}
		h.fleet(ws)
		collect()
		for range 200 {
			h.release(held...)
			held = nil
			h.pass(10 * time.Millisecond)
			collect()
		}
		require.Empty(t, all)
	})
}

func TestATickWithNamesDoesNotTouchTheHeap(t *testing.T) {
	for _, spec := range []string{"evenkeel", "jsq-kv"} {
		h := saturated(t, spec)
		b := h.boards["m"]
		for id, r := range b.ranks {
			r.Lists = []*Names{baseOnly, withX}[id%2]
		}
		for i, e := range b.pool.Entries() {
			e.Name = []string{"base", "x", ""}[i%3]
		}
		b.updatePartlyListedNames()
		b.countRestricted()
		require.Positive(t, b.restrictedCount)
		var admitted []waiting
		named := 0
		turn := func() {
			h.generate()
			admitted, _ = h.cycle(admitted)
			for _, w := range admitted {
				if w.entry.Name == "x" {
					named++
				}
			}
		}
		for range 30 {
			turn()
		}
		require.Positive(t, named)
		require.Zero(t, testing.AllocsPerRun(20, turn))
	}
}
