package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/engine/circuit"
	"evenkeel/pool"
)

func (h *hand) refuse(s *Slot) {
	h.do(func(l *hand) { l.giveBack(s, Outcome{Kind: Failed, Refused: true}) })
}

// sparing has a rank refuse so many requests that it is spared: it is the emptiest, so that the
// policy wants it for each.
func sparing(t *testing.T, slots int) *hand {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, slots, 0))
	for range circuit.Limit {
		s := h.put(pool.Entry{Prompt: 1}).slotNow(t)
		require.Zero(t, s.Worker)
		h.refuse(s)
	}
	return h
}

func TestARankThatRefusesInARowIsSpared(t *testing.T) {
	h := sparing(t, 2)
	for range 2 {
		require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker)
	}
	w := h.put(pool.Entry{Prompt: 1})
	require.True(t, w.waits(), "for the other rank")
	require.Equal(t, h.at.Add(circuit.FirstOut), h.Next(), "the timer")
	h.pass(circuit.FirstOut)
	tries := w.slotNow(t)
	require.Zero(t, tries.Worker)
	w = h.put(pool.Entry{Prompt: 1})
	require.True(t, w.waits(), "one request tries it")
	h.refuse(tries)
	h.pass(2*circuit.FirstOut - 1)
	require.True(t, w.waits(), "for twice as long")
	h.pass(1)
	tries = w.slotNow(t)
	require.Zero(t, tries.Worker)
	w = h.put(pool.Entry{Prompt: 1})
	require.True(t, w.waits())
	tries.Started()
	told := h.told
	h.told = nil
	h.do(told...)
	require.Zero(t, w.slotNow(t).Worker, "its first event says that it takes requests")
	require.Zero(t, h.watched)
}

func TestWhatEndsARowOfRefusals(t *testing.T) {
	for name, do := range map[string]func(*hand){
		"an answer":             func(h *hand) { h.arrive(h.put(pool.Entry{Prompt: 1}).slotNow(t)) },
		"another process":       func(h *hand) { ws := ranks(2, 2, 0); ws[0].Process = 7; h.fleet(ws) },
		"nothing that is known": nil,
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			ws := ranks(2, 2, 0)
			ws[0].Process = 6
			h.fleet(ws)
			for range circuit.Limit - 1 {
				h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
			}
			if do != nil {
				do(h)
			}
			h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
			want := int32(0)
			if do == nil {
				want = 1
			}
			require.Equal(t, want, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker)
		})
	}
}

// A rank that is spared while its engine starts again takes requests at once: the new process has
// refused none.
func TestAnotherProcessIsNotSpared(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(2, 2, 0)
	ws[0].Process = 6
	h.fleet(ws)
	for range circuit.Limit {
		h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
	}
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "it is spared")
	ws[0].Process = 7
	h.fleet(ws)
	require.Zero(t, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker)
}

// What a rank got before it was spared says nothing of what it takes now, and a request that ends
// for other reasons tried nothing.
func TestATrialIsARequestThatItGotSince(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 3, 0))
	before := onRank(t, h, 0)
	h.pass(time.Millisecond)
	for range circuit.Limit {
		h.refuse(onRank(t, h, 0))
	}
	h.arrive(before)
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "it is spared still")
	h.pass(circuit.FirstOut)
	left := h.put(pool.Entry{Prompt: 1}).slotNow(t)
	require.Zero(t, left.Worker)
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "it is tried already")
	h.do(func(l *hand) { l.giveBack(left, Outcome{Kind: Cancelled}) })
	require.Zero(t, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker)
}

// onRank is the slot of a request that only one rank may have. It gets that though the rank is
// spared.
func onRank(t *testing.T, h *hand, rank int32) *Slot {
	return h.put(pool.Entry{Prompt: 1, Only: []int32{rank}}).slotNow(t)
}

// If all ranks refuse, all are asked: a request that may fail is better than one that must.
func TestWhereAllRanksRefuseAllAreAsked(t *testing.T) {
	for _, policy := range []string{"pooled", "immediate"} {
		h := newHand(t, Config{Policy: policy, DensePolicy: "immediate", Parse: fakePolicies(), TickLimit: time.Hour})
		h.fleet(ranks(2, 2, 0))
		for range 2 {
			for range circuit.Limit {
				h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
			}
		}
		for range 3 {
			h.refuse(h.put(pool.Entry{Prompt: 1}).slotNow(t))
		}
		h.pass(circuit.FirstOut)
		for range 3 {
			h.put(pool.Entry{Prompt: 1}).slotNow(t)
		}
	}
}

// A policy sees a rank that is spared as one that is down, and of one that is tried one slot.
func TestWhatPoliciesSeeOfARankThatIsSpared(t *testing.T) {
	var seen []policy.Worker
	spy := &fake{Spec: "spy", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		seen = append(seen[:0], s.Workers...)
		return dst
	}}
	h := newHand(t, Config{Policy: "spy", DensePolicy: "immediate", Parse: fakePolicies(spy), TickLimit: time.Hour})
	h.fleet(ranks(2, 3, 0))
	for range circuit.Limit {
		h.refuse(h.put(pool.Entry{Prompt: 1, Avoid: []int32{1}}).slotNow(t))
	}
	h.put(pool.Entry{Prompt: 1})
	require.False(t, seen[0].Up)
	require.Zero(t, seen[0].Free)
	h.pass(circuit.FirstOut)
	require.True(t, seen[0].Up)
	require.EqualValues(t, 1, seen[0].Free)
}

// An entry goes to a rank that comes last for it only if no other can take it at once, and to one
// that it avoids not at all.
func TestRanksThatComeLast(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(3, 1, 0))
	e := pool.Entry{Prompt: 1, Avoid: []int32{0}, Last: []int32{0, 1}}
	require.EqualValues(t, 2, h.put(e).slotNow(t).Worker)
	require.EqualValues(t, 1, h.put(e).slotNow(t).Worker)
	require.True(t, h.put(e).waits())
}

// A rank whose time is over counts as one that has room, although nothing waits at that moment.
func TestARankThatMayBeTriedHasRoom(t *testing.T) {
	h := sparing(t, 2)
	require.Equal(t, 2, h.pace.Free)
	h.pass(circuit.FirstOut)
	require.Equal(t, 4, h.pace.Free)
}
