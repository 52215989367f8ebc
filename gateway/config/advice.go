package config

// checkAdvice: without an interval the rest is of no account.
func (c *Config) checkAdvice(bad report) {
	a := c.Advice
	switch {
	case a.Interval < 0:
		bad("$.advice.interval", "%v is negative; write 0s for no advice", a.Interval)
	case a.Interval == 0:
		return
	case a.Window < 2*a.Interval:
		bad("$.advice.window", "%v; a mean wants two looks at least, which take %v by advice.interval", a.Window, 2*a.Interval)
	}
	if a.Calm < a.Window {
		bad("$.advice.calm", "%v is shorter than advice.window, %v; ranks would go that are asked for", a.Calm, a.Window)
	}
	if a.Target <= 0 || a.Target > 1 {
		bad("$.advice.target", "%v; write a share above 0, at most 1", a.Target)
	}
}
