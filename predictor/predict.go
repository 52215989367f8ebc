// Package predictor estimates how many more tokens a running request will
// generate.
//
// A Predictor answers for a request of known age two questions about the next
// H decode steps: how likely is it to end within them, and how long does it
// then still run. Rules turns the answer into the one number a policy projects
// loads with, and says when to ask again. Online keeps the tables fresh from
// finished requests; Train and Fit carry them from a trace to a server.
//
// The package is pure: no clock, I/O, goroutine or log. Predictors are
// immutable values, so any number of goroutines may read one while its owner
// prepares the next and swaps a pointer.
package predictor

import "fmt"

// Query is one running request.
type Query struct {
	Prompt int32  // tokens
	Age    int32  // tokens generated for the client so far, over every rank it ran on
	Key    uint64 // equal for requests that recur, 0 = none
}

// Prediction is about the next h steps of a request of age a that will have
// generated O tokens in all; R = O - a.
type Prediction struct {
	P  float64 // P(R <= h | O > a)
	Mu float64 // E[R | R <= h, O > a]; h where P is 0
}

// unknown is the prediction if nothing is known: the request runs past the horizon.
func unknown(h int) Prediction { return Prediction{P: 0, Mu: float64(h)} }

// Predictor answers a batch, out[i] for q[i]; out is as long as q. It
// allocates nothing and may be called by several goroutines at once.
type Predictor interface {
	Predict(horizon int, queries []Query, out []Prediction)
}

// Kind names a predictor in config, on the command line and in a fit file.
type Kind string

// The kinds, the simpler first.
const (
	KindNone     Kind = "none"     // every request runs past the horizon
	KindOracle   Kind = "oracle"   // knows the outcome: simulation only
	KindSurvival Kind = "survival" // from all past output lengths
	KindExact    Kind = "exact"    // from those of the same prompt, else of prompts as long
)

// ParseKind reads one of the four names.
func ParseKind(name string) (Kind, error) {
	switch k := Kind(name); k {
	case KindNone, KindOracle, KindSurvival, KindExact:
		return k, nil
	}
	return "", fmt.Errorf("predictor %q: not one of none, oracle, survival, exact", name)
}

// None knows nothing: r̂ stays at the horizon.
type None struct{}

// Predict answers that no request ends within the horizon.
func (None) Predict(horizon int, queries []Query, out []Prediction) {
	for i := range queries {
		out[i] = unknown(horizon)
	}
}
