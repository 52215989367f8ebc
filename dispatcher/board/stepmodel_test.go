package board

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
)

// feed gives a stepper steps of c0 + c1*load ms with some noise.
func feed(s *stepper, n int, c0, c1, noiseMs float64, spread int64) {
	rng := rand.New(rand.NewPCG(1, 2))
	load := int64(100_000)
	for range n {
		ms := c0 + c1*float64(load) + noiseMs*rng.NormFloat64()
		length := time.Duration(ms * float64(time.Millisecond))
		s.add(length)
		s.teach(load, 1, length)
		load = 100_000 + rng.Int64N(max(spread, 1))
	}
}

func TestTheStepModelIsLearnedFromSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c0, c1 := rapid.Float64Range(5, 100).Draw(t, "c0"), rapid.Float64Range(5e-5, 5e-4).Draw(t, "c1")
		var s stepper
		feed(&s, 600, c0, c1, c1*10_000, 100_000)
		m, source, r2 := s.model()
		require.Equal(t, stepLearned, source)
		require.Greater(t, r2, 0.8)
		require.InEpsilon(t, c1, m.C1Ms, 0.1)
		require.InDelta(t, c0+c1*150_000, m.C0Ms+m.C1Ms*150_000, c1*2000)
		require.InEpsilon(t, c0+c1*150_000, float64(s.stepMs(m, 0)), 0.15)
	})
}

func TestWhichStepModelIsInForce(t *testing.T) {
	given := StepModel{C0Ms: 40, C1Ms: 1e-4}
	for _, c := range []struct {
		name       string
		steps      int
		c1, noise  float64
		spread     int64
		configured StepModel
		want       string
	}{
		{"enough steps that fit", 250, 2e-4, 1, 100_000, given, stepLearned},
		{"too few steps", 199, 2e-4, 1, 100_000, given, stepConfigured},
		{"noise hides the line", 250, 2e-4, 40, 100_000, given, stepConfigured},
		{"a step that falls with the load", 250, -2e-4, 1, 100_000, given, stepConfigured},
		{"a load that never changes", 250, 2e-4, 1, 1, given, stepConfigured},
		{"nothing to fall back on", 100, 2e-4, 1, 100_000, StepModel{}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := stepper{configured: c.configured}
			feed(&s, c.steps, 100, c.c1, c.noise, c.spread)
			m, source, _ := s.model()
			require.Equal(t, c.want, source)
			if source == stepConfigured {
				require.Equal(t, given, m)
			}
		})
	}
}

func TestTheStepModelFollowsAnEngineThatChanged(t *testing.T) {
	var s stepper
	feed(&s, 2000, 50, 2e-4, 1, 100_000)
	feed(&s, 3000, 80, 4e-4, 1, 100_000)
	m, _, _ := s.model()
	require.InEpsilon(t, 4e-4, m.C1Ms, 0.1, "six half-lives later")
}

func TestStallsAreNoSamples(t *testing.T) {
	var s stepper
	feed(&s, 500, 50, 2e-4, 1, 100_000)
	n, before := s.n, s.meanMs
	s.add(2 * time.Second)
	s.teach(120_000, 1, 2*time.Second)
	require.Equal(t, n, s.n)
	require.Equal(t, before, s.meanMs)
	require.EqualValues(t, 501, s.seen, "but the histogram has it")
	s.add(75 * time.Millisecond)
	s.teach(120_000, 1, 75*time.Millisecond)
	require.Equal(t, n+1, s.n)
}

func TestWhatImbalanceCostsIsSaid(t *testing.T) {
	cfg := realConfig("br0")
	cfg.StepModel = StepModel{C0Ms: 50, C1Ms: 5e-4}
	h := newHand(t, cfg)
	fleet := ranks(2, 2, 0)
	h.fleet(fleet)
	h.put(pool.Entry{Prompt: 100_000}).slotNow(t)
	s := h.boards["m"].snapshot
	require.EqualValues(t, float32(50), s.C0Ms)
	require.EqualValues(t, float32(5e-4), s.C1Ms)
	require.EqualValues(t, 50, s.StepMs, "as the model says of an empty group")

	step := h.status(h.at).Models[0].Groups[0].Step
	require.Equal(t, stepConfigured, step.Source)
	require.InDelta(t, 0.25, step.LostShare, 1e-9, "100 ms a step, 75 if both ranks held half")
	require.InDelta(t, 25, step.LostMs, 1e-9)
	require.Equal(t, "this imbalance costs you 25.0 % of every step", step.Says)

	fleet[1].Cost = 2
	h.fleet(fleet)
	h.put(pool.Entry{Prompt: 10_000}).slotNow(t)
	require.InDelta(t, (100_000.-60_000)*5e-4/100, h.status(h.at).Models[0].Groups[0].Step.LostShare, 1e-9, "a KV token on a slow rank weighs more")
}

func BenchmarkStepModel(b *testing.B) {
	var s stepper
	feed(&s, 500, 50, 2e-4, 1, 100_000)
	b.ReportAllocs()
	for b.Loop() {
		s.add(70 * time.Millisecond)
		s.teach(110_000, 1, 70*time.Millisecond)
		s.model()
	}
}
