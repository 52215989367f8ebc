package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
)

const (
	lawList  = "list" // in place of a law's name
	lawSlots = 64     // of a rank, unless --slots says another number

	engineItself = "engine" // in place of a policy: requests go to the engine, which balances its ranks itself
)

// pricedBy says what a law was made of.
const pricedBy = "The law of a step is made of times of kernels that NVIDIA measured, and of how the engine pads its ranks. Nobody has measured whole steps of uneven ranks for it."

// become takes the number of ranks from the law that is named, and what else is not given then.
func (c *simulateCmd) become(given []*kong.Flag) (err error) {
	if c.Law == "" {
		return nil
	}
	if c.deployment, err = laws.Find(c.Law); err != nil {
		return usageError{err}
	}
	c.Law, c.Workers = c.deployment.Name(), c.deployment.Ranks
	if !slices.ContainsFunc(given, func(f *kong.Flag) bool { return f.Name == "slots" }) {
		c.Slots = lawSlots
	}
	return nil
}

// decodePolicies are those that are compared unless others are given. With a law, what its engine does by itself is first.
func (c *simulateCmd) decodePolicies() string {
	if c.deployment == nil {
		return decodePolicies
	}
	return balancesBy(c.deployment) + ",jsq-kv,br0,brh,evenkeel"
}

// balancesBy is the policy that is most like what an engine does with the requests of one address, if its ranks have no addresses of
// their own: vLLM takes the rank with the fewest requests, and SGLang the ranks in turn.
func balancesBy(e *laws.Entry) string {
	if e.Engine == "sglang" {
		return "rr"
	}
	return "jsq"
}

// lawWords name a law, and what a step takes where all ranks have as much.
func lawWords(e *laws.Entry) string {
	law := e.Law()
	l := law.Level()
	return fmt.Sprintf("they step as %s (%s): where ranks are level, %.3g ms + %.3g µs per KV token and %.3g ms per request of a rank",
		e.Name(), law.Form, l.C0Ms, 1000*l.C1Ms, l.RequestMs)
}

// gain says what the last policy makes of a deployment beside the first one. What they are compared by stands in the table of README, too.
func gain(e *laws.Entry, which string, runs []report.Run) string {
	a, b := runs[0], runs[len(runs)-1]
	if len(runs) < 2 {
		return ""
	}
	model, _, _ := strings.Cut(e.Name(), ",")
	s := fmt.Sprintf("%s, %s, %d ranks on %s %s: %s beside %s", model, engineNames[e.Engine], e.Ranks, e.GPU, which, b.Policy, a.Policy)
	if a.Policy == balancesBy(e) || a.Policy == engineItself {
		s += ", which is as " + engineNames[e.Engine] + " balances by itself"
	}
	for i, m := range []struct {
		words string
		of    report.Metric
	}{{"tokens/s", report.TokensPerS}, {"mean TTFT", report.TTFTMean}, {"TPOT p95", report.TPOTP95}} {
		x, y := a.Metrics[m.of], b.Metrics[m.of]
		if x.Mean > 0 {
			s += fmt.Sprintf("%s %s %+.1f %%", map[bool]string{true: ":", false: ","}[i == 0], m.words, 100*(y.Mean/x.Mean-1))
		}
	}
	return s + "."
}

var engineNames = map[string]string{"vllm": "vLLM", "sglang": "SGLang"}
