package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/step"
)

// speedup returns how many times faster the engines of a deployment run here than at full scale:
// demoSpeedup for up to 8 ranks, less in proportion for more ranks, because all of them share a
// laptop's cores with the proxy and the load, and at least 1.
func (c *demoCmd) speedup() float64 {
	return min(demoSpeedup, max(1, 8*demoSpeedup/float64(c.deployment.Ranks)))
}

// lookUpLaw finds the law, the step times of a deployment, that --law names, and sets the number of
// ranks to that of the deployment. It refuses flags whose values come from the law.
func (c *demoCmd) lookUpLaw(given []string) (err error) {
	if c.Law == "" {
		if slices.Contains(given, "law") {
			return usageError{errNoLaw}
		}
		return nil
	}
	inLaw := []string{"workers", "c0", "c1"}
	if c.Aggregated {
		inLaw = append(inLaw, "prefill-base", "prefill-per-token", "prefill-shared")
	}
	for _, flag := range inLaw {
		if slices.Contains(given, flag) {
			return usageError{fmt.Errorf("--%s does not go with --law, which says it; leave one out", flag)}
		}
	}
	if c.deployment, err = findLaw(c.Law); err != nil {
		return err
	}
	if c.Aggregated && c.deployment.Prompt.Fit.Steps == 0 {
		return usageError{errors.New("--law " + c.Law + " does not say what prompts take; leave out --aggregated, or name another law")}
	}
	c.Law, c.Workers = c.deployment.Name(), c.deployment.Ranks
	return nil
}

// setLawDefaults sets the flags that were not given to their defaults with --law. It first sets the
// flags for times that the law replaces, which the user cannot have given: lookUpLaw refuses them.
func (c *demoCmd) setLawDefaults(given []string) {
	c.setTimesOfLaw()
	defaults := c.pairLawDefaults()
	if c.Aggregated {
		defaults = c.aggregatedLawDefaults()
	}
	defaults["requests"] = func() {
		sentWhileWarming := c.concurrency() + c.warmUpRequests() // these are sent before measuring begins
		c.Requests = max(c.Requests, 2*sentWhileWarming)         // so that at least half of all requests are measured
	}
	for flag, set := range defaults { // in any order, because none of them uses what another sets
		if !slices.Contains(given, flag) {
			set()
		}
	}
}

// setTimesOfLaw sets the flags for the times that a law has. The engines step by the law itself, so
// these values only have to be ones that checkFlags accepts: it refuses 0 for --c0 and --c1.
func (c *demoCmd) setTimesOfLaw() {
	ifLevel := c.stepModel() // the law's times if all ranks have the same load
	c.C0, c.C1 = ifLevel.C0, max(1, time.Duration(ifLevel.C1))
	if c.Aggregated {
		c.PrefillBase, c.PrefillPerToken, c.PrefillShared = 0, 0, 0
	}
}

// pairLawDefaults returns, by flag, functions that set the defaults with --law for pairs of
// engines. setLawDefaults adds that of
// --requests. Prefill is made so fast that the result depends only on the decode ranks. The first policy is the one that is nearest to the
// engine's own balancing.
func (c *demoCmd) pairLawDefaults() map[string]func() {
	return map[string]func(){
		"policies":          func() { c.Policies = c.deployment.Balances() + ",jsq-kv,br0,brh,evenkeel" },
		"prefills":          func() { c.Prefills = 4 },
		"prefill-base":      func() { c.PrefillBase = time.Millisecond },
		"prefill-per-token": func() { c.PrefillPerToken = time.Microsecond },
	}
}

// aggregatedLawDefaults returns, by flag, functions that set the defaults with --law and
// --aggregated, where each rank both prefills and decodes. The policies compare evenkeel with the
// engine's own balancing, with requests that go to the rank with the fewest KV tokens (jsq-kv), and
// with engines that hold prompts back (delayerPolicy). The flags' own defaults of --jitter and
// --max-hold are for engines that are demoSpeedup times as fast as at full scale. A deployment with
// many ranks runs more slowly here, so these times become longer by the same factor as its steps.
func (c *demoCmd) aggregatedLawDefaults() map[string]func() {
	slower := demoSpeedup / c.speedup() // at least 1
	return map[string]func(){
		"policies": func() { c.Policies = c.deployment.Balances() + ",jsq-kv," + delayerPolicy + ",evenkeel" },
		"jitter":   func() { c.Jitter = time.Duration(slower * float64(c.Jitter)) },
		"max-hold": func() { c.MaxHold = time.Duration(slower * float64(c.MaxHold)) },
	}
}

// scaledLaw returns the deployment's law with all times divided by speedup, for the demo's faster
// engines.
func (c *demoCmd) scaledLaw() step.Law {
	l := c.deployment.Served()
	for _, part := range []*float64{&l.C0Ms, &l.C1Ms, &l.RequestMs, &l.MostRowsMs, &l.MeanRowsMs, &l.OwnPromptMs, &l.SharedPromptMs,
		&l.PrefillMs} {
		*part /= c.speedup()
	}
	return l
}

// setStepLaw makes an engine take the times and the padding of its steps from the law, if --law
// names one. Otherwise a step takes C0, and C1 more per KV token of the fullest rank; with
// --aggregated, prompts take more.
func (c *demoCmd) setStepLaw(cfg *refengine.Config) {
	if c.deployment != nil {
		l := c.scaledLaw()
		cfg.Steps.Law = &l
	}
}

// describeStep returns a text that says how long a step of the demo's engines takes.
func (c *demoCmd) describeStep() string {
	if c.deployment != nil {
		return fmt.Sprintf("%s, and all of it is %.3g times as fast", describeLaw(c.deployment), c.speedup())
	}
	return fmt.Sprintf("a step takes %s and %s for each KV token of the fullest rank", millis(c.C0), c.perTokenText())
}

// lawFlagOr returns --law with its value if it was given. Otherwise it returns flags, a text with
// the flags that --law replaces: those of the step times and of the number of ranks.
func (c *demoCmd) lawFlagOr(flags string) string {
	if c.deployment != nil {
		return "--law " + c.Law
	}
	return flags
}

// lawNotes returns notes on the result of a demo with --law, and on how far it applies to real
// engines.
func (c *demoCmd) lawNotes(runs []report.Run) []string {
	rankTasks, loadNote, dataNote := "decode", "", stepTimesNote
	if c.Aggregated {
		rankTasks, dataNote = "prefill and decode", stepTimesNote+promptTimesNote
		if c.Extra < 0 { // fewer requests than slots: a prompt could begin at once, so a policy that holds it back delays it
			loadNote = ", which leaves slots free, so that a prompt that is held comes later than without"
		}
	}
	lateByMoreThanAStep := func(run report.Run) bool {
		return run.Metrics[report.StepLateP99].Mean > run.Metrics[report.StepMean].Mean
	}
	result := ""
	if slices.ContainsFunc(runs, lateByMoreThanAStep) {
		result = fmt.Sprintf("This machine was too slow for engines that are %.3g times as fast, so the table does not tell what "+
			"evenkeel gains.", c.speedup())
	} else if gain := describeGain(c.deployment, rankTasks, runs); gain != "" { // empty: too little was measured
		result = gain + " This is one run of one load" + loadNote + ". docs/results/deployments.md has many loads."
	}
	return []string{
		result, dataNote,
		fmt.Sprintf("Engines are %.3g times as fast here, so that the demo is short, and their ranks have %d slots, because they share the "+
			"cores of "+
			"this machine with the proxy and the load. The time of HTTP and of the proxy is not scaled.", c.speedup(), c.Slots),
	}
}
