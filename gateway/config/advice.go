package config

// checkAdvice checks advice. Without an interval there is no advice, and the other keys do not matter.
func (c *Config) checkAdvice(bad report) {
	a := c.Advice
	switch {
	case a.Interval < 0:
		bad("$.advice.interval", "%v is negative; write 0s for no advice", a.Interval)
	case a.Interval == 0:
		return
	case a.Window < 2*a.Interval:
		bad("$.advice.interval", "%v is too long, because the mean of the last %v needs at least two values; write %v or less", a.Interval,
			a.Window, a.Window/2)
	}
	if a.Target <= 0 || a.Target > 1 {
		bad("$.advice.target", "%v; write a share above 0, at most 1", a.Target)
	}
}
