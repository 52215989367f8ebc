package board

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestSlowTicksCutTheBudgetAndQuickOnesRaiseIt(t *testing.T) {
	var b budget
	require.EqualValues(t, 4000, b.evaluations())
	require.Equal(t, BudgetDown, b.spent(2*time.Millisecond))
	require.EqualValues(t, 3000, b.evaluations())
	for range ticksQuick - 1 {
		require.Empty(t, b.spent(100*time.Microsecond))
	}
	require.Empty(t, b.spent(700*time.Microsecond), "neither slow nor quick: the row is broken")
	for range ticksQuick - 1 {
		require.Empty(t, b.spent(100*time.Microsecond))
	}
	require.Equal(t, BudgetUp, b.spent(100*time.Microsecond))
	require.EqualValues(t, 3187, b.evaluations())
	for range 30 {
		b.spent(time.Second)
	}
	require.EqualValues(t, 250, b.evaluations())
	require.Empty(t, b.spent(time.Second), "no less")
}

func TestTheBudgetStaysInItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b budget
		for range rapid.IntRange(1, 2000).Draw(t, "ticks") {
			b.spent(time.Duration(rapid.SampledFrom([]int{1, 100, 600, 1500}).Draw(t, "µs")) * time.Microsecond)
			require.GreaterOrEqual(t, b.evaluations(), int32(250))
			require.LessOrEqual(t, b.evaluations(), int32(4000))
		}
	})
}

func TestTheBudgetReachesThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []int32
		p := &fake{Spec: "p"}
		admit := fakes.LeastKV(false)
		p.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			seen = append(seen, s.Budget)
			time.Sleep(3 * time.Millisecond)
			return admit(s, dst)
		}
		cfg := testConfig(p)
		cfg.Policy = "p"
		h := newHand(t, cfg)
		h.fleet(ranks(1, 9, 0))
		for range 3 {
			h.put(pool.Entry{}).slotNow(t)
		}
		require.Equal(t, []int32{4000, 3000, 2250}, seen)
		require.EqualValues(t, 3, count(t, h.metrics.budgetChanges.WithLabelValues("down")))
		require.NoError(t, h.setPolicy("p"))
		h.put(pool.Entry{}).slotNow(t)
		require.EqualValues(t, 4000, seen[3], "another policy starts anew")
	})
}
