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
	lawList  = "list" // in place of a law's name
	lawSlots = 64     // of a rank, unless --slots says another number

	// In place of a policy, what engines do by themselves.
	engineItself = "engine"  // requests go to the engine, which balances its ranks
	delayer      = "delayer" // ranks hold prompts until each of them has one,
	delayerSteps = 30        // or so many steps are over
)

// pricedBy says what a law was made of.
const pricedBy = "The law of a step is made of times of kernels that NVIDIA measured or estimated, and of how the engine pads its ranks. " +
	"Nobody has measured whole steps of uneven ranks for it."

// priced is what it was made of besides, where ranks compute prompts, too.
var priced = fmt.Sprintf(" The part of a prompt that all ranks compute together is %g of that, as in whole steps that were published.",
	laws.Published)

// listLaws prints all laws, and looks at no other flag.
func listLaws(std streams, k *kong.Context) error {
	if more := given(k); len(more) > 1 {
		return usageError{errors.New("--law list prints all laws and looks at no other flag; leave the others out")}
	}
	return laws.List(std.out)
}

// become takes the number of ranks from the law that is named, and what else is not given then.
func (c *simulateCmd) become(given []string) (err error) {
	switch {
	case c.Law == "" && slices.Contains(given, "law"):
		return usageError{errNoLaw}
	case c.Law == "":
		return nil
	}
	if c.deployment, err = namedLaw(c.Law); err != nil {
		return err
	}
	c.Law, c.Workers = c.deployment.Name(), c.deployment.Ranks
	if !slices.Contains(given, "slots") {
		c.Slots = lawSlots
	}
	return nil
}

var errNoLaw = errors.New("--law is empty; write MODEL,ENGINE,GPU,RANKS, or list")

// namedLaw is the law of a flag.
func namedLaw(name string) (*laws.Entry, error) {
	e, err := laws.Find(name)
	if err != nil {
		return nil, usageError{fmt.Errorf("--law: %w", err)}
	}
	return e, nil
}

// model is what a step takes, for plots.
func (c *simulateCmd) model() report.StepModel {
	if c.deployment == nil {
		return report.StepModel{C0: c.C0, C1: float64(c.C1)}
	}
	return modelOf(c.deployment.Law())
}

// modelOf is a law as reports have it, where ranks are level.
func modelOf(law step.Law) report.StepModel {
	ns := func(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
	l := law.Level()
	return report.StepModel{
		C0: ns(l.C0Ms), C1: l.C1Ms * 1e6, Request: ns(l.RequestMs), Own: ns(l.OwnMs), Shared: ns(l.SharedMs), Prefill: ns(l.PrefillMs),
	}
}

// decodePolicies are those that are compared unless others are given. With a law, what its engine does by itself is first.
func (c *simulateCmd) decodePolicies() string {
	if c.deployment == nil {
		return decodePolicies
	}
	return c.deployment.Balances() + ",jsq-kv,br0,brh,evenkeel"
}

// lawWords name a law, and what a step takes where all ranks have as much.
func lawWords(e *laws.Entry) string {
	law := e.Law()
	l := law.Level()
	return fmt.Sprintf("they step as %s (%s): where ranks are level, %.3g ms + %.3g µs per KV token and %.3g ms per request of a rank",
		e.Name(), law.Form, l.C0Ms, 1000*l.C1Ms, l.RequestMs)
}

// gain says what the last policy makes of a deployment beside the first one; nothing where too little was measured.
func gain(e *laws.Entry, which string, runs []report.Run) string {
	a, b := runs[0], runs[len(runs)-1]
	var parts []string
	for _, m := range []struct {
		words string
		of    report.Metric
	}{{"tokens/s", report.TokensPerS}, {"mean TTFT", report.TTFTMean}, {"TPOT p95", report.TPOTP95}} {
		if x, y := a.Metrics[m.of].Mean, b.Metrics[m.of].Mean; x > 0 && y > 0 {
			parts = append(parts, fmt.Sprintf("%s %+.1f %%", m.words, 100*(y/x-1)))
		}
	}
	if len(runs) < 2 || len(parts) == 0 {
		return ""
	}
	than := a.Policy
	switch than {
	case engineItself:
		than += ", which is " + e.EngineTitle() + "'s own balancing"
	case e.Balances():
		than += ", which is nearest to " + e.EngineTitle() + "'s own balancing"
	}
	return fmt.Sprintf("%s that %s: %s beside %s: %s.", e.Title(), which, b.Policy, than, strings.Join(parts, ", "))
}
