package prefill

import "time"

const (
	circuitFailures = 5 // in a row, retryable ones
	circuitFirstOut = time.Second
	circuitMaxOut   = 30 * time.Second
)

// circuit takes a candidate out after failures in a row, for twice as long
// each time the one request that then tries it fails too (prefill P47). The
// zero value is closed: the candidate is in.
type circuit struct {
	failures int
	out      time.Duration // how long the present outage lasts
	until    time.Time     // zero: in
	trial    uint64        // lease that tries the candidate again, 0: none
}

// allows says whether a new request may be sent.
func (c *circuit) allows(now time.Time) bool {
	return c.until.IsZero() || c.trial == 0 && !now.Before(c.until)
}

// send tells the circuit of a request; past an outage it becomes the trial.
func (c *circuit) send(lease uint64, now time.Time) {
	if !c.until.IsZero() && c.allows(now) {
		c.trial = lease
	}
}

// succeed brings the candidate back in.
func (c *circuit) succeed() { *c = circuit{} }

// fail counts a retryable failure and reports whether it took the candidate
// out. While out, only the trial counts: others were sent before.
func (c *circuit) fail(lease uint64, now time.Time) (out bool) {
	switch {
	case c.until.IsZero():
		if c.failures++; c.failures < circuitFailures {
			return false
		}
		c.out = circuitFirstOut
	case c.trial == lease:
		c.out = min(2*c.out, circuitMaxOut)
	default:
		return false
	}
	c.trial = 0
	c.until = now.Add(c.out)
	return true
}

// neutral ends a request that says nothing about the candidate, such as one
// whose client left. If it was the trial, the next request is.
func (c *circuit) neutral(lease uint64) {
	if c.trial == lease {
		c.trial = 0
	}
}
