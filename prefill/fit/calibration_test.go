package fit

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/policy"
)

var startLatency = policy.Latency{TPMs: 0.0938, T0Ms: 150.72}

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
			c := NewCalibration(startLatency, 1e9)
			for range tt.times {
				for _, p := range tt.points {
					c.Add(Sample{New: p[0], Ms: p[1]})
				}
			}
			latency, fitted := c.Latency()
			require.Equal(t, tt.fitted, fitted)
			require.InDelta(t, tt.tp, latency.TPMs, 1e-6)
			require.InDelta(t, tt.t0, latency.T0Ms, 1e-3)
			require.InDelta(t, tt.r2, c.R2(), 1e-4)
		})
	}
}

// learn feeds prefills of an engine with the given line and some noise.
func learn(c *Calibration, latency policy.Latency, n int, rng *rand.Rand) {
	for range n {
		x := 500 + rng.Float64()*8000
		c.Add(Sample{New: x, Ms: latency.Ms(x, 0) * (1 + 0.05*rng.NormFloat64())})
	}
}

func TestOutliersAreDropped(t *testing.T) {
	c, rng := NewCalibration(startLatency, 500), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Latency{TPMs: 0.05, T0Ms: 80}, 200, rng)
	before, fitted := c.Latency()
	require.True(t, fitted)
	require.False(t, c.Add(Sample{New: 1000, Ms: 60_000}), "an engine that hung once")
	after, _ := c.Latency()
	require.Equal(t, before, after)
}

func TestAnotherRegimeIsLearned(t *testing.T) {
	c, rng := NewCalibration(startLatency, 100), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Latency{TPMs: 0.05, T0Ms: 80}, 300, rng)
	slow := policy.Latency{TPMs: 0.5, T0Ms: 300}
	learn(c, slow, 1500, rng)
	latency, _ := c.Latency()
	require.InEpsilon(t, slow.TPMs, latency.TPMs, 0.1)
}

func TestTheLastGoodLineStays(t *testing.T) {
	c, rng := NewCalibration(startLatency, 20), rand.New(rand.NewPCG(1, 1))
	learn(c, policy.Latency{TPMs: 0.05, T0Ms: 80}, 100, rng)
	before, _ := c.Latency()
	for range 300 { // one size only, for many half-lives: no spread
		c.Add(Sample{New: 4000, Ms: before.Ms(4000, 0)})
	}
	latency, fitted := c.Latency()
	require.True(t, fitted)
	require.InEpsilon(t, before.Ms(4000, 0), latency.Ms(4000, 0), 0.05)
}

func TestAttentionIsTakenOffBeforeTheFit(t *testing.T) {
	truth := policy.Latency{TPMs: 0.05, T0Ms: 80, Beta2: 2e-6}
	c := NewCalibration(policy.Latency{Beta2: 2e-6}, 1e9)
	for n := range 40 {
		x, hit := float64(500+n*400), float64(n%3*1000)
		c.Add(Sample{New: x, Hit: hit, Ms: truth.Ms(x, hit)})
	}
	latency, fitted := c.Latency()
	require.True(t, fitted)
	require.InEpsilon(t, truth.TPMs, latency.TPMs, 1e-6)
	require.InEpsilon(t, truth.T0Ms, latency.T0Ms, 1e-6)
}

func TestSamplesThatAreNoneAreRefused(t *testing.T) {
	c := NewCalibration(startLatency, 500)
	for _, s := range [][2]float64{{0, 1}, {1, 0}, {-1, 1}, {math.NaN(), 1}, {1, math.NaN()}, {1, math.Inf(1)}} {
		require.False(t, c.Add(Sample{New: s[0], Ms: s[1]}), "%v", s)
	}
	require.Zero(t, c.Samples())
}

