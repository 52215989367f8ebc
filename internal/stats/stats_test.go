package stats

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFiguresOfFewValues(t *testing.T) {
	require.True(t, math.IsNaN(Mean(nil)))
	require.True(t, math.IsNaN(Percentile(nil, 0.5)))
	require.Zero(t, Deviation([]float64{3}))
	require.Equal(t, 2.0, Mean([]float64{1, 3}))
	require.InDelta(t, math.Sqrt2, Deviation([]float64{1, 3}), 1e-12)
	require.Equal(t, Line{}, LeastSquares(nil))
}

func TestPercentilesAreValuesThatOccurred(t *testing.T) {
	ten := []float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for share, want := range map[float64]float64{0: 1, 0.1: 1, 0.11: 2, 0.5: 5, 0.9: 9, 0.99: 10, 1: 10} {
		require.Equal(t, want, Percentile(ten, share), "share %v", share)
	}
	require.Equal(t, 6.0, Median(ten), "the upper one of two")
}

func TestALineGoesThroughItsPoints(t *testing.T) {
	l := LeastSquares([]Point{{X: 1, Y: 5}, {X: 2, Y: 7}, {X: 4, Y: 11}})
	require.InDelta(t, 3, l.Intercept, 1e-12)
	require.InDelta(t, 2, l.Slope, 1e-12)
	require.InDelta(t, 1, l.R2, 1e-12)
	require.InDelta(t, 23, l.At(10), 1e-12)
	require.Equal(t, Line{N: 2, Intercept: 6, MinX: 3, MaxX: 3}, LeastSquares([]Point{{X: 3, Y: 5}, {X: 3, Y: 7}}), "no spread, no slope")
}

func TestABootstrapCoversTheMean(t *testing.T) {
	held := 0
	for seed := range uint64(200) {
		dice := rand.New(rand.NewPCG(seed, 7))
		values := make([]float64, 40)
		for i := range values {
			values[i] = 3 + dice.NormFloat64()
		}
		low, high := Bootstrap(len(values), 0.95, func(drawn []int) float64 {
			sum := 0.0
			for _, i := range drawn {
				sum += values[i]
			}
			return sum / float64(len(drawn))
		})
		require.Less(t, low, high)
		require.InDelta(t, 2*1.96/math.Sqrt(40), high-low, 0.35)
		if low <= 3 && 3 <= high {
			held++
		}
	}
	require.InDelta(t, 0.95, float64(held)/200, 0.05)
}

func TestCountsAreGrouped(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 7: "7", 999: "999", 1000: "1,000", 12_500: "12,500", -1: "-1", -100: "-100", -1234: "-1,234",
		1_234_567: "1,234,567"} {
		require.Equal(t, want, Grouped(n))
	}
	require.Equal(t, "18,446,744,073,709,551,615", Grouped(uint64(math.MaxUint64)))
}

func TestGeometricMean(t *testing.T) {
	require.InDelta(t, 4, GeometricMean([]float64{2, 8}), 1e-12)
	require.InDelta(t, 4, GeometricMean([]float64{2, math.NaN(), 8}), 1e-12)
	require.True(t, math.IsNaN(GeometricMean(nil)))
}
