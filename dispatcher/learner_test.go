package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"evenkeel/pool"
	"evenkeel/predictor"
)

// fitOf is a fit of a kind with these outputs.
func fitOf(t testing.TB, kind string, outputs ...int32) *predictor.Fit {
	t.Helper()
	samples := make([]predictor.Sample, len(outputs))
	for i, o := range outputs {
		samples[i] = predictor.Sample{At: time.Duration(i) * time.Second, Prompt: 100, Output: o}
	}
	f, err := predictor.Train(kind, samples, predictor.Options{Created: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)})
	require.NoError(t, err)
	return f
}

func repeat(n int, output int32) []int32 {
	all := make([]int32, n)
	for i := range all {
		all[i] = output
	}
	return all
}

func TestFinishedRequestsAreInTheTablesWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := realConfig("evenkeel")
		registry := prometheus.NewRegistry()
		cfg.Registerer = registry
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 100, 0))
		leave := func(kind Kind, age, generated int) {
			r := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 30 + age, Age: age})
			require.NoError(t, r.Err)
			d.Release(r.Slot, Outcome{Kind: kind, Generated: generated})
		}
		table := func() PredictorStatus {
			synctest.Wait()
			return d.Status(t.Context()).Models[0].Predictors[0]
		}
		time.Sleep(2 * time.Second)
		leave(Finished, 0, 40)
		require.Equal(t, 1, table().Outputs, "at once: the last table is old")
		leave(Finished, 0, 40)
		leave(Finished, 0, 40)
		require.Equal(t, 1, table().Outputs, "at most once a second")
		time.Sleep(time.Second)
		require.Equal(t, 3, table().Outputs)

		leave(Cancelled, 0, 5)
		leave(Failed, 0, 6)
		for range 64 {
			leave(Finished, 0, 40)
		}
		require.Equal(t, 67, table().Outputs, "sixty-four are a table at once, and no cancelled or failed one among them")
		text := scrape(t, registry)
		require.Contains(t, text, `evenkeel_predictor_censored_total{model="m"} 2`)
		require.Contains(t, text, `evenkeel_predictor_outputs{kind="survival",model="m"} 67`)
		require.Contains(t, text, `evenkeel_predictor_dropped_total 0`)

		leave(Finished, 100, 20)
		time.Sleep(time.Second)
		synctest.Wait()
		d.inbox.push(func(l *runner) {
			s := l.subjects[subjectKey{"m", predictor.KindSurvival}]
			if outputs := s.tables.survival.Outputs(); outputs[67] != 120 {
				t.Errorf("the longest output is %d, want 120: a resumed request counts whole", outputs[67])
			}
		})
		synctest.Wait()
	})
}

func TestADrainTeachesNothing(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{Drain: true}).slotNow(t))
	require.Empty(t, h.learner.endings)
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Len(t, h.learner.endings, 1)
}

func TestNothingIsLearnedForPoliciesThatReadNothing(t *testing.T) {
	h := newHand(t, realConfig("br0"))
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Empty(t, h.learner.endings)
	require.Empty(t, h.subjects)

	cfg := realConfig("br0")
	cfg.Predictor.Kind = predictor.KindExact
	h = newHand(t, cfg)
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Len(t, h.learner.endings, 1, "unless the config says so: a policy may want it later")
	require.Contains(t, h.subjects, subjectKey{"m", predictor.KindExact})
}

func TestEndingsBeyondTheBoundAreDroppedAndCounted(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	for range endingsMost + 3 {
		h.learner.hear(ending{finished: true, output: 5})
	}
	require.Len(t, h.learner.endings, endingsMost)
	require.EqualValues(t, 3, count(t, h.metrics.endingsDropped))
}

func TestModelsLearnApart(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	two := ranks(2, 9, 0)
	two[1].Model = "n"
	h.fleet(two)
	for model, output := range map[string]int{"m": 10, "n": 1000} {
		for range 60 {
			s := h.put(pool.Entry{Model: model}).slotNow(t)
			h.do(func(l *runner) { l.release(s, Outcome{Generated: output}) })
		}
	}
	h.learn()
	for model, output := range map[string]float64{"m": 10, "n": 1000} {
		require.Equal(t, output, h.subjects[subjectKey{model, predictor.KindSurvival}].tables.survival.MeanOutput())
	}
}

func TestAFitIsWhereTablesStartAndCanBeSwapped(t *testing.T) {
	cfg := realConfig("evenkeel")
	cfg.Predictor = PredictorConfig{Kind: predictor.KindSurvival, Fit: fitOf(t, "survival", repeat(80, 500)...)}
	h := newHand(t, cfg)
	h.fleet(ranks(1, 9, 0))
	h.learn()
	mean := func() float64 {
		h.put(pool.Entry{}).slotNow(t)
		return h.boards["m"].snapshot.Outlook.MeanOutput()
	}
	require.EqualValues(t, 500, mean())
	require.NoError(t, h.setFit(fitOf(t, "survival", repeat(80, 20)...)))
	require.EqualValues(t, 500, mean(), "until the learner has built the tables")
	h.learn()
	require.EqualValues(t, 20, mean())
}

func TestPredictorsThatCannotBeHadAreRefused(t *testing.T) {
	trees := fitOf(t, "learned", lengths(400)...)
	for _, c := range []struct {
		name, policy string
		kind         predictor.Kind
		fit          *predictor.Fit
		refused      string
	}{
		{"an oracle in the config", "br0", "oracle", nil, "only a replay can"},
		{"an oracle in the policy", "brh:predictor=oracle", "", nil, "only a replay can"},
		{"an oracle by its mode", "evenkeel:mode=oracle", "", nil, "only a replay can"},
		{"trees without a file", "br0", "learned", nil, "`evenkeel fit --kind learned`"},
		{"trees from a file without any", "brh:predictor=learned,horizon=80", "", fitOf(t, "survival", lengths(90)...), "`evenkeel fit --kind learned`"},
		{"trees of another horizon", "brh:predictor=learned,horizon=40", "", trees, "horizon of 80 steps, the policy looks 40 ahead"},
		{"a policy that cannot use the configured kind", "evenkeel", "learned", trees, "predictor=learned: want survival"},
		{"trees of the policy's horizon", "brh:predictor=learned,horizon=80", "", trees, ""},
		{"the configured kind is the policy's", "brh:horizon=80", "learned", trees, ""},
		{"what the policy names stands", "evenkeel:predictor=survival", "learned", trees, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := realConfig(c.policy)
			cfg.Predictor = PredictorConfig{Kind: c.kind, Fit: c.fit}
			_, err := Start(t.Context(), cfg)
			if c.refused == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.refused)
		})
	}
}

func TestAFitThatThePolicyCannotUseChangesNothing(t *testing.T) {
	cfg := realConfig("brh:predictor=learned,horizon=80")
	cfg.Predictor.Fit = fitOf(t, "learned", lengths(400)...)
	d := start(t, cfg)
	require.ErrorContains(t, d.SetFit(fitOf(t, "survival", lengths(90)...)), "has no trees")
	require.ErrorContains(t, d.SetPolicy("brh:predictor=learned,horizon=79"), "the policy looks 79 ahead")
	require.NoError(t, d.SetPolicy("br0"))
	require.NoError(t, d.SetFit(fitOf(t, "survival", lengths(90)...)), "br0 takes any")
	require.ErrorContains(t, d.SetPolicy("brh:predictor=learned,horizon=80"), "has no trees")
}
