package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// queueing are ranks whose engines' own queues renew, each with a full slot.
func queueing(t *testing.T, n, beyond int) (*hand, []waiting) {
	t.Helper()
	h := newHand(t, testConfig())
	ws := ranks(n, 1, 0)
	for i := range ws {
		ws[i].MaxEngineQueue = beyond
	}
	h.do(func(l *hand) { l.setWorkers(ws) })
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
	drain := h.put(pool.Entry{Prompt: 10, Deadline: dies, Discard: true})
	h.pass(15*time.Second - 1)
	require.Nil(t, taken(t, all[0]), "it may get a slot yet")
	h.pass(1)
	per := map[int32]int{}
	var bound []*Slot
	for _, w := range all[:4] {
		s := taken(t, w)
		require.NotNil(t, s)
		require.True(t, s.InEngineQueue)
		require.True(t, s.Waits())
		per[s.Worker]++
		bound = append(bound, s)
	}
	require.Equal(t, map[int32]int{0: 2, 1: 2}, per, "to the shortest queue, and no more than each may have")
	for _, w := range []waiting{all[4], drain} {
		require.ErrorIs(t, (<-w.result).Err, ErrExpired)
	}

	status := h.status(h.at).Models[0].Workers[first.Worker]
	require.Equal(t, []int{3, 2}, []int{status.Used, status.InEngineQueue})
	late := h.put(pool.Entry{Prompt: 10})
	h.do(func(l *hand) { l.giveBack(first, Outcome{}) })
	waits := 0
	for _, s := range bound {
		if s.Waits() {
			waits++
		}
	}
	require.Equal(t, 3, waits, "the oldest there has the slot now")
	require.Nil(t, taken(t, late), "and nobody else")
	slots, kv := h.boards["m"].drift()
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

// Slots are free, KV is not: what is bound at its deadline waits in the engine's
// queue all the same, and counts there.
func TestAQueueForKVRoomIsBoundedToo(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(2, 10, 1000)
	ws[1].Capacity = 400
	for i := range ws {
		ws[i].MaxEngineQueue = 2
	}
	h.fleet(ws)
	held := []*Slot{h.put(pool.Entry{Prompt: 500}).slotNow(t), h.put(pool.Entry{Prompt: 350}).slotNow(t),
		h.put(pool.Entry{Prompt: 400}).slotNow(t)}
	require.Equal(t, []int32{0, 1, 0}, []int32{held[0].Worker, held[1].Worker, held[2].Worker})
	dies := h.at.Add(15 * time.Second)
	var all []waiting
	for range 8 {
		all = append(all, h.put(pool.Entry{Prompt: 600, Deadline: dies}))
	}
	h.pass(15 * time.Second)
	var bound []*Slot
	for _, w := range all[:2] {
		s := w.slotNow(t)
		require.EqualValues(t, 0, s.Worker, "the other rank can never take it")
		require.True(t, s.InEngineQueue)
		require.True(t, s.Waits())
		bound = append(bound, s)
	}
	for _, w := range all[2:] {
		require.ErrorIs(t, w.errNow(t), ErrExpired)
	}
	require.EqualValues(t, 2, count(t, h.metrics.beyond))
	require.Equal(t, 2, h.status(h.at).Models[0].Workers[0].InEngineQueue)

	waits := func() []bool { return []bool{bound[0].Waits(), bound[1].Waits()} }
	h.release(held[2])
	require.Equal(t, []bool{true, true}, waits(), "there are slots, but 500 and 600 do not fit yet")
	h.release(held[0])
	require.Equal(t, []bool{false, true}, waits())
	bound[1].Started()
	require.False(t, bound[1].Waits(), "the engine knows better")
	require.Zero(t, h.status(h.at).Models[0].Workers[0].InEngineQueue)
	h.release(bound...)
	require.Zero(t, h.boards["m"].ranks[0].kv)
}

// At its deadline an entry goes where the engine can begin with it, if there is such a rank.
func TestAnEntryAtItsDeadlineTakesARankThatCanBegin(t *testing.T) {
	never := &fake{Spec: "never", Decides: func(*policy.Snapshot, []policy.Assignment) []policy.Assignment { return nil }}
	h := newHand(t, testConfig(never))
	ws := ranks(2, 10, 1000)
	for i := range ws {
		ws[i].MaxEngineQueue = 2
	}
	h.fleet(ws)
	held := []*Slot{h.put(pool.Entry{Prompt: 950}).slotNow(t), h.put(pool.Entry{Prompt: 700}).slotNow(t)}
	require.NoError(t, h.setPolicy("never"))
	w := h.put(pool.Entry{Prompt: 300, Deadline: h.at.Add(time.Second)})
	h.pass(time.Second)
	s := w.slotNow(t)
	require.Equal(t, held[1].Worker, s.Worker)
	require.False(t, s.InEngineQueue)
	require.False(t, s.Waits())
}

// A rank is limited where others' requests may still be, or its engine is fresh in
// service. Its queue gets nothing then.
func TestALimitedRankHasNoQueue(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(1, 4, 0)
	ws[0].MaxEngineQueue, ws[0].Limit = 3, 1
	h.fleet(ws)
	first := h.put(pool.Entry{Prompt: 10}).slotNow(t)
	w := h.put(pool.Entry{Prompt: 10, Deadline: h.at.Add(time.Second)})
	h.pass(time.Second)
	require.ErrorIs(t, w.errNow(t), ErrExpired)
	ws[0].Limit = 0
	h.fleet(ws)
	for range 3 {
		h.put(pool.Entry{Prompt: 10}).slotNow(t)
	}
	w = h.put(pool.Entry{Prompt: 10, Deadline: h.at.Add(time.Second)})
	h.pass(time.Second)
	s := w.slotNow(t)
	require.True(t, s.Waits())
	ws[0].Limit = 2
	h.fleet(ws)
	h.release(first)
	require.True(t, s.Waits(), "three of ours run there")
}
