package dispatcher

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// roomOf is the room for any name.
func roomOf(d *Dispatcher, within time.Duration) int {
	n, _ := d.Room("m", "", within)
	return n
}

// Whoever holds prompts back for want of room is told of it when Room says so, not
// before: in the middle of a turn it still says what it said.
func TestWhoWaitsForRoomIsToldOfIt(t *testing.T) {
	var h *hand
	var rooms []int
	cfg := testConfig()
	cfg.OnRoom = func() {
		rooms = append(rooms, roomOf(h.d, 0))
	}
	h = newHand(t, cfg)
	h.fleet(ranks(1, 2, 0))
	require.Equal(t, []int{2}, rooms)
	slots := []*Slot{h.put(pool.Entry{Prompt: 10}).slotNow(t), h.put(pool.Entry{Prompt: 10}).slotNow(t)}
	waits := h.put(pool.Entry{Prompt: 10})
	require.Equal(t, []int{2}, rooms, "there was less of it only")
	h.release(slots[0])
	waits.slotNow(t)
	require.Equal(t, []int{2, 1}, rooms, "nobody waits any more")
	h.at = h.at.Add(time.Hour) // the mean time with a slot grows: that alone wakes nobody
	h.release(slots[1])
	require.Equal(t, []int{2, 1, 1}, rooms, "one is free")
	h.put(pool.Entry{Prompt: 10}).slotNow(t)
	require.Equal(t, []int{2, 1, 1}, rooms)
}

// A slot without KV room is not one that a hand-off would get.
func TestRoomHeedsKV(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 100, 1000))
	for range 100 {
		s := h.put(pool.Entry{Prompt: 250}).slotNow(t)
		h.at = h.at.Add(30 * time.Second)
		h.release(s)
	}
	for range 3 {
		h.put(pool.Entry{Prompt: 250}).slotNow(t)
	}
	require.Equal(t, 1, roomOf(h.d, 0))
	require.InDelta(t, 3, roomOf(h.d, 15*time.Second), 1, "one is free, and half of four in half the time")
}

// What may be on its way is what gets a slot in time, as slots came free so far.
func TestRoomIsWhatGetsASlotInTime(t *testing.T) {
	p, now := newPublicPace(), board.Throughput{Seconds: board.PresumedSeconds}
	d := &Dispatcher{}
	require.Positive(t, roomOf(d, time.Second), "nothing is known")
	d.paces.Store("m", p)
	now.Slots = 20
	p.publish(&now)
	require.Equal(t, 10, roomOf(d, 15*time.Second), "of answers that are thought to take 30 s")
	now.Free = 4
	p.publish(&now)
	require.Equal(t, 14, roomOf(d, 15*time.Second))
	now.Seconds = 3
	p.publish(&now)
	require.InDelta(t, 104, roomOf(d, 15*time.Second), 1)
	now.Free = 0
	now.Seconds = 3600
	p.publish(&now)
	require.Equal(t, 1, roomOf(d, 15*time.Second), "something is always on its way")
}

// Hand-offs for a name that only some ranks list have the room of these, and take none of the
// others' room.
func TestANameHasTheRoomOfTheRanksThatListIt(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(2, 3, 0)
	ws[0].Lists, ws[1].Lists = board.NewNames([]string{"base"}), board.NewNames([]string{"base", "x"})
	h.fleet(ws)
	type room struct {
		n   int
		own bool
	}
	of := func(name string) [2]room {
		var r [2]room
		r[0].n, r[0].own = h.d.Room("m", name, 0)
		r[1].n, r[1].own = h.d.Free("m", name)
		return r
	}
	require.Equal(t, [2]room{{3, true}, {3, true}}, of("x"))
	require.Equal(t, [2]room{{6, false}, {6, false}}, of("base"))
	for range 8 {
		h.put(pool.Entry{Name: "x"})
	}
	require.Equal(t, [2]room{{1 - 5, true}, {0, true}}, of("x"))
	require.Equal(t, [2]room{{3, false}, {3, false}}, of("base"), "those that wait take no slot of the other rank")
	ws[0].Lists = ws[1].Lists
	h.fleet(ws)
	require.Equal(t, of("base"), of("x"))
	require.Equal(t, [2]room{{1 - 2, false}, {0, false}}, of("x"))
}
