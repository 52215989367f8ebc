package policy

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/predictor"
)

// outputs is a table of equal outputs.
func outputs(n int32) Outlook { return predictor.NewSurvival([]int32{n}) }

func TestNeeds(t *testing.T) {
	for _, c := range []struct {
		name, spec string
		outlook    Outlook
		want       Needs
	}{
		{"BR-0 lives in the present", "br0", nil, Needs{}},
		{"so do the simple ones", "jsq-kv", nil, Needs{}},
		{
			"BR-H wants r^, and outputs to set its horizon by", "brh", nil,
			Needs{Predictor: "survival", Horizon: 80, Tau: 0.5, Every: 20, Outlook: "survival"},
		},
		{
			"which follows them", "brh", outputs(28),
			Needs{Predictor: "survival", Horizon: 7, Tau: 0.5, Every: 20, Outlook: "survival"},
		},
		{
			"a fixed one does not", "brh:horizon=80,predictor=exact,tau=0.3,every=5", outputs(28),
			Needs{Predictor: "exact", Horizon: 80, Tau: 0.3, Every: 5},
		},
		{
			"the paper counts the anchor down", "brh:paper", outputs(28),
			Needs{Predictor: "survival", Horizon: 80, Tau: 0.5, Every: 20, DecrementAnchor: true},
		},
		{"evenkeel wants the table itself", "evenkeel", nil, Needs{Outlook: "survival", StepModel: true, Holds: true}},
		{"by key", "evenkeel:predictor=exact,hold=0", nil, Needs{Outlook: "exact", StepModel: true}},
		{"or the truth", "evenkeel:mode=oracle", nil, Needs{Outlook: "oracle", StepModel: true, Holds: true}},
		{"or nothing", "evenkeel:mode=now,predictor=none", nil, Needs{StepModel: true, Holds: true}},
		{"or nothing, since it may not", "evenkeel:predictor=none", nil, Needs{StepModel: true, Holds: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Parse(c.spec)
			require.NoError(t, err)
			require.Equal(t, c.want, NeedsOf(p, c.outlook))
			require.Zero(t, Held(p))
		})
	}
}

func TestHowFarAheadFollowsTheOutputs(t *testing.T) {
	for _, c := range []struct {
		name    string
		mean    int32
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
			require.Equal(t, c.horizon, horizonFor(auto, outputs(c.mean)))
			require.InDelta(t, c.gamma, gammaFor(auto, outputs(c.mean)), 1e-9)
			require.Equal(t, 33, horizonFor(33, outputs(c.mean)))
			require.Equal(t, 0.7, gammaFor(0.7, outputs(c.mean)))
		})
	}
	require.Equal(t, 80, horizonFor(auto, nil))
	require.Equal(t, 0.95, gammaFor(auto, nil))
}
