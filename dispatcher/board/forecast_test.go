package board

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// realConfig has the product's own policies.
func realConfig(spec string) Config {
	cfg := testConfig()
	cfg.Policy, cfg.DensePolicy, cfg.Parse = spec, "", nil
	return cfg
}

// teach has so many outputs learned and their tables in force.
func (h *hand) teach(outputs []int32) {
	for _, o := range outputs {
		h.finished = append(h.finished, OutputSample{Model: "m", Finished: true, Prompt: 100, Output: o})
	}
	h.learn()
}

// learn is a turn of the learner.
func (h *hand) learn() {
	h.at = h.at.Add(time.Second)
	for i := range h.finished {
		h.learner.Learn(&h.finished[i])
	}
	h.finished = h.finished[:0]
	built, _ := h.learner.Rebuild(h.at)
	for _, t := range built {
		h.apply(t)
	}
}

// look is a tick although nothing changed.
func (h *hand) look() {
	h.do(func(l *hand) {
		for _, b := range l.boards {
			b.decideNow = true
		}
	})
}

// rhat is what policies last saw of a request.
func (s *Slot) rhat() float32 {
	record := s.record()
	return record.rank.running[record.pos].Rhat
}

func (s *Slot) record() *slotRecord { return &s.h.boards[s.key.Model].slots.records[s.index] }

// lengths are outputs around a hundred tokens, the same every time.
func lengths(n int) []int32 {
	rng := rand.New(rand.NewPCG(5, 6))
	all := make([]int32, n)
	for i := range all {
		all[i] = 20 + rng.Int32N(200)
	}
	return all
}

func TestRhatOnTheBoardLivesAsInTheSimulator(t *testing.T) {
	for _, spec := range []string{
		"brh:horizon=40", "brh:horizon=80,tau=0.2,every=7", "brh:horizon=40,decrement_anchor=true", "brh:horizon=40,predictor=none",
	} {
		t.Run(spec, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				age := rapid.IntRange(0, 150).Draw(t, "age when it comes")
				tokens := rapid.IntRange(1, 120).Draw(t, "tokens it gets")
				h := newHand(t, realConfig(spec))
				h.fleet(ranks(2, 1, 0))
				h.teach(lengths(300))
				s := h.put(pool.Entry{Prompt: 500 + age, Age: age}).slotNow(t)
				h.put(pool.Entry{}).slotNow(t)
				free := ranks(3, 1, 0) // a slot that stays free, and an entry that is too long for it: ticks go on
				free[2].Capacity = 10
				h.fleet(free)
				h.put(pool.Entry{Prompt: 100})

				n := policy.RequirementsOf(h.boards["m"].groups[0].chosenPolicy.Policy, 0)
				rules := predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
				var p predictor.Predictor = predictor.NewSurvival(lengths(300))
				if n.Predictor == "none" {
					p = predictor.None{}
				}
				want := rules.Follow(p, predictor.Query{Prompt: 500, Age: int32(age)}, tokens)
				h.look()
				require.Equal(t, want[0], s.rhat(), "at admission")
				for i := 1; i <= tokens; i++ {
					s.Progress(i)
					h.look()
					require.Equal(t, want[i], s.rhat(), "after token %d", i)
				}
			})
		})
	}
}

func TestManyTokensBetweenTwoTicksAreOneQuestionAtTheNewestAge(t *testing.T) {
	h := newHand(t, realConfig("brh:horizon=40"))
	h.fleet(ranks(1, 2, 0))
	h.teach(lengths(300))
	s := h.put(pool.Entry{Prompt: 5}).slotNow(t)
	s.Progress(67)
	h.put(pool.Entry{Prompt: 5}).slotNow(t)
	want := predictor.DefaultRules(40).Follow(predictor.NewSurvival(lengths(300)), predictor.Query{Age: 67}, 0)
	require.Equal(t, want[0], s.rhat())
}

func TestANewPolicyHasEveryRequestAskedAboutAnew(t *testing.T) {
	h := newHand(t, realConfig("brh:horizon=40"))
	h.fleet(ranks(1, 9, 0))
	h.teach(lengths(300))
	s := h.put(pool.Entry{Prompt: 5}).slotNow(t)
	next := func() { h.put(pool.Entry{Prompt: 5}).slotNow(t) }
	next()
	require.NotZero(t, s.rhat())
	require.LessOrEqual(t, s.rhat(), float32(40))

	require.NoError(t, h.setPolicy("brh:horizon=200,tau=0"))
	next()
	want := predictor.Rules{H: 200}.Follow(predictor.NewSurvival(lengths(300)), predictor.Query{}, 0)
	require.Equal(t, want[0], s.rhat())

	require.NoError(t, h.setPolicy("br0"))
	require.NoError(t, h.setPolicy("evenkeel"))
	next()
	require.Zero(t, h.boards["m"].snapshot.Workers[0].Running[0].Rhat, "of slot 0: it is predicted for the scores, and nobody's to read")
}

