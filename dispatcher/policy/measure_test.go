package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMeasure(t *testing.T) {
	for _, c := range []struct {
		name                 string
		loads                []int64
		imbalance, maxMinMin int64
		idle, step, ideal    float64
	}{
		{"what all ranks lack to the fullest", []int64{1000, 400, 700}, 900, 600, 0.3, 15, 13.5},
		{"level ranks lack nothing", []int64{500, 500}, 0, 0, 0, 12.5, 12.5},
		{"an idle group", []int64{0, 0}, 0, 0, 0, 10, 10},
		{"no group", nil, 0, 0, 0, 10, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := Measure(c.loads)
			require.Equal(t, c.imbalance, b.Imbalance())
			require.Equal(t, c.maxMinMin, b.MaxMinusMin())
			require.InDelta(t, c.idle, b.IdleShare(), 1e-12)
			require.InDelta(t, c.step, b.StepMs(10, 0.005), 1e-12)
			require.InDelta(t, c.ideal, b.IdealStepMs(10, 0.005), 1e-12)
			require.InDelta(t, (c.step-c.ideal)/c.step, b.LostShare(10, 0.005), 1e-12)
		})
	}
	require.Zero(t, Measure([]int64{0}).LostShare(0, 0.1), "a step of no length loses nothing")
}
