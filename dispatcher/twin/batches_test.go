package twin

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBatchesTellHowUnsteadyADifferenceIs(t *testing.T) {
	var steady, same, unsteady Batches
	for i := range 800 {
		after := float64(i) / 800
		steady.add(after, 40)
		same.add(after, 42)
		unsteady.add(after, 41+float64(i/100%2)*4) // 41, 45, 41, ...
	}
	unsteady.add(1, 45) // the last moment belongs to the last part
	require.InDelta(t, 40, steady.Mean(), 1e-9)
	require.InDelta(t, 0, same.apart(&steady), 1e-6, "the same difference in each part")
	require.InDelta(t, math.Sqrt(8*4./7/8), unsteady.apart(&steady), 0.01)
	require.Zero(t, (&Batches{}).Mean())
	require.Zero(t, steady.apart(&Batches{}), "nothing to compare")
}

func TestAnErrorIsTwiceTheDeviationAndAtLeastWhatItIsNow(t *testing.T) {
	var s scatter
	require.InDelta(t, 0.02, s.add(0.01, 60), 1e-9)
	for range 100 {
		s.add(-0.01, 60)
	}
	require.InDelta(t, 0.02, s.add(0.01, 60), 1e-6)
	require.InDelta(t, 0.01, s.add(0.005, 240), 1e-6, "a window that is four times as long is off by half as much")
	require.InDelta(t, 0.2, s.add(0.2, 60), 0.05)
	require.Greater(t, s.add(0, 60), 0.05, "it is not forgotten at once")
}
