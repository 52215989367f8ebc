package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Two ranks: one holds a long prompt, the other ten short ones. Where the rank with most requests
// makes a step longer whatever its KV, the rank with the long prompt gets the next requests; where
// KV alone counts, the other one does.
func TestWhereRequestsCountForThemselves(t *testing.T) {
	s := &Snapshot{C0Ms: 20, C1Ms: 1e-4, StepMs: 30}
	for g, running := range [][]Request{{{ID: 100, Prompt: 50_000, Generated: 1}}, nil} {
		for i := range 10 * g {
			running = append(running, Request{ID: uint64(200 + i), Prompt: 100, Generated: 1, Slot: int32(1 + i)})
		}
		s.Workers = append(s.Workers, Worker{ID: int32(g), Up: true, Free: 20, Running: running})
	}
	for i := range 6 {
		s.Pool = append(s.Pool, Entry{ID: uint64(1 + i), Prompt: 100})
	}
	on := func() (n [2]int) {
		for _, a := range newPolicy(t, "evenkeel").Decide(s, nil) {
			n[a.Worker]++
		}
		return n
	}
	require.Equal(t, [2]int{0, 6}, on())
	s.RowTokens = 500
	require.Equal(t, [2]int{6, 0}, on())
}

// Whatever requests cost, no fewer entries are placed, no fewer overdue ones among them, and no
// rule is broken.
func TestRowsPlaceNoFewer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawMeasured(t)
		s.Waits = nil
		v := evenkeelDefaults
		v.budget = searchCount * rapid.IntRange(1, 500).Draw(t, "evaluations of one")
		decide := func(budget int) (all []Assignment, overdue int) {
			v := v
			v.budget = budget
			p := newEvenkeel("", &v).(*evenkeel)
			all = p.Decide(s, nil)
			checkRules(t, p, s, all)
			for _, a := range all {
				if a.Stage == stageGuard {
					overdue++
				}
			}
			return all, overdue
		}
		s.Budget = 0
		short := false
		if p := newEvenkeel("", &v).(*evenkeel); p.beginRound(s) {
			_, short = p.roomIsScarce(s)
		}
		without, lateWithout := decide(v.budget / searchCount)
		s.RowTokens = rapid.Int64Range(0, 100_000).Draw(t, "KV tokens")
		all, late := decide(v.budget)
		if short { // there requests weigh more in a load instead
			return
		}
		require.GreaterOrEqual(t, len(all), len(without))
		require.GreaterOrEqual(t, late, lateWithout)
	})
}

func TestRowsDoNotAllocate(t *testing.T) {
	s, p := &Snapshot{C0Ms: 50, C1Ms: 1e-4, StepMs: 60, RowTokens: 2000}, newPolicy(t, "evenkeel")
	for g := range int32(64) {
		s.Workers = append(s.Workers, Worker{ID: g, Up: true, Free: 4,
			Running: []Request{{ID: uint64(1000 + g), Prompt: 9000 + g%7, Generated: 1, Slot: g}}})
		s.Pool = append(s.Pool, Entry{ID: uint64(g + 1), Prompt: 1000})
	}
	dst := p.Decide(s, nil)
	require.NotEmpty(t, dst)
	require.Zero(t, testing.AllocsPerRun(20, func() { dst = p.Decide(s, dst[:0]) }))
}
