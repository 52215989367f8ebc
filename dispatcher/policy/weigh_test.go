package policy

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestEveryPolicyWeighsTheRankItChose(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			p, err := Parse(name)
			require.NoError(t, err)
			if _, ok := p.(Weigher); !ok {
				t.Skip("it tells nothing of the ranks that it did not choose")
			}
			rapid.Check(t, func(t *rapid.T) {
				s := drawSnapshot(t)
				p, err := Parse(name)
				require.NoError(t, err)
				w := p.(Weigher)
				prompt := map[uint64]int64{}
				for _, e := range s.Pool {
					prompt[e.ID] = int64(e.Prompt)
				}
				before := clone(s)
				got := p.Decide(s, nil)
				worth := make([]float64, len(s.Workers))
				for i, a := range got {
					_, ok := w.Weigh(s, i, a, prompt[a.Entry], worth)
					if !ok {
						continue
					}
					for g := range worth {
						require.False(t, !math.IsNaN(worth[g]) && !s.Workers[g].Up, "worker %d is down and worth %v", s.Workers[g].ID, worth[g])
					}
					at, _ := s.index(a.Worker)
					require.False(t, math.IsNaN(worth[at]), "what was chosen has a worth")
					if _, exact := p.(*evenkeel); exact {
						require.InDelta(t, a.Score, worth[at], 1e-6*max(1, math.Abs(a.Score)), "the score is its worth there")
					}
				}
				require.Equal(t, before, s, "the snapshot is the board's")
				again, err := Parse(p.Name())
				require.NoError(t, err)
				require.Equal(t, again.Decide(s, nil), got)
				first := p.Decide(s, nil)
				unasked := again.Decide(s, nil)
				require.Equal(t, unasked, first, "a policy that was asked decides as one that was not")
			})
		})
	}
}

func TestWeighTellsWhyTheEmptierRankWasTaken(t *testing.T) {
	s := &Snapshot{
		Workers: []Worker{
			{ID: 3, Up: true, Free: 2, Running: []Request{{ID: 1, Prompt: 900}}},
			{ID: 5, Up: true, Free: 2, Running: []Request{{ID: 2, Prompt: 100}}},
			{ID: 9, Up: true, Running: []Request{{ID: 4, Prompt: 50}}}, // full
		},
		Pool: []Entry{{ID: 7, Prompt: 300}},
	}
	for _, c := range []struct {
		policy   string
		most     float64 // on worker 5, which has it
		other    float64 // on worker 3
		smallest bool
	}{
		{"evenkeel", 300, 300 - 3*300, false}, // it raises the fullest of three ranks, or none
		{"br0", 300, 300 - 3*300, false},
		{"pjsq-kv", 100, 900, true},
		{"pjsq", 1, 1, true},
	} {
		t.Run(c.policy, func(t *testing.T) {
			p, err := Parse(c.policy)
			require.NoError(t, err)
			got := p.Decide(s, nil)
			require.Len(t, got, 1)
			worth := make([]float64, 3)
			less, ok := p.(Weigher).Weigh(s, 0, got[0], 300, worth)
			require.True(t, ok)
			require.Equal(t, c.smallest, less)
			require.InDelta(t, c.most, worth[1], 1e-3)
			require.InDelta(t, c.other, worth[0], 1e-3)
			require.True(t, math.IsNaN(worth[2]), "a full rank is none of the choice")
		})
	}
}

func TestWeighingDoesNotAllocate(t *testing.T) {
	l := newClosedLoop(16, 8, 64)
	for g := range l.s.Workers {
		l.s.Workers[g].Free = 2
	}
	for _, name := range []string{"evenkeel", "brh", "br0", "pjsq-kv"} {
		p, err := Parse(name)
		require.NoError(t, err)
		var got []Assignment
		worth := make([]float64, len(l.s.Workers))
		prompt := map[uint64]int64{}
		for _, e := range l.s.Pool {
			prompt[e.ID] = int64(e.Prompt)
		}
		round := func() {
			got = p.Decide(&l.s, got[:0])
			for i, a := range got {
				p.(Weigher).Weigh(&l.s, i, a, prompt[a.Entry], worth)
			}
		}
		round()
		require.NotEmpty(t, got)
		require.Zero(t, testing.AllocsPerRun(20, round), name)
	}
}