func TestPoliciesSeeTheMeanOutputFromFiftyOutputsOn(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	h.fleet(ranks(1, 99, 0))
	mean := func() float64 {
		h.put(pool.Entry{}).slotNow(t)
		return h.boards["m"].snapshot.MeanOutput
	}
	require.Zero(t, mean(), "nothing is known")
	h.teach(lengths(49))
	require.Zero(t, mean())
	h.teach([]int32{77})
	require.Equal(t, predictor.NewSurvival(append(lengths(49), 77)).MeanOutput(), mean())

	require.NoError(t, h.setPolicy("br0"))
	require.Zero(t, mean(), "br0 wants none and the config learns nothing in advance")
}

func TestRequestsThatRecurArePredictedByTheirKey(t *testing.T) {
	h := newHand(t, realConfig("brh:horizon=40,predictor=exact"))
	h.fleet(ranks(1, 9, 0))
	for range 20 {
		h.finished = append(h.finished, OutputSample{Model: "m", Finished: true, Prompt: 9, Output: 12, Key: 7})
		h.finished = append(h.finished, OutputSample{Model: "m", Finished: true, Prompt: 9, Output: 900, Key: 8})
	}
	h.learn()
	short, long := h.put(pool.Entry{Key: 7}).slotNow(t), h.put(pool.Entry{Key: 8}).slotNow(t)
	h.put(pool.Entry{}).slotNow(t)
	require.EqualValues(t, 12, short.rhat())
	require.EqualValues(t, 40, long.rhat())
}

func TestLiveScoresAreOfThePredictionsUsed(t *testing.T) {
	for _, c := range []struct {
		name, spec string
		rows       int
	}{
		{"a policy that reads r-hat", "brh:horizon=80", 40},
		{"a policy that reads the mean output: a sample by slot", "evenkeel", 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHand(t, realConfig(c.spec))
			h.fleet(ranks(1, 1, 0))
			h.teach(lengths(300)) // 1/8 of them or so end within 40 tokens
			for i := range 40 {
				s := h.put(pool.Entry{}).slotNow(t)
				waits := h.put(pool.Entry{})
				h.fleet(ranks(1, 2, 0)) // a tick that sees s run
				waits.slotNow(t)
				output := 60 + i*4
				h.do(func(l *hand) { l.giveBack(s, Outcome{Kind: Finished, Generated: output}) }, func(l *hand) {
					l.giveBack(waits.slot, Outcome{Kind: Cancelled})
				})
				h.fleet(ranks(1, 1, 0))
			}
			s := h.status(h.at)
			s.Score()
			p := s.Models[0].Predictors[0]
			require.Equal(t, "survival", p.Kind)
			require.NotNil(t, p.Scores)
			require.Equal(t, c.rows, p.Scores.Rows, "one a finished request; those cut off at once are not known")
			if c.rows < 40 {
				return
			}
			at := predictor.NewSurvival(lengths(300))
			var want [1]predictor.Prediction
			at.Predict(80, []predictor.Query{{}}, want[:])
			ended := 6. // 60, 64, .. 80
			require.InDelta(t, (ended*(1-want[0].P)*(1-want[0].P)+(40-ended)*want[0].P*want[0].P)/40, float64(p.Scores.Brier), 1e-9)
		})
	}
}

func TestLengthsThatAreToldAreKnown(t *testing.T) {
	cfg := realConfig("brh:horizon=40,predictor=oracle")
	_, err := New(cfg)
	require.ErrorContains(t, err, "only a replay can")
	cfg.Predictor.KnownLengths = true
	h := newHand(t, cfg)
	h.fleet(ranks(1, 9, 0))
	w := h.make(pool.Entry{Prompt: 5})
	h.waiting[w.entry] = w
	h.do(func(h *hand) { h.apply(Enqueue{Entry: w.entry, Output: 50}) })
	s := w.slotNow(t)
	for generated, want := range map[int]float32{0: 40, 20: 30, 49: 1, 70: 1} {
		s.generated.Store(int32(generated))
		h.put(pool.Entry{Prompt: 5}).slotNow(t)
		require.Equal(t, want, s.rhat(), "after %d tokens", generated)
	}
	require.NotEmpty(t, h.boards["m"].outputLengths)
	h.release(s)
	require.Empty(t, h.boards["m"].outputLengths, "nothing is kept of a request that has left")
}
