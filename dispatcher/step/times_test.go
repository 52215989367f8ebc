package step

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// full is a step of a rank that holds so much.
func full(load int64, length time.Duration) Sample {
	return Sample{Ranks: []Rank{{Requests: 1, KV: float64(load)}}, Tokens: 1, Length: length}
}

// feed gives a Times steps of c0 + c1*load ms with some noise.
func feed(s *Times, n int, c0, c1, noiseMs float64, spread int64) {
	rng := rand.New(rand.NewPCG(1, 2))
	load := int64(100_000)
	for range n {
		ms := c0 + c1*float64(load) + noiseMs*rng.NormFloat64()
		length := time.Duration(ms * float64(time.Millisecond))
		s.Add(length)
		s.Learn(full(load, length))
		load = 100_000 + rng.Int64N(max(spread, 1))
	}
}

func TestTheStepModelIsLearnedFromSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c0, c1 := rapid.Float64Range(5, 100).Draw(t, "c0"), rapid.Float64Range(5e-5, 5e-4).Draw(t, "c1")
		var s Times
		feed(&s, 600, c0, c1, c1*10_000, 100_000)
		m, source, r2 := s.Model()
		require.Equal(t, Learned, source)
		require.Greater(t, r2, 0.8)
		require.InEpsilon(t, c1, m.C1Ms, 0.1)
		require.InDelta(t, c0+c1*150_000, m.C0Ms+m.C1Ms*150_000, c1*2000)
		require.InEpsilon(t, c0+c1*150_000, float64(s.Ms(m, 0)), 0.15)
	})
}

func TestWhichStepModelIsInForce(t *testing.T) {
	given := Model{C0Ms: 40, C1Ms: 1e-4}
	for _, c := range []struct {
		name       string
		steps      int
		c1, noise  float64
		spread     int64
		configured Model
		want       string
	}{
		{"enough steps that fit", 250, 2e-4, 1, 100_000, given, Learned},
		{"too few steps", 199, 2e-4, 1, 100_000, given, Configured},
		{"noise hides the line", 250, 2e-4, 40, 100_000, given, Configured},
		{"a step that falls with the load", 250, -2e-4, 1, 100_000, given, Configured},
		{"a load that never changes", 250, 2e-4, 1, 1, given, Configured},
		{"nothing to fall back on", 100, 2e-4, 1, 100_000, Model{}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := Times{Configured: c.configured}
			feed(&s, c.steps, 100, c.c1, c.noise, c.spread)
			m, source, r2 := s.Model()
			require.Equal(t, c.want, source)
			require.Equal(t, c.steps < 200, s.WhyNoModel(r2) == fmt.Sprintf("it is learned from 200 steps, and %d were told so far", c.steps))
			if source == Configured {
				require.Equal(t, given, m)
			}
		})
	}
}

func TestWhyThereIsNoStepModel(t *testing.T) {
	for slope, want := range map[float64]string{
		0: "of 5,000 steps): does its load hardly matter, or are they no barrier group?",
		-2e-4: "step time does not follow the fullest rank (by 5,000 steps, it is shorter where that rank is fuller): " +
			"does its load hardly matter, or are they no barrier group?",
	} {
		var s Times
		feed(&s, 5000, 100, slope, 1, 100_000)
		_, source, r2 := s.Model()
		require.Empty(t, source)
		require.Contains(t, s.WhyNoModel(r2), want)
	}
}

func TestTheStepModelFollowsAnEngineThatChanged(t *testing.T) {
	var s Times
	feed(&s, 2000, 50, 2e-4, 1, 100_000)
	feed(&s, 3000, 80, 4e-4, 1, 100_000)
	m, _, _ := s.Model()
	require.InEpsilon(t, 4e-4, m.C1Ms, 0.1, "six half-lives later")
}

func TestStallsAreNoSamples(t *testing.T) {
	var s Times
	feed(&s, 500, 50, 2e-4, 1, 100_000)
	n, before := s.n, s.meanMs
	s.Add(2 * time.Second)
	s.Learn(full(120_000, 2*time.Second))
	require.Equal(t, n, s.n)
	require.Equal(t, before, s.meanMs)
	require.EqualValues(t, 501, s.medianLength.count, "but the histogram has it")
	s.Add(75 * time.Millisecond)
	s.Learn(full(120_000, 75*time.Millisecond))
	require.Equal(t, n+1, s.n)
}

func BenchmarkStepModel(b *testing.B) {
	var s Times
	feed(&s, 500, 50, 2e-4, 1, 100_000)
	b.ReportAllocs()
	for b.Loop() {
		s.Add(70 * time.Millisecond)
		s.Learn(full(110_000, 70*time.Millisecond))
		s.Model()
	}
}

// An engine may stand still in its first steps. The steps after it are heard, and soon say what is
// usual.
func TestALongStepAtFirstHidesNoOther(t *testing.T) {
	var s Times
	s.Add(time.Second)
	require.Zero(t, s.Least())
	for range fewSteps {
		s.Add(20 * time.Millisecond)
	}
	require.Equal(t, 8*time.Millisecond, s.Least())
}

// heard plays steps, of which every third has no prefill, as a proxy hears them: what comes sooner
// than the least is a part of the next one.
func heard(s *Times, law Model, steps int) (told int) {
	var since time.Duration
	tokens := 0.0
	for i := range steps {
		ranks := []Rank{{Requests: 4, KV: 20_000}, {Requests: 4, KV: 20_000}}
		if i%3 > 0 {
			ranks[0].Prompt = 4096
		}
		since, tokens = since+time.Duration(law.Ms(ranks)*float64(time.Millisecond)), tokens+1
		if since < s.Least() {
			continue
		}
		s.Learn(Sample{Ranks: ranks, Tokens: tokens, Length: since})
		s.Add(since)
		since, tokens = 0, 0
		told++
	}
	return told
}

// Most steps have a prefill, and the others are far shorter. They are heard nevertheless, also
// where they become shorter still.
func TestStepsWithAPrefillHideNoOther(t *testing.T) {
	var s Times
	require.Equal(t, 600, heard(&s, Model{C0Ms: 35, OwnPromptMs: 0.11, SharedPromptMs: 0.04}, 600))
	require.InDelta(t, 14, float64(s.Least().Milliseconds()), 1)
	s = Times{}
	heard(&s, Model{C0Ms: 200, OwnPromptMs: 0.11, SharedPromptMs: 0.04}, 400)
	heard(&s, Model{C0Ms: 30, OwnPromptMs: 0.11, SharedPromptMs: 0.04}, 300)
	require.Equal(t, 300, heard(&s, Model{C0Ms: 30, OwnPromptMs: 0.11, SharedPromptMs: 0.04}, 300))
}

// A few requests that speak late are no step, and do not say what one takes.
func TestStreamsThatSpeakLateAreNoStep(t *testing.T) {
	var s Times
	ranks := []Rank{{Requests: 4, KV: 20_000, Prompt: 2000}, {Requests: 4, KV: 20_000}}
	later := []Rank{{Requests: 4, KV: 20_000}, {Requests: 4, KV: 20_000}}
	for i := range 2000 {
		s.Learn(Sample{Ranks: ranks, Tokens: 1, Length: 300 * time.Millisecond})
		s.Add(300 * time.Millisecond)
		if late := 3 * time.Millisecond; i%20 == 0 && late >= s.Least() {
			s.Learn(Sample{Ranks: later, Tokens: 0.2, Length: late})
			s.Add(late)
		}
	}
	require.Equal(t, 6*time.Millisecond, s.Least(), "a step without a prefill may be so short")
	require.Zero(t, s.medianPlainLength.count)
}
