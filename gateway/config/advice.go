package config

import "time"

// minAdviceInterval is the least time between two samples of the load. All samples of the last
// minutes are kept, and all of them are read again for each new one.
const minAdviceInterval = 10 * time.Millisecond

// checkAdvice checks advice. Without an interval there is no advice, and the other keys do not
// matter.
func (c *Config) checkAdvice(bad report) {
	a := c.Advice
	switch {
	case a.Interval < 0:
		bad("$.advice.interval", "%v is negative; write 0s for no advice", a.Interval)
	case a.Interval == 0:
		return
	case a.Interval < minAdviceInterval:
		bad("$.advice.interval", "%v is too short, because each sample asks for the state of all ranks; write %v or more, or 0s for no "+
			"advice", a.Interval, minAdviceInterval)
	case a.Window < 2*a.Interval:
		bad("$.advice.interval", "%v is too long, because the mean of the last %v needs at least two values; write %v or less", a.Interval,
			a.Window, a.Window/2)
	}
	if a.Target <= 0 || a.Target > 1 {
		bad("$.advice.target", "%v; write a share above 0, at most 1", a.Target)
	}
}
