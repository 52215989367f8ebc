package geo

import (
	"math/rand/v2"
	"time"
)

// Clock is the source of a Node's time: the computer's clock, or a simulated one.
type Clock interface {
	Now() time.Time
	// After calls f once, after d, and never before After returns. stop reports
	// whether it prevents the call.
	After(d time.Duration, f func()) (stop func() bool)
	// Spread is a random number from 0 up to 1, a new one at each call. It keeps
	// dispatchers that were started together from asking at the same moments.
	Spread() float64
}

type wallClock struct{}

func (wallClock) Now() time.Time                              { return time.Now() }
func (wallClock) After(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }
func (wallClock) Spread() float64                             { return rand.Float64() }
