// Package circuit is a circuit breaker: several failures in a row take an engine or another
// resource out of service. After a while one request, the trial, may be sent. Each time it fails,
// the time to the next doubles.
//
// Existing packages do not fit: with sony/gobreaker the time out of service is fixed, and both it
// and failsafe-go read a clock and have their own lock. Here the owner has the lock and passes the
// time. A trial may also end without a result: then the next request becomes the trial.
package circuit

import (
	"cmp"
	"time"
)

// Limits of a circuit.
const (
	Limit    = 5 // failures in a row; an owner can change it
	FirstOut = time.Second
	MaxOut   = 30 * time.Second
)

// Circuit is in service as its zero value.
type Circuit struct {
	Limit int // 0: the constant Limit

	failures     int
	outageLength time.Duration // of this outage, or of the last one without a success since
	trialAt      time.Time     // when the trial may be sent; zero: in service
	trialID      uint64        // 0: none runs
	trialSent    time.Time
}

// InService is false during an outage: then only the trial may be sent.
func (c *Circuit) InService() bool { return c.trialAt.IsZero() }

// Allows says whether a request may be sent: in service, or as the trial.
func (c *Circuit) Allows(now time.Time) bool { return c.InService() || !now.Before(c.TrialAt()) }

// Send records a request, whose id is not 0. If a trial is due, it becomes the trial.
func (c *Circuit) Send(request uint64, now time.Time) {
	if !c.InService() && c.Allows(now) {
		c.trialID, c.trialSent = request, now
	}
}

// Succeed also forgets all failures.
func (c *Circuit) Succeed() { *c = Circuit{Limit: c.Limit} }

// ReturnToService is for a check that proves less than a success: without one, the next outage is
// twice as long.
func (c *Circuit) ReturnToService() { c.failures, c.trialAt, c.trialID = 0, time.Time{}, 0 }

// Fail reports whether it took the circuit out of service. In an outage only the trial counts,
// because other requests were sent before.
func (c *Circuit) Fail(request uint64, now time.Time) (out bool) {
	switch {
	case c.InService():
		if c.failures++; c.failures < cmp.Or(c.Limit, Limit) {
			return false
		}
	case c.trialID == 0 || c.trialID != request:
		return false
	}
	c.Trip(now)
	return true
}

// Forgive takes back one failure. It does not end an outage.
func (c *Circuit) Forgive() {
	if c.InService() {
		c.failures = max(0, c.failures-1)
	}
}

// Trip takes the circuit out of service. Each outage is twice as long as the one before, unless
// there was a success.
func (c *Circuit) Trip(now time.Time) {
	c.outageLength = min(max(2*c.outageLength, FirstOut), MaxOut)
	c.trialID = 0
	c.trialAt = now.Add(c.outageLength)
}

// Neutral records a request without a result, such as when its client disconnected. If it was the
// trial, the next request becomes the trial.
func (c *Circuit) Neutral(request uint64) {
	if c.trialID == request {
		c.trialID = 0
	}
}

// Failures counts failures in a row.
func (c *Circuit) Failures() int { return c.failures }

// OutSince is when the present outage began.
func (c *Circuit) OutSince() time.Time { return c.trialAt.Add(-c.outageLength) }

// OutageLength stays after ReturnToService; after Succeed it is 0.
func (c *Circuit) OutageLength() time.Duration { return c.outageLength }

// TrialAt is zero in service. A trial without a result for MaxOut, because the resource hangs,
// makes room for another.
func (c *Circuit) TrialAt() time.Time {
	if c.trialID != 0 {
		return c.trialSent.Add(MaxOut)
	}
	return c.trialAt
}
