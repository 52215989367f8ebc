// Package circuit is a circuit breaker. It takes an engine or another resource out of service after several failures in a row. After a
// while one request, the trial, may be sent again. Each time the trial fails, the time to the next one doubles.
//
// Existing packages do not fit: with sony/gobreaker the time out of service is fixed, and both it and failsafe-go read a clock and have
// their own lock. The owner of a Circuit passes the time and has its own lock. A trial may also end without a result: then the next request
// becomes the trial.
package circuit

import (
	"cmp"
	"time"
)

// Limits of a circuit. The owner of a circuit can change only the first one.
const (
	Limit    = 5                // failures in a row that take a resource out of service
	FirstOut = time.Second      // length of the first outage
	MaxOut   = 30 * time.Second // length of the longest outage
)

// Circuit says whether its resource is in service, and when the next trial may be sent. The zero value is in service.
type Circuit struct {
	Limit int // failures in a row that take the resource out of service; 0: the constant Limit

	failures     int
	outageLength time.Duration // length of the current outage, or of the last one if there was no success since
	trialAt      time.Time     // when the trial may be sent; zero: the circuit is in service
	trialID      uint64        // id of the trial while it runs; 0: none runs
	trialSent    time.Time     // when it was sent
}

// InService says whether requests may be sent to the resource. During an outage only the trial may be sent.
func (c *Circuit) InService() bool { return c.trialAt.IsZero() }

// Allows says whether a request may be sent: the circuit is in service, or the request would be its trial.
func (c *Circuit) Allows(now time.Time) bool { return c.InService() || !now.Before(c.TrialAt()) }

// Send records that a request is sent; its id is not 0. If a trial is due, this request becomes the trial.
func (c *Circuit) Send(request uint64, now time.Time) {
	if !c.InService() && c.Allows(now) {
		c.trialID, c.trialSent = request, now
	}
}

// Succeed brings the circuit back into service and forgets all failures.
func (c *Circuit) Succeed() { *c = Circuit{Limit: c.Limit} }

// ReturnToService brings the circuit back into service after a check that proves less than a success. Unless Succeed is called first, the
// next outage is twice as long as this one.
func (c *Circuit) ReturnToService() { c.failures, c.trialAt, c.trialID = 0, time.Time{}, 0 }

// Fail counts a failed request and reports whether this took the circuit out of service. During an outage only the failure of the
// trial counts, because the other requests were sent before the outage.
func (c *Circuit) Fail(request uint64, now time.Time) (out bool) {
	switch {
	case c.InService():
		if c.failures++; c.failures < cmp.Or(c.Limit, Limit) {
			return false
		}
	case c.trialID == 0 || c.trialID != request: // no trial runs, or this request is not the trial
		return false
	}
	c.Trip(now)
	return true
}

// Forgive takes back one counted failure. It does not end an outage.
func (c *Circuit) Forgive() {
	if c.InService() {
		c.failures = max(0, c.failures-1)
	}
}

// Trip takes the circuit out of service now, without regard to the number of failures. Each outage is twice as long as the one before,
// unless there was a success between them.
func (c *Circuit) Trip(now time.Time) {
	c.outageLength = min(max(2*c.outageLength, FirstOut), MaxOut)
	c.trialID = 0
	c.trialAt = now.Add(c.outageLength)
}

// Neutral records that a request ended without a result, for example because its client disconnected. If it was the trial, the next
// request becomes the trial.
func (c *Circuit) Neutral(request uint64) {
	if c.trialID == request {
		c.trialID = 0
	}
}

// Failures returns how many failures in a row were counted.
func (c *Circuit) Failures() int { return c.failures }

// OutSince returns when the present outage began.
func (c *Circuit) OutSince() time.Time { return c.trialAt.Add(-c.outageLength) }

// OutageLength returns the length of the current outage, from its start to the next trial. After ReturnToService it is that of the last
// outage, and after Succeed 0.
func (c *Circuit) OutageLength() time.Duration { return c.outageLength }

// TrialAt returns when the next trial may be sent; zero: the circuit is in service. A trial without a result for MaxOut, because the
// resource hangs, makes room for another one.
func (c *Circuit) TrialAt() time.Time {
	if c.trialID != 0 {
		return c.trialSent.Add(MaxOut)
	}
	return c.trialAt
}
