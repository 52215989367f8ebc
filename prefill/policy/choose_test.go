package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// fleet is n candidates with accounts of a busy day.
func fleet(n int) []Engine {
	rng := rand.New(rand.NewPCG(1, 2))
	all := make([]Engine, n)
	for i := range all {
		id := fmt.Sprintf("p%d/%d", i/8, i%8)
		all[i] = at(id, 32_000, float64(rng.IntN(32_000)), func(e *Engine) {
			e.QueuedNewTokens, e.BS, e.BacklogMs = float64(rng.IntN(20_000)), float64(rng.IntN(9)), float64(rng.IntN(4000))
			e.Running, e.Waiting, e.KVTokens, e.ActiveBlocks = e.BS, 0, 10*e.QueuedNewTokens, float64(rng.IntN(900))
		})
		all[i].Order = i
	}
	Aggregate(all)
	return all
}

func TestANumberThatIsNoneRanksLast(t *testing.T) {
	l, err := NewLibrary(map[string]Definition{"mine": {Score: "p_tokens / bs"}})
	require.NoError(t, err)
	p, err := l.Parse("mine")
	require.NoError(t, err)
	candidates := []Engine{at("a", 100, 0, nil), at("b", 100, 0, queued(1e6, 9))}
	choice := p.Choose(&Query{ID: "r"}, candidates)
	require.Equal(t, "b", candidates[choice.Index].ID)
	require.Equal(t, 1, choice.Bad)
	require.False(t, choice.Fallback)

	candidates[1].BS = 0
	choice = p.Choose(&Query{ID: "r"}, candidates)
	require.Equal(t, "a", candidates[choice.Index].ID, "all are bad: lmetric chooses")
	require.Equal(t, 2, choice.Bad)
	require.True(t, choice.Fallback)
	require.InDelta(t, 100.0, p.ScoreOf(choice.Index), 1e-9)
}

func TestOnlyEqualScoresAreATie(t *testing.T) {
	got, _ := choose(t, "lmetric", "r", at("a", 1000, 0, queued(1, 0)), at("b", 1000, 16, queued(18, 0)))
	require.Equal(t, "a", got, "b hits more and costs a token more")
}

// Whatever the accounts say, the chosen one has the lowest score, and neither
// the order of the candidates nor who else is there changes who wins.
func TestTheLowestScoreWinsInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := rapid.SampledFrom(Names()).Draw(t, "policy")
		if spec == "round-robin" {
			return
		}
		p, err := (*Library)(nil).Parse(spec)
		require.NoError(t, err)
		n := rapid.IntRange(1, 9).Draw(t, "candidates")
		all := make([]Engine, n)
		few := rapid.SampledFrom([]float64{0, 16, 160, 4000})
		for i := range all {
			all[i] = at(fmt.Sprintf("p%d/0", i), 4000, few.Draw(t, "matched"), func(e *Engine) {
				e.BS, e.QueuedNewTokens, e.BacklogMs = float64(rapid.IntRange(0, 3).Draw(t, "bs")), few.Draw(t, "queued"), few.Draw(t, "backlog")
			})
		}
		Aggregate(all)
		q := Query{ID: rapid.StringN(0, 8, -1).Draw(t, "id"), Cursor: -1}
		choice := p.Choose(&q, all)
		winner := all[choice.Index].ID
		for i := range all {
			require.LessOrEqual(t, p.ScoreOf(choice.Index), p.ScoreOf(i)+1e-9*math.Abs(p.ScoreOf(i)))
		}
		shuffled := rapid.Permutation(all).Draw(t, "order")
		require.Equal(t, winner, shuffled[p.Choose(&q, shuffled).Index].ID)
	})
}

func TestExplainPutsTheChosenFirstAndIsBounded(t *testing.T) {
	p, err := (*Library)(nil).Parse("finish")
	require.NoError(t, err)
	all := fleet(40)
	choice := p.Choose(&Query{ID: "r"}, all)
	table := p.Explain(all, choice.Index, 5)
	require.Len(t, table, 5)
	require.Equal(t, all[choice.Index].ID, table[0].Candidate)
	require.True(t, table[0].Chosen)
	for i := 1; i < len(table); i++ {
		require.LessOrEqual(t, *table[i-1].Score, *table[i].Score)
		require.False(t, table[i].Chosen)
	}
}

func TestBuiltInPoliciesAllocateNothing(t *testing.T) {
	all := fleet(64)
	for _, name := range Names() {
		p, err := (*Library)(nil).Parse(name)
		require.NoError(t, err)
		q := Query{ID: "3f1c9a64-7d2e-4b51-9c07-7d1c2b3a4e5f", Cursor: 3}
		allocs := testing.AllocsPerRun(100, func() { p.Choose(&q, all) })
		require.Zero(t, allocs, "policy %s", name)
	}
}

// Target: 20 µs mean at 64 candidates; expressions 100 µs p99.
func BenchmarkChoose(b *testing.B) {
	l, err := NewLibrary(map[string]Definition{"mine": {Filter: "kv_usage < 0.85", Score: "p_tokens * (bs + 1) + 0.5 * rtt_ms"}})
	require.NoError(b, err)
	all := fleet(64)
	q := Query{ID: "3f1c9a64-7d2e-4b51-9c07-7d1c2b3a4e5f", Cursor: 3}
	for _, name := range l.Names() {
		p, err := l.Parse(name)
		require.NoError(b, err)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for i := range all {
					all[i].SetPrompt(32_000, all[i].HitTokens)
				}
				Aggregate(all)
				p.Choose(&q, all)
			}
		})
	}
}
