package vectors

import (
	"fmt"
	"math"

	"evenkeel/predictor"
)

func survival(in struct {
	Outputs []int32 `json:"outputs"`
	Age     int32   `json:"age"`
	Horizon int     `json:"H"`
	Tau     float64 `json:"tau"`
}, want struct {
	P    float64 `json:"p_hat"`
	Mu   float64 `json:"mu_hat"`
	Rhat float64 `json:"r_hat"`
}) error {
	var got [1]predictor.Prediction
	predictor.NewSurvival(in.Outputs).Predict(in.Horizon, []predictor.Query{{Age: in.Age}}, got[:])
	rules := predictor.Rules{H: in.Horizon, Tau: in.Tau}
	rhat, _ := rules.Gate(got[0])
	if err := near("p_hat", got[0].P, want.P); err != nil {
		return err
	}
	if err := near("mu_hat", got[0].Mu, want.Mu); err != nil {
		return err
	}
	return near("r_hat", float64(rhat), want.Rhat)
}

func refresh(in struct {
	Outputs []int32 `json:"outputs"`
	Horizon int     `json:"H"`
	Tau     float64 `json:"tau"`
	Every   int     `json:"every"`
	Tokens  int     `json:"tokens"`
}, want struct {
	Rhat []float64 `json:"r_hat"`
}) error {
	rules := predictor.Rules{H: in.Horizon, Tau: in.Tau, Every: in.Every}
	got := rules.Follow(predictor.NewSurvival(in.Outputs), predictor.Query{}, in.Tokens)
	return nearAll("r_hat", got, want.Rhat)
}

func score(in struct {
	Finished  []int     `json:"finished"`
	P         []float64 `json:"p_hat"`
	Mu        []float64 `json:"mu_hat"`
	Remaining []float64 `json:"remaining"`
}, want struct {
	AUC            predictor.Figure `json:"auc"`
	Brier          predictor.Figure `json:"brier"`
	ConditionalMAE predictor.Figure `json:"conditional_mae"`
}) error {
	rows := make([]predictor.Row, len(in.Finished))
	if len(in.P) != len(rows) || len(in.Mu) != len(rows) || len(in.Remaining) != len(rows) {
		return fmt.Errorf("in: the four lists differ in length")
	}
	for i := range rows {
		rows[i] = predictor.Row{P: in.P[i], Mu: in.Mu[i], Remaining: in.Remaining[i], Ended: in.Finished[i] == 1}
	}
	got := predictor.Score(rows)
	for _, c := range []struct {
		what      string
		got, want predictor.Figure
	}{
		{"auc", got.AUC, want.AUC},
		{"brier", got.Brier, want.Brier},
		{"conditional_mae", got.ConditionalMAE, want.ConditionalMAE},
	} {
		if math.IsNaN(float64(c.got)) != math.IsNaN(float64(c.want)) {
			return fmt.Errorf("%s = %v, want %v", c.what, c.got, c.want)
		}
		if c.want.Defined() {
			if err := near(c.what, float64(c.got), float64(c.want)); err != nil {
				return err
			}
		}
	}
	return nil
}
