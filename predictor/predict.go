// Package predictor estimates how many more tokens a running request will generate.
//
// For a request that has generated a known number of tokens (its age), a Predictor answers two questions about the next H decode steps:
// with which probability does the request end within them, and how many tokens does it generate in this case? Rules turns the answer into
// one number, r̂, by which a policy projects loads, and says when to ask again. Online keeps the tables up to date from finished requests.
// Train makes them from a trace, and Fit stores them in a file for a server.
//
// The package has no clock, I/O, goroutine or log. Predictors never change, so any number of goroutines may use one while its owner builds
// the next and swaps a pointer.
package predictor

import "fmt"

// Query is one running request.
type Query struct {
	Prompt int32  // length of the prompt in tokens
	Age    int32  // tokens generated for the client so far, on all ranks on which the request has run
	Key    uint64 // the same for equal prompts; 0: no key
}

// Prediction is about the next h steps of a request. In its formulas, a is the age of the request, O is the length of its whole output in
// tokens, and R = O - a.
type Prediction struct {
	P  float64 // probability that the request ends within the h steps: P(R <= h | O > a)
	Mu float64 // mean number of its further tokens if it ends within them: E[R | R <= h, O > a]; h if P is 0
}

// unknown returns the prediction if nothing is known: the request does not end within the horizon.
func unknown(h int) Prediction { return Prediction{P: 0, Mu: float64(h)} }

// Predictor predicts for several requests at once: out[i] is the answer to queries[i]. out is at least as long as queries. Predict
// allocates nothing, and several goroutines may call it at the same time.
type Predictor interface {
	Predict(horizon int, queries []Query, out []Prediction)
}

// Kind names a predictor in config, on the command line and in a fit file.
type Kind string

// The kinds, the simpler first.
const (
	KindNone     Kind = "none"     // no request is predicted to end within the horizon
	KindOracle   Kind = "oracle"   // knows the real length; only in simulations
	KindSurvival Kind = "survival" // predicts from all past output lengths
	KindExact    Kind = "exact"    // predicts from the output lengths of equal prompts, or else of prompts of about the same length
)

// ParseKind returns the kind with this name, or an error that lists the names.
func ParseKind(name string) (Kind, error) {
	switch k := Kind(name); k {
	case KindNone, KindOracle, KindSurvival, KindExact:
		return k, nil
	}
	return "", fmt.Errorf("predictor %q: not one of none, oracle, survival, exact", name)
}

// None predicts no ends: every request is expected to go on for the whole horizon.
type None struct{}

// Predict answers that no request ends within the horizon.
func (None) Predict(horizon int, queries []Query, out []Prediction) {
	for i := range queries {
		out[i] = unknown(horizon)
	}
}
