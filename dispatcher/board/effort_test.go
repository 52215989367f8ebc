package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestSlowTicksCutTheBudgetAndQuickOnesRaiseIt(t *testing.T) {
	var b searchBudget
	require.EqualValues(t, 4000, b.evaluations())
	b.adapt(2 * time.Millisecond)
	require.EqualValues(t, 3000, b.evaluations())
	for range quickRoundsNeeded - 1 {
		b.adapt(100 * time.Microsecond)
		require.EqualValues(t, 3000, b.evaluations())
	}
	b.adapt(700 * time.Microsecond)
	require.EqualValues(t, 3000, b.evaluations(), "neither slow nor quick: the row is broken")
	for range quickRoundsNeeded - 1 {
		b.adapt(100 * time.Microsecond)
		require.EqualValues(t, 3000, b.evaluations())
	}
	b.adapt(100 * time.Microsecond)
	require.EqualValues(t, 3187, b.evaluations())
	for range 30 {
		b.adapt(time.Second)
	}
	require.EqualValues(t, 250, b.evaluations())
	b.adapt(time.Second)
	require.EqualValues(t, 250, b.evaluations(), "no less")
}

func TestTheBudgetStaysInItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b searchBudget
		for range rapid.IntRange(1, 2000).Draw(t, "ticks") {
			b.adapt(time.Duration(rapid.SampledFrom([]int{1, 100, 600, 1500}).Draw(t, "µs")) * time.Microsecond)
			require.GreaterOrEqual(t, b.evaluations(), int32(250))
			require.LessOrEqual(t, b.evaluations(), int32(4000))
		}
	})
}
