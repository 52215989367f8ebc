package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNeeds(t *testing.T) {
	for _, c := range []struct {
		name, spec string
		mean       float64
		want       Requirements
	}{
		{"BR-0 lives in the present", "br0", 0, Requirements{}},
		{"so do the simple ones", "jsq-kv", 0, Requirements{}},
		{
			"BR-H wants r^, and outputs to set its horizon by", "brh", 0,
			Requirements{Predictor: "survival", Horizon: 80, Tau: 0.5, Every: 20, MeanOutput: true},
		},
		{
			"which follows them", "brh", 28,
			Requirements{Predictor: "survival", Horizon: 7, Tau: 0.5, Every: 20, MeanOutput: true},
		},
		{
			"a fixed one does not", "brh:horizon=80,predictor=exact,tau=0.3,every=5", 28,
			Requirements{Predictor: "exact", Horizon: 80, Tau: 0.3, Every: 5},
		},
		{
			"the paper counts the anchor down", "brh:paper", 28,
			Requirements{Predictor: "survival", Horizon: 80, Tau: 0.5, Every: 20, DecrementAnchor: true},
		},
		{"evenkeel wants their mean alone", "evenkeel", 0, Requirements{MeanOutput: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Parse(c.spec)
			require.NoError(t, err)
			require.Equal(t, c.want, RequirementsOf(p, c.mean))
			require.Zero(t, Held(p))
		})
	}
}

func TestHowFarAheadFollowsTheOutputs(t *testing.T) {
	for _, c := range []struct {
		name    string
		mean    float64
		horizon int
		gamma   float64
	}{
		{"code completions", 28, 7, 0.5},
		{"one token", 1, 1, 0.5},
		{"chat", 150, 38, 0.9},
		{"long outputs", 300, 75, 0.95},
		{"longer ones change nothing", 4000, 80, 0.95},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.horizon, horizonFor(auto, c.mean))
			require.InDelta(t, c.gamma, gammaFor(auto, c.mean), 1e-9)
			require.Equal(t, 33, horizonFor(33, c.mean))
			require.Equal(t, 0.7, gammaFor(0.7, c.mean))
		})
	}
	require.Equal(t, 80, horizonFor(auto, 0))
	require.Equal(t, 0.95, gammaFor(auto, 0))
}
