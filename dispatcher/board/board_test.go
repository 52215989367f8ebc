package board

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

func TestEntriesThatNoRankCanEverTakeAreTurnedAwayAtOnce(t *testing.T) {
	h := newHand(t, testConfig())
	require.ErrorIs(t, h.put(pool.Entry{}).errNow(t), ErrNoWorkers, "no fleet at all")

	h.fleet(ranks(2, 1, 1000))
	require.ErrorIs(t, h.put(pool.Entry{Prompt: 1001}).errNow(t), ErrTooLarge)
	require.ErrorIs(t, h.put(pool.Entry{Model: "other"}).errNow(t), ErrNoWorkers)
	h.put(pool.Entry{Prompt: 1000}).slotNow(t)

	down := ranks(2, 1, 1000)
	down[0].Up, down[1].Up = false, false
	h.fleet(down)
	require.ErrorIs(t, h.put(pool.Entry{}).errNow(t), ErrNoWorkers, "all of them down")
}

func TestAChangeOfFleetReachesThoseThatWait(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 1000))
	running := h.put(pool.Entry{Prompt: 900}).slotNow(t)
	small, large := h.put(pool.Entry{Prompt: 100}), h.put(pool.Entry{Prompt: 800})

	h.fleet(ranks(1, 1, 500))
	require.ErrorIs(t, large.errNow(t), ErrTooLarge, "the rank has become too small for it")
	require.True(t, small.waits())

	h.fleet(nil)
	require.ErrorIs(t, small.errNow(t), ErrNoWorkers, "there is nothing left to wait for")
	require.Len(t, h.boards, 1, "the board stays while a slot of it is charged")
	h.release(running)
	require.Empty(t, h.boards)
}

func TestThoseThatWaitOutlastAnOutage(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(1, 1, 0)
	h.fleet(ws)
	running := h.put(pool.Entry{Prompt: 5}).slotNow(t)
	w := h.put(pool.Entry{Prompt: 5})

	ws[0].Up = false
	h.fleet(ws)
	h.release(running)
	require.True(t, w.waits(), "a rank that is down takes nothing")

	ws[0].Up = true
	h.fleet(ws)
	w.slotNow(t)
}

func TestThoseThatWaitAreToldOfALongOutage(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(1, 1, 0)
	h.fleet(ws)
	h.put(pool.Entry{Prompt: 5}).slotNow(t)
	w := h.put(pool.Entry{Prompt: 5})

	ws[0].Up = false
	h.fleet(ws)
	require.Equal(t, h.at.Add(outageGrace), h.Next(), "the loop wakes by itself")
	h.pass(outageGrace - 1)
	require.True(t, w.waits())
	h.pass(1)
	require.ErrorIs(t, w.errNow(t), ErrNoWorkers)
	require.Zero(t, h.Next(), "nobody waits any more")

	ws[0].Up = true
	h.fleet(ws)
	w = h.put(pool.Entry{Prompt: 5})
	h.pass(2 * outageGrace)
	require.True(t, w.waits(), "a full rank is no outage")
}

// Ranks whose group re-forms take nothing, and those that wait are not told of an outage.
func TestARankThatIsAwaitedIsNoOutage(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(1, 2, 0)
	h.fleet(ws)
	ws[0].Up, ws[0].Awaited = false, true
	h.fleet(ws)
	w := h.put(pool.Entry{Prompt: 5})
	h.pass(2 * outageGrace)
	require.True(t, w.waits())
	ws[0].Up, ws[0].Awaited = true, false
	h.fleet(ws)
	w.slotNow(t)
}

