package fit

import (
	"math"
	"time"
)

const (
	residualHalfLife = 30 * time.Second
	residualPrior    = 5.0 // the mean begins as if so many probes had had no deviation
	residualNoise    = 2.0 // a mean within so many standard errors of zero counts as chance
)

// Residual is the recent difference between one engine's prefill times and the predictions of the
// LatencyModel, which all engines of a kind share: one of them may run hot or share its machine.
// Old differences fade, so that an engine without answers soon counts like the others. A difference
// that may be chance does not count, because it would hide small real differences between engines.
type Residual struct {
	sum, squares, weight float64
	at                   time.Time // of the last fadeTo
}

// Add takes ms. The duration counts as at most twice the prediction, so that a single prefill that
// hung has little effect.
func (r *Residual) Add(took, predicted float64, now time.Time) {
	r.fadeTo(now)
	deviation := min(took, 2*predicted) - predicted
	r.sum += deviation
	r.squares += deviation * deviation
	r.weight++
}

// Ms is by how many ms the engine's prefills take longer than predicted. The mean difference is
// moved towards 0 by residualNoise standard errors, and then reduced as if residualPrior further
// prefills had had none.
func (r *Residual) Ms(now time.Time) float64 {
	r.fadeTo(now)
	if r.weight < 1 { // no answers, or only old ones
		return 0
	}
	mean := r.sum / r.weight
	standardError := math.Sqrt(max(0, r.squares/r.weight-mean*mean) / r.weight)
	beyondChance := max(0, math.Abs(mean)-residualNoise*standardError)
	return math.Copysign(beyondChance, mean) * r.weight / (r.weight + residualPrior)
}

func (r *Residual) fadeTo(now time.Time) {
	decay := math.Exp2(-float64(now.Sub(r.at)) / float64(residualHalfLife))
	r.sum, r.squares, r.weight, r.at = r.sum*decay, r.squares*decay, r.weight*decay, now
}
