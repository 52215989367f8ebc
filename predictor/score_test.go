package predictor

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func drawRows(t *rapid.T) []Row {
	return rapid.SliceOf(rapid.Custom(func(t *rapid.T) Row {
		return Row{
			P: float64(rapid.IntRange(0, 10).Draw(t, "p")) / 10, Mu: rapid.Float64Range(1, 80).Draw(t, "mu"),
			Remaining: float64(rapid.IntRange(1, 200).Draw(t, "remaining")), Ended: rapid.Bool().Draw(t, "ended"),
		}
	})).Draw(t, "rows")
}

func TestAUCIsEveryPairCompared(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := drawRows(t)
		wins, pairs := 0.0, 0.0
		for _, a := range rows {
			for _, b := range rows {
				if a.Ended && !b.Ended {
					pairs++
					switch {
					case a.P > b.P:
						wins++
					case a.P == b.P:
						wins += 0.5
					}
				}
			}
		}
		got := Score(rows).AUC
		if pairs == 0 {
			require.False(t, got.Defined(), "one class ranks nothing")
			return
		}
		require.InDelta(t, wins/pairs, float64(got), 1e-12)
	})
}

func TestTheBaseRateIsTheBestConstant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := drawRows(t)
		if len(rows) == 0 {
			return
		}
		base := ScoreConstant(rows, BaseRate(rows))
		other := ScoreConstant(rows, Prediction{P: rapid.Float64Range(0, 1).Draw(t, "p"), Mu: 40})
		require.LessOrEqual(t, float64(base.Brier), float64(other.Brier)+1e-12)
		if base.AUC.Defined() {
			require.InDelta(t, 0.5, float64(base.AUC), 1e-12)
		}
	})
}

func TestUndefinedScoresAreNull(t *testing.T) {
	b, err := json.Marshal(Score([]Row{{P: 0.25, Ended: false}}))
	require.NoError(t, err)
	require.JSONEq(t, `{"rows":1,"auc":null,"brier":0.0625,"conditional_mae":null}`, string(b))
	var back Scores
	require.NoError(t, json.Unmarshal(b, &back))
	require.False(t, back.AUC.Defined())
	require.Equal(t, Figure(0.0625), back.Brier)
	require.False(t, Score(nil).Brier.Defined())
}

func TestANaNPredictionEndsTheScoring(t *testing.T) {
	require.NotPanics(t, func() { Score([]Row{{P: math.NaN(), Ended: true}, {P: 0.5}, {P: math.NaN()}}) })
}

func TestCalibrateSplitsByPrediction(t *testing.T) {
	got := Calibrate([]Row{{P: 0}, {P: 0.04, Ended: true}, {P: 0.95, Ended: true}, {P: 1, Ended: true}}, 10)
	require.Equal(t, []Reliability{{2, 0.02, 0.5}, {2, 0.975, 1}}, got)
	require.Empty(t, Calibrate(nil, 10))
}
