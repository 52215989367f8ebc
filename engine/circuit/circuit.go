// Package circuit takes something out of service after failures in a row and
// tries it again, at twice the distance each time the trial fails too.
//
// It is our own because of what it must not be: sony/gobreaker's open time is
// fixed, and it and failsafe-go read a clock and take a lock of their own. A
// Circuit is a value beside the account it belongs to, under its owner's lock,
// in its owner's time, and a trial that says nothing gives its turn back.
package circuit

import (
	"cmp"
	"time"
)

// What a circuit does unless its fields say otherwise.
const (
	Limit    = 5 // failures in a row
	FirstOut = time.Second
	MaxOut   = 30 * time.Second
)

// Circuit is in service or out of it. The zero value is in.
type Circuit struct {
	Limit int // failures in a row that take it out; 0: Limit

	failures int
	out      time.Duration // how long the present outage lasts, or the last one that no success followed
	until    time.Time     // zero: in
	trial    uint64        // request that tries it again, 0: none
}

// In says whether it is in service, no trial needed.
func (c *Circuit) In() bool { return c.until.IsZero() }

// Allows says whether a request may be sent: in service, or as the trial.
func (c *Circuit) Allows(now time.Time) bool {
	return c.In() || c.trial == 0 && !now.Before(c.until)
}

// Send tells of a request, by a number that is not 0; past an outage it becomes
// the trial.
func (c *Circuit) Send(request uint64, now time.Time) {
	if !c.In() && c.Allows(now) {
		c.trial = request
	}
}

// Succeed brings it back in and forgets the past.
func (c *Circuit) Succeed() { *c = Circuit{Limit: c.Limit} }

// Return brings it back in on less than a real success: the next outage is
// twice as long as this one unless one comes first.
func (c *Circuit) Return() { c.failures, c.until, c.trial = 0, time.Time{}, 0 }

// Fail counts a failure and reports whether it took it out. While out only the
// trial's counts: others were sent before.
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

// Forgive takes back a failure; an outage it began stays.
func (c *Circuit) Forgive() {
	if c.In() {
		c.failures = max(0, c.failures-1)
	}
}

// Trip takes it out now, whatever was counted.
func (c *Circuit) Trip(now time.Time) {
	c.out = min(max(2*c.out, FirstOut), MaxOut)
	c.trial = 0
	c.until = now.Add(c.out)
}

// Neutral ends a request that says nothing, such as one whose client left. If
// it was the trial, the next request is.
func (c *Circuit) Neutral(request uint64) {
	if c.trial == request {
		c.trial = 0
	}
}

// Failures is how many were counted in a row.
func (c *Circuit) Failures() int { return c.failures }

// Out is how long the present outage lasts.
func (c *Circuit) Out() time.Duration { return c.out }

// Until is when the outage ends; zero while in service.
func (c *Circuit) Until() time.Time { return c.until }
