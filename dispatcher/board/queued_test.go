package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// An engine begins with the requests in its queue in order, as slots and KV room come free.
func TestARequestLeavesItsEnginesQueueWhenASlotComesFree(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 3, 1000))
	held := []*Slot{h.put(pool.Entry{Prompt: 400}).slotNow(t), h.put(pool.Entry{Prompt: 300}).slotNow(t),
		h.put(pool.Entry{Prompt: 200}).slotNow(t)}
	records, r := h.boards["m"].slots.records, h.boards["m"].ranks[0]
	for _, s := range held[1:] { // as if they had been sent ahead
		records[s.index].inEngineQueue = true
		r.engineQueued++
	}
	r.Slots = 1
	waits := func() []bool {
		return []bool{records[held[1].index].inEngineQueue, records[held[2].index].inEngineQueue}
	}
	h.boards["m"].promoteQueued(r)
	require.Equal(t, []bool{true, true}, waits())
	require.Equal(t, 2, h.status(h.at).Models[0].Workers[0].InEngineQueue)
	h.release(held[0])
	require.Equal(t, []bool{false, true}, waits(), "the older one has the slot")
	held[2].Started()
	h.status(h.at)
	h.boards["m"].refreshLoad(r)
	require.Equal(t, []bool{false, false}, waits(), "the engine knows better")
}

func TestAnEntryAtItsDeadlineIsRefused(t *testing.T) {
	for _, row := range []struct {
		name string
		ttl  time.Duration
		want error
	}{
		{"its hand-off's", 0, ErrExpired},
		{"the operator's own limit ends the wait", 3 * time.Second, ErrPoolTimeout},
	} {
		t.Run(row.name, func(t *testing.T) {
			h := newHand(t, testConfig())
			h.fleet(ranks(1, 1, 0))
			h.put(pool.Entry{Prompt: 100}).slotNow(t)
			h.boards["m"].pool.SetTTL(row.ttl)
			w := h.put(pool.Entry{Prompt: 10, Deadline: h.at.Add(15 * time.Second)})
			h.pass(15 * time.Second)
			require.ErrorIs(t, w.errNow(t), row.want)
		})
	}
}
