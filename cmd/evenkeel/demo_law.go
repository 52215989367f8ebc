package main

import (
	"fmt"
	"slices"
	"time"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/step"
)

// faster is a time of an engine at full scale, in ms, as long as the demo lets it be.
func faster(ms float64) time.Duration {
	return time.Duration(ms / aggregatedFactor * float64(time.Millisecond))
}

// becomeLike takes from the law that is named how many ranks there are and how they step, and the policies if none were given.
func (c *demoCmd) becomeLike(given []string) (err error) {
	if c.Law == "" {
		return nil
	}
	takes := []string{"workers", "c0", "c1"}
	if c.Aggregated {
		takes = append(takes, "prefill-base", "prefill-per-token", "prefill-shared")
	}
	for _, flag := range takes {
		if slices.Contains(given, flag) {
			return usageError{fmt.Errorf("--%s does not go with --law, which says it; leave one out", flag)}
		}
	}
	if c.deployment, err = laws.Find(c.Law); err != nil {
		return usageError{err}
	}
	c.Law, c.Workers = c.deployment.Name(), c.deployment.Ranks
	l := c.law()
	c.C0, c.C1 = faster(l.C0Ms), max(1, faster(l.C1Ms))
	own := balancesBy(c.deployment)
	if !slices.Contains(given, "policies") {
		c.Policies = own + ",jsq-kv,br0,brh,evenkeel"
	}
	if c.Aggregated {
		if c.deployment.Prompt.Fit.Steps == 0 {
			return usageError{fmt.Errorf("--law %s does not say what prompts take; leave out --aggregated, or name another law", c.Law)}
		}
		c.PrefillPerToken, c.PrefillShared, c.PrefillBase = faster(l.OwnMs), faster(l.SharedMs), faster(l.PrefillMs)
		if !slices.Contains(given, "policies") {
			c.Policies = own + ",jsq-kv," + delayer + ",evenkeel"
		}
		if !slices.Contains(given, "extra") {
			c.Extra = -int(0.15*float64(c.Workers*c.Slots) + 0.5)
		}
	}
	return nil
}

// law is the deployment's. What all ranks compute of a prompt together takes as long as in whole steps that were published.
func (c *demoCmd) law() step.Law {
	l := c.deployment.Law()
	l.SharedMs *= laws.Published
	return l
}

// step has an engine take for its requests what those of the law take, and pad as they do.
func (c *demoCmd) step(cfg *refengine.Config) {
	if c.deployment == nil {
		return
	}
	l := c.law()
	cfg.CR, cfg.CM, cfg.CS, cfg.Form = faster(l.RequestMs), faster(l.MostMs), faster(l.MeanMs), l.Form
	if n := len(l.Sizes); n > 0 {
		cfg.Captured = l.Sizes[n-1]
	}
}

// stepWords say how long a step takes.
func (c *demoCmd) stepWords() string {
	if c.deployment != nil {
		return fmt.Sprintf("%s, and all of it is %d times as fast", lawWords(c.deployment), aggregatedFactor)
	}
	return fmt.Sprintf("a step takes %s and %s for each KV token of the fullest rank", millis(c.C0), c.perToken())
}

// lawFlags are --law, or else what it takes the place of.
func (c *demoCmd) lawFlags(flags string) string {
	if c.deployment != nil {
		return "--law " + c.Law
	}
	return flags
}

// lawNotes say what came out and how far it carries.
func (c *demoCmd) lawNotes(runs []report.Run) []string {
	which, load := "that decode", ""
	if c.Aggregated {
		which = "that prefill and decode"
		if c.Extra < 0 {
			load = ", which leaves slots free, so that a prompt that is held comes later than without"
		}
	}
	return []string{
		gain(c.deployment, which, runs) + " This is one run of one load" + load + ". docs/results/deployments.md has the mean of many loads.",
		pricedBy,
		fmt.Sprintf("Engines take a %dth of the time here, so that the demo is short, and their ranks have %d slots, because they share the cores of "+
			"this machine with the proxy and the load. The time of HTTP and of the proxy is not scaled.", aggregatedFactor, c.Slots),
	}
}
