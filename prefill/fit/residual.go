package fit

import (
	"math"
	"time"
)

const (
	residualHalfLife = 30 * time.Second
	residualPrior    = 5.0 // weight of a prior of no deviation, in probes
	residualNoise    = 2.0 // so many standard errors of the mean are taken for chance
)

// Residual is by how much longer, or shorter, one engine's prefills lately took than predicted. The law of its kind
// does not know that an engine is hot, or shares its machine. What is learned fades, so that an engine that answers
// nothing soon counts like its kind. A deviation that may be chance does not count: it would only hide small real
// differences between engines.
type Residual struct {
	sum, squares, weight float64
	at                   time.Time
}

// Add takes how long a prefill took and what was predicted, in ms. The time counts as at most twice the prediction,
// so that one prefill that hung does not decide.
func (r *Residual) Add(took, predicted float64, now time.Time) {
	r.fade(now)
	deviation := min(took, 2*predicted) - predicted
	r.sum += deviation
	r.squares += deviation * deviation
	r.weight++
}

// Ms is how many ms a prefill will take beyond its prediction; below zero: it will take less.
func (r *Residual) Ms(now time.Time) float64 {
	r.fade(now)
	if r.weight < 1 {
		return 0
	}
	mean := r.sum / r.weight
	chance := residualNoise * math.Sqrt(max(0, r.squares/r.weight-mean*mean)/r.weight)
	return math.Copysign(max(0, math.Abs(mean)-chance), mean) * r.weight / (r.weight + residualPrior)
}

// fade takes the weight off what was learned that it has lost since the last call.
func (r *Residual) fade(now time.Time) {
	keep := math.Exp2(-float64(now.Sub(r.at)) / float64(residualHalfLife))
	r.sum, r.squares, r.weight, r.at = r.sum*keep, r.squares*keep, r.weight*keep, now
}
