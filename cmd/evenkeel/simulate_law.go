package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/step"
)

const (
	lawList  = "list" // value of --law with which all laws are printed
	lawSlots = 64     // default of --slots with --law

	// These names in --policies stand for what engines do by themselves, not for policies of evenkeel.
	enginePolicy    = "engine"  // the engine itself balances its ranks
	delayerPolicy   = "delayer" // ranks hold prompts until each rank has a prompt
	delayerMaxSteps = 30        // most steps for which the delayer holds a prompt
)

// stepTimesNote is a note on the data behind the laws, which is printed with results.
const stepTimesNote = "The law of a step is made of times of kernels that NVIDIA measured or estimated, and of how the engine pads its " +
	"ranks. Nobody has measured whole steps of uneven ranks for it."

// promptTimesNote is appended to stepTimesNote for ranks that also compute prompts.
var promptTimesNote = fmt.Sprintf(" The part of a prompt that all ranks compute together is %g of that, as in whole steps that were "+
	"published.", laws.Published)

// listLaws prints all laws (step times of known deployments). It refuses other flags, which would
// have no effect.
func listLaws(std streams, k *kong.Context) error {
	if flags := given(k); len(flags) > 1 { // one of them is --law itself
		return usageError{errors.New("--law list prints all laws and looks at no other flag; leave the others out")}
	}
	return laws.List(std.out)
}

// lookUpLaw finds the law, the step times of a deployment, that --law names, and takes the number
// of ranks from it. Without --slots, it also sets the slots to lawSlots.
func (c *simulateCmd) lookUpLaw(given []string) (err error) {
	switch {
	case c.Law == "" && slices.Contains(given, "law"): // the user wrote --law without a name
		return usageError{errNoLaw}
	case c.Law == "":
		return nil
	}
	if c.deployment, err = findLaw(c.Law); err != nil {
		return err
	}
	c.Law, c.Workers = c.deployment.Name(), c.deployment.Ranks
	if !slices.Contains(given, "slots") { // the flag's own default is for ranks without a law
		c.Slots = lawSlots
	}
	return nil
}

var errNoLaw = errors.New("--law is empty; write MODEL,ENGINE,GPU,RANKS, or list")

// findLaw returns the law, the step times of a deployment, with this name. An unknown name is a
// usage error.
func findLaw(name string) (*laws.Entry, error) {
	e, err := laws.Find(name)
	if err != nil {
		return nil, usageError{fmt.Errorf("--law: %w", err)}
	}
	return e, nil
}

// stepModel returns how long a step takes, for the plots of the report: by --law, which takes the
// place of --c0 and --c1, or by these two. A plot needs one time for each load, so ranks with a law
// are assumed to have equal loads.
func (c *simulateCmd) stepModel() report.StepModel {
	if c.deployment == nil {
		return report.StepModel{C0: c.C0, C1: float64(c.C1)} // a report has C1 as a number of nanoseconds
	}
	return stepModelIfLevel(c.deployment.Law())
}

// stepModelIfLevel returns how long a step takes if all ranks are level, which means that they have
// the same load. It turns the law into the form that reports use, and its milliseconds into
// durations.
func stepModelIfLevel(law step.Law) report.StepModel {
	duration := func(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
	l := law.Level()
	return report.StepModel{
		C0:      duration(l.C0Ms),           // once per step
		C1:      l.C1Ms * 1e6,               // per KV token of a rank; a number of ns, which may be a fraction
		Request: duration(l.RequestMs),      // per request of a rank
		Own:     duration(l.OwnPromptMs),    // per prompt token of a rank, for the rank's own work
		Shared:  duration(l.SharedPromptMs), // per prompt token of a rank, for the work that all ranks share
		Prefill: duration(l.PrefillMs),      // once if any rank computes a prompt
	}
}

// defaultPolicies returns the default of --policies for the decode tier. With --law, the policy
// that is nearest to the engine's own balancing comes first, as the reference.
func (c *simulateCmd) defaultPolicies() string {
	if c.deployment == nil {
		return defaultDecodePolicies
	}
	return c.deployment.Balances() + ",jsq-kv,br0,brh,evenkeel"
}

// describeLaw returns a text with the name of a law, and with the times of a step if all ranks have
// the same load.
func describeLaw(e *laws.Entry) string {
	law := e.Law()
	l := law.Level()
	return fmt.Sprintf("they step as %s (%s): where ranks are level, %.3g ms + %.3g µs per KV token and %.3g ms per request of a rank",
		e.Name(), law.Form, l.C0Ms, 1000*l.C1Ms, l.RequestMs)
}

// describeGain returns a sentence that compares the last policy with the first one; empty: too
// little was measured. rankTasks says what the ranks do, such as "decode". e is the deployment;
// nil: it is none of the table. A gain has an interval if there are several seeds.
func describeGain(e *laws.Entry, rankTasks string, runs []report.Run) string {
	first, last := runs[0], runs[len(runs)-1]
	var parts []string
	for _, m := range []struct {
		words  string
		metric report.Metric
	}{{"tokens/s", report.TokensPerS}, {"mean TTFT", report.TTFTMean}, {"TPOT p95", report.TPOTP95}} {
		gain, low, high, seeds := report.Gain(first, last, m.metric)
		if seeds == 0 { // the metric was not measured under both policies
			continue
		}
		part := fmt.Sprintf("%s %+.1f %%", m.words, 100*gain)
		if seeds > 1 {
			part += fmt.Sprintf(" (%+.1f to %+.1f)", 100*low, 100*high)
		}
		parts = append(parts, part)
	}
	if len(runs) < 2 || len(parts) == 0 { // there is nothing to compare with, or no metric to compare
		return ""
	}
	whose, reference := "", first.Policy
	if e != nil {
		whose = fmt.Sprintf("%s that %s: ", e.Title(), rankTasks)
		nearestToEngine := e.Balances() // the policy of evenkeel that does most nearly what the engine does by itself
		switch reference {
		case enginePolicy:
			reference += ", which is " + e.EngineTitle() + "'s own balancing"
		case nearestToEngine:
			reference += ", which is nearest to " + e.EngineTitle() + "'s own balancing"
		}
	}
	return fmt.Sprintf("%s%s beside %s: %s.", whose, last.Policy, reference, strings.Join(parts, ", "))
}

// anotherPart is what seeds differ in where all of them replay one trace.
const anotherPart = "each on another part of the trace; where parts overlap, the intervals are too narrow"

// simulatedGain is describeGain for a simulation, and says what its interval is, and what differs
// from seed to seed.
func (c *simulateCmd) simulatedGain(rankTasks, differs string, runs []report.Run) string {
	gain := describeGain(c.deployment, rankTasks, runs)
	switch {
	case gain == "":
		return ""
	case c.Seeds < 2:
		return gain + " One seed has no interval; take more --seeds."
	}
	return fmt.Sprintf("%s These are means of the ratios of %d seeds, %s. In brackets are 95 %% intervals: both policies have the same "+
		"requests on a seed. Other traces and other laws may lie outside of them.", gain, c.Seeds, differs)
}
