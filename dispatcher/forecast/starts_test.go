package forecast

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Requests take 1 to 9 s, all times alike; each prediction is off by a factor of its own.
func TestStartsAreBelievedAsFarAsTheyTellRequestsApart(t *testing.T) {
	const mean, square = 5, 91.0 / 3 // of what they take
	for _, sigma := range []float64{0, 0.3, 1} {
		for _, late := range []float64{0, 2} { // than foreseen, all of them
			t.Run(fmt.Sprintf("off by %v, %v s late", sigma, late), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(1, 2))
				var s Starts
				for range 5000 {
					took := 1 + 8*rng.Float64()
					s.Came(seconds(took*math.Exp(sigma*rng.NormFloat64())), seconds(took+late))
				}
				shift := math.Exp(sigma * sigma / 2)
				tells := shift * (square - mean*mean) / (square*math.Exp(2*sigma*sigma) - mean*mean*shift*shift)
				for _, foreseen := range []float64{1, 9} {
					require.InDelta(t, mean+late+tells*(foreseen-mean*shift), s.Correct(seconds(foreseen)).Seconds(), 0.5)
				}
			})
		}
	}
}

// No difference between requests is made larger than it was foreseen.
func TestStartsAreNotDrawnApart(t *testing.T) {
	var s Starts
	for i := range 1000 {
		s.Came(seconds(float64(i%9)), seconds(float64(2*(i%9))))
	}
	require.InDelta(t, 8, (s.Correct(seconds(9)) - s.Correct(seconds(1))).Seconds(), 1e-6)
}

func TestStartsAreNotCorrectedAtFirst(t *testing.T) {
	var s Starts
	for range startsLeast - 1 {
		s.Came(time.Second, time.Hour)
	}
	require.Equal(t, time.Second, s.Correct(time.Second))
	s.Came(time.Second, time.Hour)
	require.InDelta(t, 3600, s.Correct(time.Second).Seconds(), 1, "all are foreseen alike, and all are wrong alike")
	for range 10_000 {
		s.Came(time.Hour, time.Millisecond)
	}
	require.Positive(t, s.Correct(time.Nanosecond))
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
