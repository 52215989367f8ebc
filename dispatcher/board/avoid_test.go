package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
)

func TestARequestComesBackToAnotherRank(t *testing.T) {
	for name, barrier := range map[string]bool{"of a pooled policy": true, "of an immediate one": false} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			ws := ranks(3, 4, 0)
			for i := range ws {
				ws[i].Barrier = barrier
			}
			h.fleet(ws)
			for range 2 { // 0 is the emptiest, and would be chosen
				h.put(pool.Entry{Prompt: 10, Avoid: []int32{0}}).slotNow(t)
			}
			h.put(pool.Entry{Prompt: 5, Avoid: []int32{0}}).slotNow(t)
			require.EqualValues(t, 2, h.put(pool.Entry{Prompt: 1, Avoid: []int32{0, 1}}).slotNow(t).Worker)
			require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "those who avoid nothing go there")
			require.Zero(t, h.boards["m"].restrictedCount)
		})
	}
}

func TestARankThatIsTheOnlyOneIsTakenAllTheSame(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(3, 4, 100)
	ws[1].Up, ws[2].Capacity = false, 50
	h.fleet(ws)
	require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 60, Avoid: []int32{0}}).slotNow(t).Worker, "1 is down, and it never fits 2")
	require.EqualValues(t, 2, h.put(pool.Entry{Prompt: 40, Avoid: []int32{0}}).slotNow(t).Worker)
}

// An engine may hold orphans until it restarts, so a request would wait in vain for the room that
// they take. An immediate policy lets the engine queue what has no room.
func TestNoRequestWaitsForRoomThatOrphansTake(t *testing.T) {
	for name, row := range map[string]struct {
		barrier bool
		want    int32
	}{"of a pooled policy": {true, 0}, "of an immediate one": {false, 1}} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			ws := ranks(2, 4, 1000)
			for i := range ws {
				ws[i].Barrier = row.barrier
			}
			h.fleet(ws)
			h.orphan(h.put(pool.Entry{Prompt: 600, Only: []int32{1}}).slotNow(t))
			require.Equal(t, row.want, h.put(pool.Entry{Prompt: 500, Avoid: []int32{0}}).slotNow(t).Worker)
			require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 300, Avoid: []int32{0}}).slotNow(t).Worker)
		})
	}
}

func TestARequestWaitsAMomentForAnotherRank(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 1, 0))
	busy := h.put(pool.Entry{Avoid: []int32{0}}).slotNow(t)
	first := h.put(pool.Entry{Avoid: []int32{0}})
	second := h.put(pool.Entry{Avoid: []int32{0}})
	require.True(t, first.waits(), "rank 0 is free, but failed at it")
	require.Equal(t, h.at.Add(avoidFor), h.Next(), "the timer")
	h.pass(avoidFor / 2)
	h.release(busy)
	h.pass(0)
	require.EqualValues(t, 1, first.slotNow(t).Worker)
	h.pass(avoidFor/2 - 1)
	require.True(t, second.waits())
	h.pass(1)
	require.EqualValues(t, 0, second.slotNow(t).Worker, "better there than nowhere")
}

// Whatever comes, goes or is avoided: no slot is given twice, none for nothing,
// and in the end everybody was served.
func TestAvoidingLosesNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHand(t, testConfig())
		n := rapid.IntRange(1, 4).Draw(t, "ranks")
		ws := ranks(n, rapid.IntRange(1, 3).Draw(t, "slots"), 0)
		h.fleet(ws)
		var all []waiting
		var held []*Slot
		collect := func() {
			left := all[:0]
			for _, w := range all {
				if w.waits() {
					left = append(left, w)
					continue
				}
				held = append(held, w.slotNow(t))
			}
			all = left
		}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			switch rapid.IntRange(0, 3).Draw(t, "event") {
			case 0, 1:
				all = append(all,
					h.put(pool.Entry{Prompt: 1, Avoid: rapid.SliceOfNDistinct(rapid.Int32Range(0, int32(n-1)), 0, n, rapid.ID).Draw(t, "avoid")}))
			case 2:
				if len(held) > 0 {
					i := rapid.IntRange(0, len(held)-1).Draw(t, "released")
					if rapid.Bool().Draw(t, "refused") {
						h.refuse(held[i])
					} else {
						h.release(held[i])
					}
					held = append(held[:i], held[i+1:]...)
				}
			default:
				h.pass(rapid.SampledFrom([]time.Duration{time.Millisecond, avoidFor}).Draw(t, "time"))
			}
			collect()
			require.LessOrEqual(t, len(held), n*ws[0].Slots)
		}
		for range 200 {
			h.release(held...)
			held = nil
			h.pass(avoidFor)
			collect()
		}
		require.Empty(t, all)
		require.Zero(t, h.boards["m"].restrictedCount)
	})
}

func TestARequestForOneRankWaitsForIt(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 1, 0))
	busy := h.put(pool.Entry{Only: []int32{1}}).slotNow(t)
	require.EqualValues(t, 1, busy.Worker, "though 0 would be chosen")
	second := h.put(pool.Entry{Only: []int32{1}, Avoid: []int32{1}})
	h.pass(2 * avoidFor)
	require.True(t, second.waits(), "0 is free")
	require.EqualValues(t, 0, h.put(pool.Entry{}).slotNow(t).Worker, "nobody else waits for that")
	h.release(busy)
	h.pass(0)
	require.EqualValues(t, 1, second.slotNow(t).Worker)
	require.Zero(t, h.boards["m"].restrictedCount)
}
