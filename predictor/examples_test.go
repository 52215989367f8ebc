package predictor_test

import (
	"fmt"
	"time"

	"evenkeel/predictor"
)

// One request against a history of four: half of those that got to 10 tokens
// ended within the next 40.
func Example() {
	table := predictor.NewSurvival([]int32{5, 30, 50, 200, 900})
	out := make([]predictor.Prediction, 1)
	table.Predict(40, []predictor.Query{{Prompt: 700, Age: 10}}, out)
	rhat, open := predictor.DefaultRules(40).Gate(out[0])
	fmt.Println(out[0].P, out[0].Mu, rhat, open)
	// Output: 0.5 30 35 true
}

// A board keeps a State beside every running request, advances it by what was
// generated, and asks for all that are due at once.
func ExampleRules_Advance() {
	rules := predictor.DefaultRules(80)
	state := predictor.State{Rhat: 30, Open: true}
	fmt.Println(rules.Advance(&state, 0, 4), state.Rhat)
	fmt.Println(rules.Advance(&state, 4, 21), state.Rhat)
	// Output:
	// false 26
	// true 9
}

func ExampleOnline() {
	online, err := predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival})
	if err != nil {
		fmt.Println(err)
		return
	}
	now := time.Unix(0, 0)
	online.Rebuild(now) // the first tables know nothing
	online.Finished(1200, 300, 0)
	_, _, due := online.Rebuild(now.Add(time.Millisecond))
	fmt.Println(due)
	_, table, due := online.Rebuild(now.Add(time.Second))
	fmt.Println(due, table.MeanOutput())
	// Output:
	// false
	// true 300
}

func ExampleTrain() {
	reqs := make([]predictor.Sample, 400)
	for i := range reqs {
		reqs[i] = predictor.Sample{At: time.Duration(i) * time.Second, Prompt: 500, Output: int32(20 + i*37%400)}
	}
	fit, err := predictor.Train("survival", reqs, predictor.Options{Horizon: 80})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s: Brier %.3f, base rate's %.3f\n", fit.Kind, fit.Holdout.Brier, fit.Holdout.Base.Brier)
	// Output: survival: Brier 0.182, base rate's 0.221
}
