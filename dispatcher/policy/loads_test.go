package policy

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawLoads makes loads of a few ranks, with ties.
func drawLoads(t *rapid.T) *loads {
	l := &loads{load: rapid.SliceOfN(rapid.Int64Range(0, 40), 2, 7).Draw(t, "loads")}
	l.rescan()
	return l
}

func TestACeilingIsThatOfTheChangedLoads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLoads(t)
		l.startSmoothing(rapid.SampledFrom([]float64{0, 0.3}).Draw(t, "kappa"))
		n, m := len(l.load), &l.smoothed
		a := rapid.IntRange(0, n-1).Draw(t, "a")
		b := (a + rapid.IntRange(1, n-1).Draw(t, "b")) % n
		in, by := rapid.Int64Range(0, 25).Draw(t, "in"), rapid.Int64Range(-l.load[b], 25).Draw(t, "by")
		r := l.without(a)
		x, y := l.load[a]+in, l.load[b]+by
		one := m.value(max(r.largest, x), m.powerMeanTerm+m.powerMeanRise(l.load[a], x))
		two := m.value(max(r.largestWithout(b), x, y), m.powerMeanTerm+m.powerMeanRise(l.load[a], x)+m.powerMeanRise(l.load[b], y))

		l.changeLoad(a, in)
		require.InDelta(t, m.value(l.peak(), m.powerMeanTerm), one, 1, "one rank")
		require.Equal(t, slices.Max(l.load), l.peak())
		l.changeLoad(b, by)
		require.InDelta(t, m.value(l.peak(), m.powerMeanTerm), two, 1, "two ranks")
		require.Equal(t, slices.Max(l.load), l.peak())
		kept := l.top
		l.rescan()
		for i := range kept {
			require.Equal(t, l.top[i].load, kept[i].load, "the three largest are kept up to date")
		}
		r = l.without(a)
		l.changeLoad(a, -in)
		require.Equal(t, max(r.largest, l.load[a]), l.peak(), "without an entry")
	})
}

// Where the tangent touches, a small change of a load changes the ceiling as the root would.
func TestTheTangentIsThatOfTheMean(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLoads(t)
		for i := range l.load {
			l.load[i] = (l.load[i] + 1) << fixedBits
		}
		l.rescan()
		of := func() float64 {
			power := 0.0
			for _, x := range l.load {
				power += math.Pow(float64(x), 8)
			}
			return 0.4*float64(l.peak()) + 0.6*math.Pow(power/float64(len(l.load)), 1./8)
		}
		ceiling := func() float64 { return float64(l.smoothed.value(l.peak(), l.smoothed.powerMeanTerm)) }
		l.startSmoothing(0.6)
		require.InDelta(t, of(), ceiling(), 1)
		before, exact := ceiling(), of()
		l.changeLoad(rapid.IntRange(0, len(l.load)-1).Draw(t, "rank"), 1<<8)
		require.InDelta(t, of()-exact, ceiling()-before, 2)
	})
}

// A tangent at loads of one token rises beyond all numbers: it may not turn into a gain.
func TestALargePromptBesideTinyLoadsIsNoGain(t *testing.T) {
	l := &loads{load: []int64{1 << fixedBits, 0, 0}}
	l.rescan()
	l.startSmoothing(0.6)
	large := int64(2_000_000) << fixedBits
	const group = 1024
	got := l.smoothed.value(large, l.smoothed.powerMeanTerm+l.smoothed.powerMeanRise(0, large))
	require.Greater(t, group*got, group*large, "a product that overflows would be negative")
}
