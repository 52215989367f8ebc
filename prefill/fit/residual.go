package fit

import (
	"math"
	"time"
)

const (
	residualHalfLife = 30 * time.Second
	residualPrior    = 5.0 // probes that were as predicted, before any was answered
	residualNoise    = 2.0 // standard errors of the mean that may be chance
)

// Residual is by how much one engine's prefills lately took longer than predicted, or
// shorter: its kind's law does not know that it is hot, or shares its machine. What is
// learned fades: an engine that answers nothing is soon as its kind. What may be chance
// does not count: it would only hide small differences between engines that are real.
type Residual struct {
	sum, squares, weight float64
	at                   time.Time
}

// Add takes what a prefill took and what was predicted, ms. It counts as twice the
// prediction at most, so that one that hung is not the rule.
func (r *Residual) Add(took, predicted float64, now time.Time) {
	r.fade(now)
	off := min(took, 2*predicted) - predicted
	r.sum += off
	r.squares += off * off
	r.weight++
}

// Ms is what a prefill will take beyond its prediction; below zero: less.
func (r *Residual) Ms(now time.Time) float64 {
	r.fade(now)
	if r.weight < 1 {
		return 0
	}
	mean := r.sum / r.weight
	chance := residualNoise * math.Sqrt(max(0, r.squares/r.weight-mean*mean)/r.weight)
	return math.Copysign(max(0, math.Abs(mean)-chance), mean) * r.weight / (r.weight + residualPrior)
}

func (r *Residual) fade(now time.Time) {
	keep := math.Exp2(-float64(now.Sub(r.at)) / float64(residualHalfLife))
	r.sum, r.squares, r.weight, r.at = r.sum*keep, r.squares*keep, r.weight*keep, now
}
