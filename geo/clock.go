package geo

import (
	"math/rand/v2"
	"time"
)

// Clock is the source of the Peers' time: the computer's clock, or a simulated one.
type Clock interface {
	Now() time.Time
	// After calls f once, after the time d and after After has returned. stop prevents the call, and
	// reports whether it came in time.
	After(d time.Duration, f func()) (stop func() bool)
	// Spread returns a new random number from 0 up to 1. It spreads the probes of proxies that were
	// started at the same time.
	Spread() float64
}

type wallClock struct{}

func (wallClock) Now() time.Time                              { return time.Now() }
func (wallClock) After(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }
func (wallClock) Spread() float64                             { return rand.Float64() }
