package step

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

func TestALawOfRanks(t *testing.T) {
	m := Model{C0Ms: 10, C1Ms: 0.01, RequestMs: 1, OwnPromptMs: 0.1, SharedPromptMs: 0.2, PrefillMs: 5}
	require.InDelta(t, 10+3+0.01*400, m.Ms([]Rank{{Requests: 3, KV: 400}, {Requests: 1, KV: 500}}), 1e-9, "the slowest rank has more requests")
	require.InDelta(t, 10+1+5+50+0.2*160+5, m.Ms([]Rank{{Requests: 3, KV: 400, Prompt: 140}, {Requests: 1, KV: 500, Prompt: 500}, {}, {}}),
		1e-9)
	require.EqualValues(t, 10, m.Ms(nil))
	require.EqualValues(t, 100, m.Weight())
	require.Zero(t, (&Model{RequestMs: 1}).Weight())
}

// Whatever the law, what is learned of it is not negative, and foretells steps with a prefill: also
// where the rank's own part, which is not learned, is another than is usual, here 10 to 45 % of
// what a token costs.
func TestTheLawOfPrefillsIsLearned(t *testing.T) {
	race.Alone(t)
	for told, bound := range map[bool]float64{true: 0.04, false: 0.05} {
		known := 0
		for seed := range uint64(100) {
			w := drawn(seed)
			if seed%2 == 0 {
				w.costly()
			}
			w.prefills()
			var s Times
			if told {
				s.Configure(Model{OwnPromptMs: 3 * w.law.OwnPromptMs, SharedPromptMs: 3 * w.law.SharedPromptMs})
			}
			w.teach(&s, 50)
			m, _, _ := s.Model()
			require.Equal(t, s.Configured, m, "nothing is known yet")
			w.teach(&s, 4000)
			m, _, _ = s.Model()
			for _, x := range []float64{m.C0Ms, m.C1Ms, m.RequestMs, m.OwnPromptMs, m.SharedPromptMs, m.PrefillMs} {
				require.GreaterOrEqual(t, x, 0.)
			}
			m = s.decodeModel()
			if s.prefills.line.n < 500 || !s.prefills.setLearnedCosts(&m) {
				continue // such as where all steps have as much to compute as each other
			}
			known++
			off := w.off(&m, 500, func(ranks []Rank) bool { return meanPrompt(ranks) > 0 })
			require.Less(t, off, bound+w.drift+w.noise/5, "law %d, told %v: %+v, learned %+v", seed, told, w.law, m)
		}
		require.Greater(t, known, 80)
	}
}

// One of the two keys alone says nothing of the share.
func TestOneKeyAloneIsNoShare(t *testing.T) {
	for _, m := range []Model{{OwnPromptMs: 0.1}, {SharedPromptMs: 0.1}, {}} {
		w, s := drawn(3), Times{}
		w.prefills()
		s.Configure(m)
		w.teach(&s, 3000)
		learned, _, _ := s.Model()
		require.InEpsilon(t, UsualOwnShare, learned.OwnPromptMs/(learned.OwnPromptMs+learned.SharedPromptMs), 1e-9)
	}
}

// A config that says another share begins anew: what was added up before had the share of before.
func TestAnotherShareBeginsAnew(t *testing.T) {
	w, s := drawn(3), Times{}
	w.prefills()
	w.teach(&s, 3000)
	require.Greater(t, s.prefills.line.n, uint64(500))
	s.Configure(w.law)
	w.teach(&s, 50)
	require.Less(t, s.prefills.line.n, uint64(50))
	w.teach(&s, 3000)
	m, _, _ := s.Model()
	require.InEpsilon(t, w.law.OwnPromptMs, m.OwnPromptMs, 0.1)
}

// What a request costs is used only where it costs something, and then it is about right.
func TestWhatARequestCostsIsLearned(t *testing.T) {
	race.Alone(t)
	used := 0
	for seed := range uint64(50) {
		var s Times
		w := drawn(seed)
		w.teach(&s, 13_000)
		for _, weight := range w.weight {
			require.Zero(t, weight, "load %d", seed)
		}

		s = Times{}
		w = drawn(seed)
		w.costly()
		w.teach(&s, 3900)
		require.Zero(t, s.Weight(), "two windows are needed")
		w.teach(&s, 12_100)
		if s.Weight() == 0 {
			continue
		}
		used++
		require.Less(t, math.Abs(math.Log(s.Weight()/w.law.Weight())), math.Log(2.5), "load %d: %.0f is %.0f", seed, s.Weight(), w.law.Weight())
		if m, source, _ := s.Model(); source == Learned {
			require.InEpsilon(t, s.Weight(), m.Weight(), 1e-9)
			off := w.off(&m, 500, func([]Rank) bool { return true })
			require.Less(t, off, 0.02+w.drift+w.noise/5, "load %d: %+v, learned %+v", seed, w.law, m)
		}
	}
	require.Greater(t, used, 25)
}

// Which way steps take requests is told only where it is so.
func TestWhoPaysForRequestsIsTold(t *testing.T) {
	race.Alone(t)
	for padded, want := range map[bool]Bottleneck{false: OneRank, true: TwoRanks} {
		told := 0
		for seed := range uint64(40) {
			var s Times
			w := drawn(seed)
			w.padded = padded
			w.costly()
			w.teach(&s, 10_100)
			if way := s.Bottleneck(); way != UnknownBottleneck {
				require.Equal(t, want, way, "load %d: %+v", seed, w.law)
				told++
			}
		}
		require.Greater(t, told, 10)
	}
}

