package predictor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// near compares as the vectors' README says.
func near(t *testing.T, want, got float64, what string) {
	t.Helper()
	if !(math.Abs(got-want) <= 1e-6*max(1, math.Abs(want))) {
		t.Errorf("%s = %v, want %v", what, got, want)
	}
}

// golden runs a check on every line of a file of golden vectors.
func golden[In, Want any](t *testing.T, kind string, check func(t *testing.T, in In, want Want)) {
	f, err := os.Open(filepath.Join("testdata", kind+".jsonl"))
	require.NoError(t, err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	n := 0
	for ; lines.Scan(); n++ {
		var v struct {
			Kind, ID string
			In       In
			Want     Want
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &v))
		require.Equal(t, kind, v.Kind)
		t.Run(v.ID, func(t *testing.T) { check(t, v.In, v.Want) })
	}
	require.NoError(t, lines.Err())
	require.NotZero(t, n)
}

func TestSurvivalVectors(t *testing.T) {
	type in struct {
		H, Age  int
		Tau     float64
		Outputs []int32
	}
	type want struct {
		P  float64 `json:"p_hat"`
		Mu float64 `json:"mu_hat"`
		R  float64 `json:"r_hat"`
	}
	golden(t, "survival", func(t *testing.T, in in, want want) {
		var out [1]Prediction
		NewSurvival(in.Outputs).Predict(in.H, []Query{{Age: int32(in.Age)}}, out[:])
		near(t, want.P, out[0].P, "p_hat")
		near(t, want.Mu, out[0].Mu, "mu_hat")
		rhat, _ := Rules{H: in.H, Tau: in.Tau}.Gate(out[0])
		near(t, want.R, float64(rhat), "r_hat")
	})
}

func TestRefreshVectors(t *testing.T) {
	type in struct {
		H, Every, Tokens int
		Tau              float64
		Outputs          []int32
	}
	type want struct {
		R []float64 `json:"r_hat"`
	}
	golden(t, "refresh", func(t *testing.T, in in, want want) {
		got := Rules{H: in.H, Tau: in.Tau, Every: in.Every}.Follow(NewSurvival(in.Outputs), Query{}, in.Tokens)
		require.Len(t, got, len(want.R))
		for a := range got {
			near(t, want.R[a], float64(got[a]), fmt.Sprintf("r_hat[%d]", a))
		}
	})
}

func TestScoreVectors(t *testing.T) {
	type in struct {
		Finished  []int
		P         []float64 `json:"p_hat"`
		Mu        []float64 `json:"mu_hat"`
		Remaining []float64
	}
	type want struct {
		AUC, Brier float64
		MAE        float64 `json:"conditional_mae"`
	}
	golden(t, "score", func(t *testing.T, in in, want want) {
		rows := make([]Row, len(in.Finished))
		for i := range rows {
			rows[i] = Row{P: in.P[i], Mu: in.Mu[i], Remaining: in.Remaining[i], Ended: in.Finished[i] == 1}
		}
		got := Score(rows)
		near(t, want.AUC, float64(got.AUC), "auc")
		near(t, want.Brier, float64(got.Brier), "brier")
		near(t, want.MAE, float64(got.ConditionalMAE), "conditional_mae")
	})
}
