package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// levelDecoding is four ranks with one request of 10,000 tokens each that decodes. A step takes 50
// ms and a microsecond for each token of the fullest rank, so 60 ms. Requests of 90,000 and 300
// tokens wait.
func levelDecoding(free int32) *Snapshot {
	s := &Snapshot{
		C0Ms: 50, C1Ms: 1e-3, StepMs: 60,
		Workers: level(4, 10_000, free), Pool: []Entry{{ID: 1, Prompt: 90_000, WaitMs: 60}, {ID: 2, Prompt: 300}},
	}
	for g := range s.Workers {
		s.Workers[g].Running[0].Generated = 1
	}
	return s
}

// The long prompt makes each step 90 ms longer. Its wait of two steps costs 120 ms. Three steps
// cost the four requests that run 3*4*90 = 1,080 ms.
func TestAPromptThatMakesStepsMuchLongerWaits(t *testing.T) {
	p := newPolicy(t, "evenkeel")
	got, left := Explain(p, levelDecoding(1))
	require.Equal(t, [][2]int{{2, 0}}, pairs(got))
	require.Equal(t, []Unplaced{{1, "held back: each step would become 90 ms longer"}}, left)
	require.Equal(t, 1, Held(p))
	require.EqualValues(t, 90, HoldReportOf(p).NextMs, "half a step later than the next one")

	for _, tt := range []struct {
		name string
		spec string
		set  func(*Snapshot)
	}{
		{"but not after so many steps", "evenkeel", func(s *Snapshot) { s.Pool[0].WaitMs = 22 * 60 }},
		{"nor when it is urgent", "evenkeel", func(s *Snapshot) { s.Pool[0].Urgent = true }},
		{"nor if it is never to be", "evenkeel", func(s *Snapshot) { s.Pool[0].Express = true }},
		{"nor for longer than it may", "evenkeel:max_hold=0.05", func(*Snapshot) {}},
		{"nor if nobody knows what a token costs", "evenkeel", func(s *Snapshot) { s.C1Ms = 0 }},
		{"nor if very many wait", "evenkeel", func(s *Snapshot) {
			s.Workers[0].Free = 2 * maxWaitingToHold
			for id := range uint64(maxWaitingToHold) {
				s.Pool = append(s.Pool, Entry{ID: 10 + id, Prompt: 1})
			}
		}},
		{"nor if nobody else decodes", "evenkeel", func(s *Snapshot) {
			for g := range s.Workers {
				s.Workers[g].Running[0].Generated = 0
			}
		}},
		{"nor if it has yet to be prefilled", "evenkeel", func(s *Snapshot) { s.Early = true }},
		{"nor if another rank is as full", "evenkeel", func(s *Snapshot) { s.Workers[3].Running[0].Prompt = 100_000 }},
		{"nor if the time for which a longer step counts is short", "evenkeel:hold=0.2", func(*Snapshot) {}},
		{"nor with hold=0", "evenkeel:hold=0", func(*Snapshot) {}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := levelDecoding(1)
			tt.set(s)
			p := newPolicy(t, tt.spec)
			require.Contains(t, placedIDs(p.Decide(s, nil)), uint64(1))
			require.Zero(t, Held(p))
		})
	}
	s := levelDecoding(1)
	closeAllBut(s, 1)
	require.Equal(t, [][2]int{{2, 0}}, pairs(p.Decide(s, nil)))
	require.Zero(t, Held(p), "the other takes the only slot")
	_, left = Explain(p, &Snapshot{Workers: level(4, 10_000, 1)})
	require.Empty(t, left)
	require.Zero(t, Held(p), "it remembers no earlier round")
}

// closeAllBut leaves free slots on the first n ranks only.
func closeAllBut(s *Snapshot, n int) {
	for g := n; g < len(s.Workers); g++ {
		s.Workers[g].Free = 0
	}
}

func placedIDs(assigned []Assignment) (ids []uint64) {
	for _, a := range assigned {
		ids = append(ids, a.Entry)
	}
	return ids
}

// Each of two prompts fits below the fullest rank, but only on the same rank.
func TestOfTwoPromptsForOneRankTheShorterWaits(t *testing.T) {
	s := levelDecoding(2)
	s.Workers[0].Running[0].Prompt, s.Workers[3].Running[0].Prompt = 1000, 40_000
	closeAllBut(s, 1)
	s.Pool[0].Prompt, s.Pool[1].Prompt = 39_000, 30_000
	s.Workers[0].Free = 3
	p := newPolicy(t, "evenkeel")
	require.Equal(t, [][2]int{{1, 0}}, pairs(p.Decide(s, nil)))
	require.Equal(t, 1, Held(p))
}

// Whatever the round: who is held is neither overdue nor has waited for max_hold, a slot stays
// free, and all others are placed as if those that are held were not there.
func TestWhoIsHeldLeavesASlotFree(t *testing.T) {
	held := 0
	rapid.Check(t, func(t *rapid.T) {
		s := drawMeasured(t)
		s.Aggregated, s.C1Ms, s.StepMs = false, 0.1, 50
		for g := range s.Workers {
			w := &s.Workers[g]
			w.Free += rapid.Int32Range(0, 6).Draw(t, "more free slots")
			for i := range w.Running {
				w.Running[i].Generated++
			}
		}
		for i := range s.Pool {
			s.Pool[i].WaitMs /= 8
			s.Pool[i].Prompt *= rapid.Int32Range(1, 5).Draw(t, "times as long")
		}
		p := newPolicy(t, "evenkeel:max_hold=0.3")
		got := p.Decide(s, nil)
		n := Held(p)
		held += n
		if n == 0 {
			return
		}
		free, others := 0, clone(s)
		for _, r := range s.ranksAfter(got) {
			free += max(0, int(r.free))
		}
		require.Positive(t, free)
		others.Pool = nil
		h := &p.(*evenkeel).heldBack
		for i := range s.Pool {
			addsMs, isHeld := h.reason(i)
			if !isHeld {
				others.Pool = append(others.Pool, s.Pool[i])
				continue
			}
			require.Positive(t, addsMs)
			require.False(t, isOverdue(s, &s.Pool[i]))
			require.Less(t, s.Pool[i].WaitMs, float32(300))
			require.NotContains(t, placedIDs(got), s.Pool[i].ID)
		}
		require.Equal(t, newPolicy(t, "evenkeel:hold=0").Decide(others, nil), got)
	})
	require.Positive(t, held, "some are held")
}

func TestHoldingBackDoesNotAllocate(t *testing.T) {
	s := levelDecoding(8)
	for id := range 100 {
		s.Pool = append(s.Pool, Entry{ID: uint64(10 + id), Prompt: int32(1000 * (id % 7))})
	}
	for range 40 {
		s.Workers = append(s.Workers, s.Workers[0])
		s.Workers[len(s.Workers)-1].ID = int32(len(s.Workers) - 1)
	}
	p := newPolicy(t, "evenkeel")
	out := p.Decide(s, nil)
	require.Positive(t, Held(p))
	require.Zero(t, testing.AllocsPerRun(20, func() { out = p.Decide(s, out[:0]) }))
}
