package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Two ranks: one holds a long prompt, the other ten short ones. Where the rank with most requests makes a step longer whatever its KV,
// the rank with the long prompt gets the next requests; where KV alone counts, the other one does.
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
		for _, a := range newPolicy(t, "evenkeel:hold=0").Decide(s, nil) {
			n[a.Worker]++
		}
		return n
	}
	require.Equal(t, [2]int{0, 6}, on())
	s.RowTokens = 500
	require.Equal(t, [2]int{6, 0}, on())
}

// Whatever requests cost, no fewer entries are placed, no rule is broken, and the step that is foreseen is no longer than without a
// limit for ranks.
func TestRowsPlaceNoFewer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawMeasured(t)
		s.Waits = nil
		v := joint
		v.hold, v.near = 0, 0
		free := newEvenkeel("", &v).(*evenkeel)
		without := len(free.Decide(s, nil))
		s.RowTokens = rapid.Int64Range(0, 100_000).Draw(t, "KV tokens")
		p := newEvenkeel("", &v).(*evenkeel)
		all := p.Decide(s, nil)
		checkRules(t, p, s, all)
		require.GreaterOrEqual(t, len(all), without)
	})
}

func TestRowsDoNotAllocate(t *testing.T) {
	s, p := crowd(64), newPolicy(t, "evenkeel")
	s.RowTokens = 2000
	dst := p.Decide(s, nil)
	require.NotEmpty(t, dst)
	require.Zero(t, testing.AllocsPerRun(20, func() { dst = p.Decide(s, dst[:0]) }))
}
