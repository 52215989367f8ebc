package effort

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestSlowTicksCutTheBudgetAndQuickOnesRaiseIt(t *testing.T) {
	var b Budget
	require.EqualValues(t, 4000, b.Evaluations())
	b.Spent(2 * time.Millisecond)
	require.EqualValues(t, 3000, b.Evaluations())
	for range ticksQuick - 1 {
		b.Spent(100 * time.Microsecond)
		require.EqualValues(t, 3000, b.Evaluations())
	}
	b.Spent(700 * time.Microsecond)
	require.EqualValues(t, 3000, b.Evaluations(), "neither slow nor quick: the row is broken")
	for range ticksQuick - 1 {
		b.Spent(100 * time.Microsecond)
		require.EqualValues(t, 3000, b.Evaluations())
	}
	b.Spent(100 * time.Microsecond)
	require.EqualValues(t, 3187, b.Evaluations())
	for range 30 {
		b.Spent(time.Second)
	}
	require.EqualValues(t, 250, b.Evaluations())
	b.Spent(time.Second)
	require.EqualValues(t, 250, b.Evaluations(), "no less")
}

func TestTheBudgetStaysInItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b Budget
		for range rapid.IntRange(1, 2000).Draw(t, "ticks") {
			b.Spent(time.Duration(rapid.SampledFrom([]int{1, 100, 600, 1500}).Draw(t, "µs")) * time.Microsecond)
			require.GreaterOrEqual(t, b.Evaluations(), int32(250))
			require.LessOrEqual(t, b.Evaluations(), int32(4000))
		}
	})
}
