package dispatcher

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// queueing are ranks whose engines' own queues renew, each with a full slot.
func queueing(t *testing.T, n, beyond int) (*hand, []waiting) {
	t.Helper()
	h := newHand(t, testConfig())
	ws := ranks(n, 1, 0)
	for i := range ws {
		ws[i].Beyond = beyond
	}
	h.do(func(l *loop) { l.setWorkers(ws) })
	var full []waiting
	for range n {
		w := h.put(pool.Entry{Prompt: 100})
		require.Equal(t, 1, len(w.result), "it has a slot")
		full = append(full, w)
	}
	return h, full
}

// taken is the slot an entry got, nil: none yet; it must not have been refused.
func taken(t *testing.T, w waiting) *Slot {
	t.Helper()
	select {
	case r := <-w.result:
		require.NoError(t, r.Err)
		return r.Slot
	default:
		return nil
	}
}

func TestAnEntryAtItsDeadlineGoesToAQueueThatRenews(t *testing.T) {
	h, full := queueing(t, 2, 2)
	first := taken(t, full[0])
	dies := h.at.Add(15 * time.Second)
	var all []waiting
	for range 5 {
		all = append(all, h.put(pool.Entry{Prompt: 10, Deadline: dies}))
	}
	drain := h.put(pool.Entry{Prompt: 10, Deadline: dies, Drain: true})
	h.pass(15*time.Second - 1)
	require.Nil(t, taken(t, all[0]), "it may get a slot yet")
	h.pass(1)
	per := map[int32]int{}
	var bound []*Slot
	for _, w := range all[:4] {
		s := taken(t, w)
		require.NotNil(t, s)
		require.True(t, s.Beyond)
		require.True(t, s.Waits())
		per[s.Worker]++
		bound = append(bound, s)
	}
	require.Equal(t, map[int32]int{0: 2, 1: 2}, per, "to the shortest queue, and no more than each may have")
	for _, w := range []waiting{all[4], drain} {
		require.ErrorIs(t, (<-w.result).Err, ErrExpired)
	}

	status := h.status(h.at).Models[0].Workers[first.Worker]
	require.Equal(t, []int{3, 2}, []int{status.Used, status.Beyond})
	late := h.put(pool.Entry{Prompt: 10})
	h.do(func(l *loop) { l.release(first, Outcome{}) })
	waits := 0
	for _, s := range bound {
		if s.Waits() {
			waits++
		}
	}
	require.Equal(t, 3, waits, "the oldest there has the slot now")
	require.Nil(t, taken(t, late), "and nobody else")
	slots, kv := h.boards["m"].ledger.drift()
	require.Zero(t, slots)
	require.Zero(t, kv)
}

func TestWhoWaitsNoLongerThanItsClientsAreWorthGetsNoQueue(t *testing.T) {
	for _, row := range []struct {
		name   string
		beyond int
		ttl    time.Duration
		want   error
	}{
		{"an engine that does not renew gets nothing beyond its slots", 0, 0, ErrExpired},
		{"the operator's own limit ends the wait", 2, 3 * time.Second, ErrPoolTimeout},
	} {
		t.Run(row.name, func(t *testing.T) {
			h, _ := queueing(t, 1, row.beyond)
			h.boards["m"].pool.SetTTL(row.ttl)
			w := h.put(pool.Entry{Prompt: 10, Deadline: h.at.Add(15 * time.Second)})
			h.pass(15 * time.Second)
			require.ErrorIs(t, (<-w.result).Err, row.want)
		})
	}
}

// What may be on its way is what gets a slot in time, as slots came free so far.
func TestRoomIsWhatGetsASlotInTime(t *testing.T) {
	p := newPace()
	d := &Dispatcher{}
	require.Positive(t, d.Room("m", time.Second), "nothing is known")
	d.paces.Store("m", p)
	p.slots.Store(20)
	require.Equal(t, 10, d.Room("m", 15*time.Second), "of answers that are thought to take 30 s")
	p.free.Store(4)
	require.Equal(t, 14, d.Room("m", 15*time.Second))
	for range 200 {
		p.ended(3 * time.Second)
	}
	require.InDelta(t, 104, d.Room("m", 15*time.Second), 1)
	p.free.Store(0)
	for range 200 {
		p.ended(time.Hour)
	}
	require.Equal(t, 1, d.Room("m", 15*time.Second), "something is always on its way")
}
