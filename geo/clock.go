package geo

import (
	"math/rand/v2"
	"time"
)

// Clock is the time that a Node lives in: the machine's, or that of a simulation.
type Clock interface {
	Now() time.Time
	// After calls f once, so much later and never before it returns. stop reports
	// whether it prevents the call.
	After(d time.Duration, f func()) (stop func() bool)
	// Spread is a number from 0 up to 1, another one at each call. It keeps
	// dispatchers that were started together from asking at the same moments.
	Spread() float64
}

type wallClock struct{}

func (wallClock) Now() time.Time                              { return time.Now() }
func (wallClock) After(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }
func (wallClock) Spread() float64                             { return rand.Float64() }