func TestWhichWeightIsInForce(t *testing.T) {
	costly := func() *world { w := drawn(7); w.costly(); return w }
	t.Run("one that is configured, until one is learned", func(t *testing.T) {
		w, s := costly(), Times{}
		s.Configure(Model{C1Ms: 1e-4, RequestMs: 0.03})
		require.InEpsilon(t, 300, s.Weight(), 1e-9)
		w.teach(&s, 3000)
		m, source, _ := s.Model()
		require.Equal(t, Learned, source)
		require.InEpsilon(t, 300, m.Weight(), 1e-9, "the line is learned beside it")
		w.teach(&s, 3000)
		require.InEpsilon(t, w.law.Weight(), s.Weight(), 0.2)
	})
	t.Run("another one that is configured begins a new line", func(t *testing.T) {
		w, s := costly(), Times{}
		s.Configure(Model{C1Ms: 1e-4, RequestMs: 0.03})
		w.teach(&s, 1000)
		s.Configure(Model{C1Ms: 1e-4, RequestMs: 0.01})
		w.teach(&s, 50)
		require.LessOrEqual(t, s.Samples(), uint64(50))
	})
	t.Run("the usual one, until steps say otherwise", func(t *testing.T) {
		w, s := drawn(7), Times{}
		s.Configure(Model{})
		require.EqualValues(t, UsualWeight, s.Weight())
		w.teach(&s, 2500)
		require.Less(t, s.Weight(), 1000., "a request costs nothing")
		m, source, _ := s.Model()
		require.Equal(t, Learned, source)
		require.InEpsilon(t, w.law.C1Ms, m.C1Ms, 0.1)
	})
	t.Run("the usual one, while no step tells", func(t *testing.T) {
		w, s := costly(), Times{}
		s.Configure(Model{})
		w.law.RequestMs = UsualWeight * w.law.C1Ms
		w.teach(&s, 10_000)
		require.InEpsilon(t, UsualWeight, s.Weight(), 0.2)
	})
	t.Run("what is told", func(t *testing.T) {
		w, s := costly(), Times{GivenModel: Model{C0Ms: 1, C1Ms: 1e-4}}
		w.teach(&s, 6000)
		require.Zero(t, s.Weight(), "though another one was learned")
		m, source, _ := s.Model()
		require.Equal(t, Given, source)
		require.Equal(t, s.GivenModel, m)
	})
	t.Run("none, once requests cost nothing any more", func(t *testing.T) {
		w, s := costly(), Times{}
		w.teach(&s, 6200)
		require.Positive(t, s.Weight())
		w.law.RequestMs = 0
		w.teach(&s, 4500)
		require.Zero(t, s.Weight())
	})
	t.Run("the same, while no window tells", func(t *testing.T) {
		w, s := costly(), Times{}
		w.teach(&s, 6200)
		was := s.Weight()
		require.Positive(t, was)
		w.byKV, w.open = false, false // all ranks have as many
		w.teach(&s, 10_000)
		require.InEpsilon(t, was, s.Weight(), 0.3)
	})
}

func TestTheOwnPartOfAPrefillIsAsConfiguredUntilStepsTell(t *testing.T) {
	s := Times{Configured: Model{OwnPromptMs: 0.03, SharedPromptMs: 0.07, PrefillMs: 2}}
	m, source, _ := s.Model()
	require.Empty(t, source, "nobody knows what decodes take")
	require.Equal(t, s.Configured, m)
	even := func(n int) {
		for i := range n {
			p := float64(100 + 13*(i%70))
			ranks := []Rank{{Requests: 2, KV: 100, Prompt: p}, {Prompt: p}}
			if i%3 == 0 {
				ranks[0].Prompt, ranks[1].Prompt = 0, 0
			}
			truth := Model{C0Ms: 20, OwnPromptMs: 0.08, SharedPromptMs: 0.02, PrefillMs: 4}
			s.Learn(Sample{Ranks: ranks, Tokens: 1, Length: time.Duration(truth.Ms(ranks) * float64(time.Millisecond))})
		}
	}
	even(1000)
	m, _, _ = s.Model()
	require.InDelta(t, 0.1, m.OwnPromptMs+m.SharedPromptMs, 1e-3)
	require.InDelta(t, 0.03, m.OwnPromptMs, 1e-3, "all ranks compute as much")
	require.InDelta(t, 4, m.PrefillMs, 0.1)
}

func TestStallsTeachNothingOfPrefills(t *testing.T) {
	w, s := drawn(3), Times{}
	w.prefills()
	w.teach(&s, 3000)
	n := s.prefills.line.n
	require.Greater(t, n, uint64(500))
	for range 10 {
		s.Learn(Sample{Ranks: []Rank{{Requests: 1, KV: 100, Prompt: 10}}, Tokens: 1, Length: 5 * time.Second})
	}
	require.Equal(t, n, s.prefills.line.n)
}

func TestACopyLearnsByItself(t *testing.T) {
	w, s := drawn(7), Times{}
	w.costly()
	w.prefills()
	w.teach(&s, 3000)
	was, c, d := s, s, s
	for range 3000 {
		ranks := w.step()
		sample := Sample{Ranks: ranks, Tokens: 1, Length: w.lasts(ranks)}
		c.Learn(sample)
		d.Learn(sample)
	}
	require.Equal(t, c, d)
	require.NotEqual(t, s, c)
	require.Equal(t, was, s)
}

func TestTeachingDoesNotAllocate(t *testing.T) {
	w, s := drawn(7), Times{}
	w.prefills()
	samples := make([]Sample, 2*windowSteps)
	for i := range samples {
		ranks := w.step()
		samples[i] = Sample{Ranks: ranks, Tokens: 1, Length: w.lasts(ranks)}
	}
	require.Zero(t, testing.AllocsPerRun(2, func() {
		for _, sample := range samples {
			s.Add(sample.Length)
			s.Learn(sample)
			s.Model()
		}
	}))
}
