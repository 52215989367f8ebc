package subset

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestImportsArePure(t *testing.T) { // a policy that can reach the network or the clock is no longer a policy
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"cmp", "math", "math/bits", "slices", "github.com/bits-and-blooms/bitset"}
	require.Subset(t, pure, pkg.Imports, "subset selection is arithmetic")
}

func TestF0(t *testing.T) {
	for _, c := range []struct {
		name      string
		w, margin int64
		workers   int
		want      int64
	}{
		{"tokens within the margin count once", 34226, 34226, 4, 34226},
		{"the first token over it costs every worker one", 52256, 52255, 2, 52254},
		{"the fullest rank has no margin", 38721, 0, 2, -38721},
		{"nothing added is worth nothing", 0, 0, 144, 0},
		{"a group of one has nothing to gain or lose", 900, 0, 1, 0},
	} {
		if got := F0(c.w, c.margin, c.workers); got != c.want {
			t.Errorf("%s: F0(%d, %d, %d) = %d, want %d", c.name, c.w, c.margin, c.workers, got, c.want)
		}
	}
}

type scoreCase struct {
	margins     []int64
	alpha, beta float64
	gamma       float64
	discounts   []float64
	score       Score
}

func drawScore(t *rapid.T) *scoreCase {
	c := &scoreCase{
		margins: rapid.SliceOfN(rapid.Int64Range(0, 300), 1, 12).Draw(t, "margins"),
		alpha:   rapid.SampledFrom([]float64{0.5, 1, 2}).Draw(t, "alpha"),
		beta:    rapid.SampledFrom([]float64{0, 0.5, 1, 2, 8, 48}).Draw(t, "beta"),
		gamma:   rapid.SampledFrom([]float64{0.5, 0.9, 1}).Draw(t, "gamma"),
	}
	c.discounts = Discounts(len(c.margins)-1, c.gamma)
	c.score.SetBRH(c.margins, c.discounts, c.alpha, c.beta)
	return c
}

func TestScoreAgreesWithTheSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawScore(t)
		w := rapid.Int64Range(0, 500).Draw(t, "w")
		want := F(w, c.margins, c.discounts, c.alpha, c.beta)
		require.InDelta(t, want, c.score.F(w), 1e-9*max(1, want, -want))
	})
}

func TestKneeIsWhereFStopsRising(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawScore(t)
		f := func(w int64) float64 { return F(w, c.margins, c.discounts, c.alpha, c.beta) }
		const end = 400 // past every margin
		for w := range int64(end) {
			if w < c.score.Knee() {
				require.Greater(t, f(w+1), f(w), "rises up to the knee: w = %d", w)
			} else {
				require.LessOrEqual(t, f(w+1)-f(w), 1e-9, "does not rise past it: w = %d", w)
			}
		}
	})
}

func TestBR0IsBRHWithoutHorizon(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		workers := rapid.IntRange(1, 144).Draw(t, "workers")
		m, w := rapid.Int64Range(0, 1<<20).Draw(t, "margin"), rapid.Int64Range(0, 1<<20).Draw(t, "w")
		var br0, brh Score
		br0.SetBR0(m, workers)
		brh.SetBRH([]int64{m}, Discounts(0, 0.9), 1, float64(workers))
		require.InDelta(t, br0.F(w), brh.F(w), 1e-3)
		require.Equal(t, br0.Knee(), brh.Knee())
	})
}

func TestScoresOfBR0TieOnlyWhenTheyAreTheSame(t *testing.T) {
	var s Score
	s.SetBR0(0, 8)
	require.False(t, s.Equal(4_000_000_000, 4_000_000_001))
	s.SetBRH([]int64{0}, Discounts(0, 1), 1, 8)
	require.True(t, s.Equal(4_000_000_000, 4_000_000_001), "nine digits in BR-H")
	require.False(t, s.Better(4_000_000_001, 4_000_000_000))
}

func TestScaled(t *testing.T) {
	require.EqualValues(t, 1000, Scaled(1000, 0), "0 reads as 1")
	require.EqualValues(t, 1250, Scaled(1000, 1.25))
	require.EqualValues(t, 667, Scaled(1000, 2.0/3), "whole tokens")
}
