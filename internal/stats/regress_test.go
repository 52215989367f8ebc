package stats

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestARegressionFindsWhatMadeTheValues(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var rows [][]float64
	var y []float64
	for range 2000 {
		x := []float64{1, 20_000 * rng.Float64(), 500 * rng.Float64()}
		rows, y = append(rows, x), append(y, 11+0.004*x[1]+0.2*x[2]+rng.NormFloat64())
	}
	r, ok := Regress(rows, y)
	require.True(t, ok)
	for i, want := range []float64{11, 0.004, 0.2} {
		require.InDelta(t, want, r.Of[i], 4*r.Error[i])
	}
	require.InDelta(t, 1/(500/3.4641)/44.7, r.Error[2], 1e-5, "the noise over the spread of x and the root of the rows")
	require.InDelta(t, 11+80+20, r.At([]float64{1, 20_000, 100}), 0.5)
	require.Greater(t, r.R2, 0.99)
}

func TestNoRegressionOfTooLittle(t *testing.T) {
	for name, rows := range map[string][][]float64{
		"no rows":                 nil,
		"as many rows as columns": {{1, 2}, {1, 3}},
		"a column of zeros":       {{1, 0}, {1, 0}, {1, 0}},
		"a column that is a multiple of the other": {{1, 2}, {2, 4}, {3, 6}, {4, 8}},
	} {
		t.Run(name, func(t *testing.T) {
			_, ok := Regress(rows, make([]float64, len(rows)))
			require.False(t, ok)
		})
	}
}