func TestWhatRunsBesideIsLearned(t *testing.T) {
	truth := LatencyModel{Latency: policy.Latency{TPMs: 0.09, T0Ms: 60, Beta2: 1e-6}, ConcurrentTPMs: 0.001, ConcurrentT0Ms: 0.5}
	c, rng := NewCalibration(startLatency, 500), rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		s := Sample{New: 200 + 60_000*rng.Float64()*rng.Float64(), Hit: float64(rng.IntN(3) * 8192), Concurrent: float64(rng.IntN(60))}
		s.Ms = truth.predictMs(s) * (1 + 0.02*rng.NormFloat64())
		c.Add(s)
	}
	latency, fitted := c.Latency()
	require.True(t, fitted)
	for _, s := range []Sample{
		{New: 3000}, {New: 20_000}, {New: 8000, Hit: 30_000}, {New: 3000, Concurrent: 50}, {New: 20_000, Concurrent: 50},
	} {
		require.InEpsilon(t, truth.predictMs(s), latency.predictMs(s), 0.1, "%+v by %+v", s, latency)
	}
	require.InEpsilon(t, truth.Beta2, latency.Beta2, 0.1)
	require.InEpsilon(t, truth.ConcurrentTPMs, latency.ConcurrentTPMs, 0.1)
}

func TestATermThatExplainsNothingIsLeftOut(t *testing.T) {
	with := 0
	for seed := range uint64(100) {
		c, rng := NewCalibration(startLatency, 500), rand.New(rand.NewPCG(seed, 1))
		for range 500 {
			s := Sample{New: 500 + rng.Float64()*8000, Concurrent: float64(rng.IntN(60))}
			s.Ms = startLatency.Ms(s.New, 0) + 20*rng.NormFloat64()
			c.Add(s)
		}
		if latency, _ := c.Latency(); latency != (LatencyModel{Latency: policy.Latency{T0Ms: latency.T0Ms, TPMs: latency.TPMs}}) {
			with++
		}
	}
	require.Zero(t, with, "of 100 straight lines with noise")
}

func TestACurveIsLearnedThatNoLineFits(t *testing.T) {
	truth := policy.Latency{TPMs: 0.05, T0Ms: 20, Beta2: 1e-5} // a line through it would begin below zero
	c, rng := NewCalibration(startLatency, 500), rand.New(rand.NewPCG(1, 1))
	for range 300 {
		x := 1000 + 60_000*rng.Float64()
		c.Add(Sample{New: x, Ms: truth.Ms(x, 0)})
	}
	latency, fitted := c.Latency()
	require.True(t, fitted)
	require.InEpsilon(t, truth.Beta2, latency.Beta2, 1e-6)
	require.InEpsilon(t, truth.T0Ms, latency.T0Ms, 1e-3)
}

func TestALawIsLearnedWithoutAllocations(t *testing.T) {
	c, n := NewCalibration(startLatency, 500), 0
	require.Zero(t, testing.AllocsPerRun(500, func() {
		n++
		c.Add(Sample{New: float64(500 + n%7*1000), Hit: float64(n % 3 * 512), Concurrent: float64(n % 11), Ms: float64(200 + n%7*100 + n%11)})
	}))
}

func BenchmarkCalibrationAdd(b *testing.B) {
	c, n := NewCalibration(startLatency, 500), 0
	b.ReportAllocs()
	for b.Loop() {
		n++
		c.Add(Sample{New: float64(500 + n%7*1000), Hit: float64(n % 3 * 512), Concurrent: float64(n % 11), Ms: float64(200 + n%7*100 + n%11)})
	}
}

// The first prefill of a new engine may take a minute, because the engine compiles. It does not
// hide the line of all others for long.
func TestAFirstPrefillThatTakesAMinuteHidesTheLineForAWhileOnly(t *testing.T) {
	c := NewCalibration(policy.Latency{}, 500)
	c.Add(Sample{New: 1000, Ms: 60_000})
	dice := rand.New(rand.NewPCG(1, 2))
	for range fitRestart + fitSamples {
		n := 200 + 7800*dice.Float64()
		c.Add(Sample{New: n, Ms: 20 + 0.05*n})
	}
	latency, ok := c.Latency()
	require.True(t, ok)
	require.InDelta(t, 0.05, latency.TPMs, 1e-9)
}
