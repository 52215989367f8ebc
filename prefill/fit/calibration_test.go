package fit

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/policy"
)

var startLine = policy.Line{TPMs: 0.0938, T0Ms: 150.72}

func TestTheLineIsFitted(t *testing.T) {
	for _, tt := range []struct {
		name         string
		points       [][2]float64
		times        int
		tp, t0, r2   float64
		fitted       bool
		forgetNobody bool
	}{
		{"with a curve", [][2]float64{{1000, 250}, {2000, 330}, {4000, 530}}, 10, 0.0942857, 150.0, 0.9973, true, true},
		{"too few samples: what is configured", [][2]float64{{1000, 250}, {2000, 330}, {4000, 530}}, 1, 0.0938, 150.72, 0, false, true},
		{"on the line", [][2]float64{{1000, 244.52}, {2000, 338.32}, {4000, 525.92}}, 10, 0.0938, 150.72, 1, true, true},
		{"all of one size", [][2]float64{{1000, 244}, {1001, 338}, {1500, 340}}, 10, 0.0938, 150.72, 0, false, true},
		{"shorter the longer", [][2]float64{{1000, 900}, {2000, 500}, {4000, 300}}, 10, 0.0938, 150.72, 0, false, true},
		{"no time at zero", [][2]float64{{1000, 100}, {2000, 400}, {4000, 1000}}, 10, 0.0938, 150.72, 0, false, true},
		{"mere noise", [][2]float64{{1000, 100}, {1000, 900}, {4000, 150}, {4000, 900}}, 10, 0.0938, 150.72, 0, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := NewCalibration(startLine, 1e9)
			for range tt.times {
				for _, p := range tt.points {
					c.Add(p[0], 0, p[1])
				}
			}
			line, fitted := c.Line()
			require.Equal(t, tt.fitted, fitted)
			require.InDelta(t, tt.tp, line.TPMs, 1e-6)
			require.InDelta(t, tt.t0, line.T0Ms, 1e-3)
			require.InDelta(t, tt.r2, c.R2(), 1e-4)
		})
	}
}

// learn feeds prefills of an engine with the given line and some noise.
func learn(c *Calibration, line policy.Line, n int, rng *rand.Rand) {
	for range n {
		x := 500 + rng.Float64()*8000
		c.Add(x, 0, line.Ms(x, 0)*(1+0.05*rng.NormFloat64()))
	}
}

func TestOutliersAreDropped(t *testing.T) {
	c, rng := NewCalibration(startLine, 500), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Line{TPMs: 0.05, T0Ms: 80}, 200, rng)
	before, fitted := c.Line()
	require.True(t, fitted)
	require.False(t, c.Add(1000, 0, 60_000), "an engine that hung once")
	after, _ := c.Line()
	require.Equal(t, before, after)
}

func TestAnotherRegimeIsLearned(t *testing.T) {
	c, rng := NewCalibration(startLine, 100), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Line{TPMs: 0.05, T0Ms: 80}, 300, rng)
	slow := policy.Line{TPMs: 0.5, T0Ms: 300}
	learn(c, slow, 1500, rng)
	line, _ := c.Line()
	require.InEpsilon(t, slow.TPMs, line.TPMs, 0.1)
}

func TestTheLastGoodLineStays(t *testing.T) {
	c, rng := NewCalibration(startLine, 20), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Line{TPMs: 0.05, T0Ms: 80}, 100, rng)
	before, _ := c.Line()
	for range 300 { // one size only, for many half-lives: no spread
		c.Add(4000, 0, before.Ms(4000, 0))
	}
	line, fitted := c.Line()
	require.True(t, fitted)
	require.InEpsilon(t, before.Ms(4000, 0), line.Ms(4000, 0), 0.05)
}

func TestAttentionIsTakenOffBeforeTheFit(t *testing.T) {
	truth := policy.Line{TPMs: 0.05, T0Ms: 80, Beta2: 2e-6}
	c := NewCalibration(policy.Line{Beta2: 2e-6}, 1e9)
	for n := range 40 {
		x, hit := float64(500+n*400), float64(n%3*1000)
		c.Add(x, hit, truth.Ms(x, hit))
	}
	line, fitted := c.Line()
	require.True(t, fitted)
	require.InEpsilon(t, truth.TPMs, line.TPMs, 1e-6)
	require.InEpsilon(t, truth.T0Ms, line.T0Ms, 1e-6)
}

func TestSamplesThatAreNoneAreRefused(t *testing.T) {
	c := NewCalibration(startLine, 500)
	for _, s := range [][2]float64{{0, 1}, {1, 0}, {-1, 1}, {math.NaN(), 1}, {1, math.NaN()}, {1, math.Inf(1)}} {
		require.False(t, c.Add(s[0], 0, s[1]), "%v", s)
	}
	require.Zero(t, c.Samples())
}
