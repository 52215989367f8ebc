// Package circuit takes something out of service after failures in a row and tries it again. Each time a trial fails,
// too, the time to the next one doubles.
//
// It is our own because other packages do not fit: sony/gobreaker's open time is fixed, and it and failsafe-go read a
// clock and take a lock of their own. A Circuit is a value beside the account that it belongs to, under its owner's
// lock and in its owner's time, and a trial that says nothing lets the next request be the trial.
package circuit

import (
	"cmp"
	"time"
)

// Defaults of a circuit.
const (
	Limit    = 5 // failures in a row
	FirstOut = time.Second
	MaxOut   = 30 * time.Second
)

// Circuit says whether what it belongs to is in service, and when it is tried again. The zero value is in service.
type Circuit struct {
	Limit int // failures in a row that take it out; 0: Limit

	failures int
	out      time.Duration // length of the present outage, or of the last one if no success has followed it
	until    time.Time     // end of the outage; zero: it is in service
	trial    uint64        // number of the request that is the trial; 0: none
}

// In says whether the circuit is in service, so that no trial is needed.
func (c *Circuit) In() bool { return c.until.IsZero() }

// Allows says whether a request may be sent: the circuit is in service, or the request would be its trial.
func (c *Circuit) Allows(now time.Time) bool {
	return c.In() || c.trial == 0 && !now.Before(c.until)
}

// Send records that a request is sent, by a number that is not 0. After an outage this request is the trial.
func (c *Circuit) Send(request uint64, now time.Time) {
	if !c.In() && c.Allows(now) {
		c.trial = request
	}
}

// Succeed brings the circuit back into service and forgets all failures.
func (c *Circuit) Succeed() { *c = Circuit{Limit: c.Limit} }

// Return brings the circuit back into service after less than a real success: the next outage is twice as long as
// this one, unless a success comes first.
func (c *Circuit) Return() { c.failures, c.until, c.trial = 0, time.Time{}, 0 }

// Fail counts a failure and reports whether it took the circuit out. While it is out only the trial's failure counts,
// because other requests were sent before.
func (c *Circuit) Fail(request uint64, now time.Time) (out bool) {
	switch {
	case c.In():
		if c.failures++; c.failures < cmp.Or(c.Limit, Limit) {
			return false
		}
	case c.trial == 0 || c.trial != request:
		return false
	}
	c.Trip(now)
	return true
}

// Forgive takes back one failure. An outage that has begun goes on.
func (c *Circuit) Forgive() {
	if c.In() {
		c.failures = max(0, c.failures-1)
	}
}

// Trip takes the circuit out now, however many failures were counted.
func (c *Circuit) Trip(now time.Time) {
	c.out = min(max(2*c.out, FirstOut), MaxOut)
	c.trial = 0
	c.until = now.Add(c.out)
}

// Neutral ends a request that says nothing, such as one whose client left. If it was the trial, the next request will
// be.
func (c *Circuit) Neutral(request uint64) {
	if c.trial == request {
		c.trial = 0
	}
}

// Failures is how many failures were counted in a row.
func (c *Circuit) Failures() int { return c.failures }

// Out is how long the present outage lasts.
func (c *Circuit) Out() time.Duration { return c.out }

// Until is when the outage ends; zero while in service.
func (c *Circuit) Until() time.Time { return c.until }
