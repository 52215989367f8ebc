package forecast

import (
	"math"
	"time"
)

// Starts corrects by what came how long requests are predicted to take until they start. Predictions that tell
// requests apart stay as they are, but for an error that all share. The less they do, the closer they are drawn to
// what requests take in the mean: a start that is foreseen wrongly is worse than none.
type Starts struct {
	n                int
	foreseen, took   float64 // means, in seconds
	spread, together float64 // variance of the first, and covariance of both
}

// startsLeast is how many requests it takes until anything is corrected.
const startsLeast = 20

// startsGain is the weight of the last request: that of an earlier one halves with every 500.
var startsGain = 1 - math.Exp2(-1.0/500)

// Came takes in how long a request took to its start, of which so much was predicted.
func (s *Starts) Came(foreseen, took time.Duration) {
	s.n++
	gain := max(1/float64(s.n), startsGain)
	x, y := foreseen.Seconds()-s.foreseen, took.Seconds()-s.took
	s.foreseen += gain * x
	s.took += gain * y
	s.spread += gain * ((1-gain)*x*x - s.spread)
	s.together += gain * ((1-gain)*x*y - s.together)
}

// Correct is what a predicted time is believed to be.
func (s *Starts) Correct(foreseen time.Duration) time.Duration {
	if s.n < startsLeast {
		return foreseen
	}
	tells := 1.0
	if s.spread > 0 {
		tells = min(max(s.together/s.spread, 0), 1)
	}
	seconds := s.took + tells*(foreseen.Seconds()-s.foreseen)
	return max(1, time.Duration(seconds*float64(time.Second)))
}
