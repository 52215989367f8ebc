// Package predictor estimates how many more tokens a running request will generate.
//
// For a request that has generated a known number of tokens (its age), a Predictor answers two
// questions about the next H decode steps: with which probability does it end within them, and
// after how many tokens in this case? Rules turns the answer into one number, r̂, by which a policy
// projects loads. Online keeps the tables up to date from finished requests. Train makes them from
// a trace, and Fit stores them in a file.
//
// The package has no clock, I/O, goroutine or log. Predictors never change, so any number of
// goroutines may use one while its owner builds the next and swaps a pointer.
package predictor

import "fmt"

// Query is one running request.
type Query struct {
	Prompt int32  // length of the prompt in tokens
	Age    int32  // tokens generated so far, on all ranks
	Key    uint64 // the same for equal prompts; 0: none
}

// Prediction is about the next h steps of a request of age a, whose whole output has O tokens; R =
// O - a.
type Prediction struct {
	P  float64 // probability of an end within the h steps: P(R <= h | O > a)
	Mu float64 // mean number of tokens until such an end: E[R | R <= h, O > a]; h if P is 0
}

func unknown(h int) Prediction { return Prediction{P: 0, Mu: float64(h)} }

// Predictor predicts for several requests at once: out[i] is the answer to queries[i]. out is at
// least as long as queries. Predict allocates nothing, and several goroutines may call it at the
// same time.
type Predictor interface {
	Predict(horizon int, queries []Query, out []Prediction)
}

// Kind names a predictor in config, on the command line and in a fit file.
type Kind string

// The kinds, the simpler first.
const (
	KindNone     Kind = "none"     // predicts no ends
	KindOracle   Kind = "oracle"   // knows the real length; only in simulations
	KindSurvival Kind = "survival" // predicts from all past output lengths
	KindExact    Kind = "exact"    // predicts from equal prompts, or else from prompts of about the same length
)

// ParseKind returns the kind with this name.
func ParseKind(name string) (Kind, error) {
	switch k := Kind(name); k {
	case KindNone, KindOracle, KindSurvival, KindExact:
		return k, nil
	}
	return "", fmt.Errorf("predictor %q: not one of none, oracle, survival, exact", name)
}

// None expects every request to go on for the whole horizon.
type None struct{}

func (None) Predict(horizon int, queries []Query, out []Prediction) {
	for i := range queries {
		out[i] = unknown(horizon)
	}
}