func TestARankKeepsItsLoadWhileItIsAway(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 1, 0))
	first, second := h.put(pool.Entry{Prompt: 70}).slotNow(t), h.put(pool.Entry{Prompt: 30}).slotNow(t)
	require.Equal(t, []int32{0, 1}, []int32{first.Worker, second.Worker})

	h.fleet(ranks(2, 1, 0)[1:])
	gone := h.status(h.at).Models[0].Workers[0]
	require.True(t, gone.Removed)
	require.EqualValues(t, 70, gone.KVTokens, "still charged")

	h.fleet(ranks(2, 1, 0))
	w := h.put(pool.Entry{Prompt: 1})
	require.True(t, w.waits(), "both ranks are full, the one that came back too")
	h.release(first)
	require.EqualValues(t, 0, w.slotNow(t).Worker)

	h.fleet(nil)
	h.release(second)
	h.fleet(ranks(2, 1, 0))
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "what was released meanwhile is free")
}

func TestSlotsMayChangeWhileRequestsRun(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 2, 0))
	a, b := h.put(pool.Entry{}).slotNow(t), h.put(pool.Entry{}).slotNow(t)

	h.fleet(ranks(1, 1, 0))
	w := h.put(pool.Entry{})
	h.release(a)
	require.True(t, w.waits(), "one runs and one slot is all there is")
	h.release(b)
	w.slotNow(t)

	again := h.put(pool.Entry{})
	require.True(t, again.waits())
	h.fleet(ranks(1, 2, 0))
	again.slotNow(t)
}

func TestWithdrawTakesOnlyTheEntryItNames(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{}).slotNow(t)
	w := h.put(pool.Entry{})
	impostor := *w.entry
	h.do(func(l *hand) { l.withdraw(&impostor) })
	require.True(t, w.waits())
	h.do(func(l *hand) { l.withdraw(w.entry) })
	require.ErrorIs(t, w.errNow(t), ErrWithdrawn)
	h.release(s)

	admitted := h.put(pool.Entry{})
	h.do(func(l *hand) { l.withdraw(admitted.entry) })
	admitted.slotNow(t) // the assignment came first: the caller owns the slot
}

func TestADuplicateIDIsRefusedAndTheFirstStays(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{}).slotNow(t)
	first := h.put(pool.Entry{})
	h.ids--
	require.ErrorIs(t, h.put(pool.Entry{}).errNow(t), ErrDuplicate)
	h.release(s)
	first.slotNow(t)
}

func TestDrainAnswersAllThatWaitsAndAllThatComes(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{}).slotNow(t)
	w := h.put(pool.Entry{})
	h.apply(Shutdown{})
	h.giveBack(s, Outcome{Kind: Cancelled, Generated: 7})
	require.ErrorIs(t, w.errNow(t), ErrDraining)
	late := h.make(pool.Entry{})
	h.enqueue(late)
	require.ErrorIs(t, late.errNow(t), ErrDraining)

	m := h.status(h.at).Models[0]
	require.Equal(t, []uint64{0, 1, 0}, []uint64{m.Finished, m.Cancelled, m.Failed})
	require.EqualValues(t, 7, m.OutputTokens)
	require.Zero(t, m.Workers[0].Used)
}

// A rank whose answers are empty is found by its own counters: what did not end whole is no answer,
// whatever else is said of it.
func TestARankCountsItsAnswersAndTheEmptyOnes(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 20, 0))
	end := func(rank int32, outcomes ...Outcome) {
		for _, o := range outcomes {
			s := h.put(pool.Entry{Prompt: 5, Only: []int32{rank}}).slotNow(t)
			h.do(func(h *hand) { h.giveBack(s, o) })
		}
	}
	counted := func() (all [][2]uint64) {
		for _, w := range h.status(h.at).Models[0].Workers {
			all = append(all, [2]uint64{w.Answers, w.Empty})
		}
		return all
	}
	whole, empty := Outcome{Kind: Finished, Generated: 90}, Outcome{Kind: Finished, Generated: 1, Empty: true}
	end(0, whole, empty, whole)
	end(1, empty, empty)
	require.Equal(t, [][2]uint64{{3, 1}, {2, 2}}, counted())
	for _, kind := range []Kind{Cancelled, Failed} {
		end(0, Outcome{Kind: kind, Empty: true}, Outcome{Kind: kind, Generated: 7})
	}
	require.Equal(t, [][2]uint64{{3, 1}, {2, 2}}, counted(), "these are no answers")
}
