package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
	"evenkeel/predictor"
)

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

func TestADrainTeachesNothing(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{Discard: true}).slotNow(t))
	require.Empty(t, h.finished)
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Len(t, h.finished, 1)
}

func TestNothingIsLearnedForPoliciesThatReadNothing(t *testing.T) {
	h := newHand(t, realConfig("br0"))
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Empty(t, h.finished)
	require.Empty(t, h.predictors)

	cfg := realConfig("br0")
	cfg.Predictor.Kind = predictor.KindExact
	h = newHand(t, cfg)
	h.fleet(ranks(1, 1, 0))
	h.release(h.put(pool.Entry{}).slotNow(t))
	require.Len(t, h.finished, 1, "unless the config says so: a policy may want it later")
	require.Contains(t, h.predictors, PredictorKey{"m", predictor.KindExact})
}

func TestModelsLearnApart(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	two := ranks(2, 9, 0)
	two[1].Model = "n"
	h.fleet(two)
	for model, output := range map[string]int{"m": 10, "n": 1000} {
		for range 60 {
			s := h.put(pool.Entry{Model: model}).slotNow(t)
			h.do(func(l *hand) { l.giveBack(s, Outcome{Generated: output}) })
		}
	}
	h.learn()
	for model, output := range map[string]float64{"m": 10, "n": 1000} {
		require.Equal(t, output, h.predictors[PredictorKey{model, predictor.KindSurvival}].Tables.survival.MeanOutput())
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
		return h.boards["m"].snapshot.MeanOutput
	}
	require.EqualValues(t, 500, mean())
	require.NoError(t, h.set(SetFit{fitOf(t, "survival", repeat(80, 20)...)}))
	require.EqualValues(t, 500, mean(), "until the learner has built the tables")
	h.learn()
	require.EqualValues(t, 20, mean())
}

func TestPredictorsThatCannotBeHadAreRefused(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		kind         predictor.Kind
		fit          *predictor.Fit
		refused      string
	}{
		{"an oracle in the config", "br0", "oracle", nil, "only a replay can"},
		{"an oracle in the policy", "brh:predictor=oracle", "", nil, "only a replay can"},
		{"the configured kind is the policy's", "brh:horizon=80", "exact", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := realConfig(c.policy)
			cfg.Predictor = PredictorConfig{Kind: c.kind, Fit: c.fit}
			_, err := New(cfg)
			if c.refused == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.refused)
		})
	}
}

func TestAResumedRequestIsLearnedWhole(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{Prompt: 130, Age: 100}).slotNow(t)
	h.giveBack(s, Outcome{Kind: Finished, Generated: 20})
	require.Equal(t, []OutputSample{{Model: "m", Finished: true, Prompt: 30, Output: 120}}, h.finished)
}

func TestTheAuditSeesALostCharge(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{Prompt: 40}).slotNow(t)
	h.boards["m"].slots.records[s.index] = slotRecord{}
	require.Equal(t, DriftStatus{Slots: 1, KVTokens: 40}, h.status(h.at).Drift)
}
