package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/policy"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

// demoAggregated has the flags of demo for ranks that both prefill and decode.
type demoAggregated struct {
	Aggregated    bool          `help:"Have ranks that prefill and decode, in place of pairs of engines. The defaults are then ${aggregateddemo}. With the policy delayer, requests go as with jsq-kv, and the engines themselves hold prompts for up to 30 steps, until each rank has one."`
	TokenBudget   int           `default:"2048" placeholder:"N" help:"A rank computes this many tokens of prompts and answers in one step (default: ${default})."`
	PrefillShared time.Duration `default:"9.6us" help:"A step takes this time more per prompt token, divided by the number of ranks (default: ${default})."`
	Jitter        time.Duration `default:"4ms" help:"An engine sees a request after a random time, from a tenth of this to all of it (default: ${default})."`
	MaxHold       time.Duration `default:"1s" help:"Set max_hold of policies that have this parameter and name no value (default: ${default})."`
}

const (
	// demoSpeedup is how many times faster the demo's aggregated engines run than engines at full
	// scale.
	demoSpeedup            = 5
	demoSteps              = 1 << 20 // steps that an engine's log keeps: an hour and a half of 5 ms steps
	demoAggregatedPolicies = "rr,jsq-kv," + delayerPolicy + ",evenkeel"
)

// fullAggregated has the times of aggregated engines at full scale: about the middle of the ranges
// from which `make claim NAME=rounds` draws its loads. For a time that it draws on a logarithmic
// scale, the middle is the geometric mean.
var fullAggregated = report.StepModel{
	C0: 25 * time.Millisecond, C1: 80,
	Own: 72 * time.Microsecond, Shared: 48 * time.Microsecond, Prefill: 10 * time.Millisecond,
}

// aggregatedDefaults returns a text with the flags whose defaults differ with --aggregated.
func aggregatedDefaults() string {
	c := demoCmd{Workers: 8, Slots: 16}
	c.setAggregatedDefaults(nil) // nil: no flag is given, so each gets its default
	return fmt.Sprintf("--requests %d, --policies %s, --extra %d (15 %% of the slots are free), --c0 %v, --c1 %v, --prefill-base %v (for "+
		"each step that computes any prompt) and --prefill-per-token %v (of the slowest rank)",
		c.Requests, c.Policies, c.Extra, c.C0, c.C1, c.PrefillBase, c.PrefillPerToken)
}

// setDefaults sets the defaults that depend on --aggregated and --law. It refuses flags that would
// have no effect.
func (c *demoCmd) setDefaults(k *kong.Context) error {
	given := namesOf(given(k))
	useless, why := []string{"token-budget", "prefill-shared", "jitter", "max-hold"}, "without --aggregated: these ranks only decode"
	if c.Aggregated {
		useless, why = []string{"connector", "prefills"}, "with --aggregated: ranks compute their prompts themselves"
	}
	for _, flag := range useless {
		if slices.Contains(given, flag) {
			return usageError{fmt.Errorf("--%s %s; leave it out", flag, why)}
		}
	}
	if err := c.lookUpLaw(given); err != nil {
		return err
	}
	if c.Aggregated {
		c.setAggregatedDefaults(given)
	}
	if c.deployment != nil {
		c.setLawDefaults(given)
	}
	return nil
}

// setAggregatedDefaults sets each flag that was not given to its default with --aggregated, if that
// differs. The times are those of engines at full scale, divided by demoSpeedup.
func (c *demoCmd) setAggregatedDefaults(given []string) {
	m := fullAggregated
	freeSlots := func() int { return int(math.Round(freeSlotShare * float64(c.Workers*c.Slots))) }
	for flag, set := range map[string]func(){
		"policies":          func() { c.Policies = demoAggregatedPolicies },
		"requests":          func() { c.Requests = 800 },
		"extra":             func() { c.Extra = -freeSlots() }, // negative: so many slots stay free
		"c0":                func() { c.C0 = m.C0 / demoSpeedup },
		"c1":                func() { c.C1 = time.Duration(m.C1 / demoSpeedup) },
		"prefill-per-token": func() { c.PrefillPerToken = m.Own / demoSpeedup },
		"prefill-base":      func() { c.PrefillBase = m.Prefill / demoSpeedup },
	} {
		if !slices.Contains(given, flag) {
			set()
		}
	}
}

// checkAggregated returns an error if a flag for --aggregated has a value that cannot work.
func (c *demoCmd) checkAggregated() error {
	switch {
	case c.TokenBudget < c.Slots:
		return fmt.Errorf("--token-budget %d: each of the %d slots needs one token", c.TokenBudget, c.Slots)
	case c.concurrency() < 1:
		return fmt.Errorf("--extra %d: no request would be in the system, which has %d slots", c.Extra, c.Workers*c.Slots)
	case c.PrefillShared < 0 || c.Jitter < 0 || c.MaxHold < 0:
		return errors.New("--prefill-shared, --jitter and --max-hold must not be negative")
	}
	return nil
}

// withMaxHold adds the value of --max-hold to a policy that has the setting max_hold and gives no
// value for it.
func (c *demoCmd) withMaxHold(spec policy.Spec) (policy.Spec, error) {
	if !spec.Accepts("max_hold") || spec.Sets("max_hold") { // the policy has no such setting, or the user has given its value
		return spec, nil
	}
	spec, err := spec.With("max_hold", strconv.FormatFloat(c.MaxHold.Seconds(), 'f', -1, 64))
	if err != nil {
		return spec, fmt.Errorf("--max-hold: %w", err)
	}
	return spec, nil
}

// aggregatedEngine returns the config of the engine for one policy. A step takes the times in Steps
// and Prompts. With --law, setStepLaw adds the law, whose times the engine then takes in place of
// these. With the policy delayer, the engine itself holds prompts.
func (c *demoCmd) aggregatedEngine(p demoPolicy) refengine.Config {
	cfg := refengine.Config{
		Role: refengine.Aggregated, Model: refengine.Model{Name: "demo"}, DPSize: c.Workers, Slots: c.Slots,
		// C0 is the fixed time of a step, and C1 its time per KV token of the fullest rank.
		Steps: refengine.Steps{C0: c.C0, C1: c.C1, Log: demoSteps},
		Prompts: refengine.Prompts{Base: c.PrefillBase, PerToken: c.PrefillPerToken, Shared: c.PrefillShared,
			MaxBatchedTokens: c.TokenBudget},
		Jitter: c.Jitter, Seed: c.Seed,
		Answers: refengine.Answers{PromptTokensDetails: true}, // answers say how many prompt tokens were cached
	}
	if p.name == delayerPolicy {
		cfg.Prompts.Delayer = delayerMaxSteps
	}
	c.setStepLaw(&cfg)
	return cfg
}

// addRanks adds the ranks to the proxy's config. It also makes the proxy ask an engine for the
// number of tokens of each prompt, because the proxy has no other way to know it.
// configs/aggregated.yaml recommends the same.
func (c *demoCmd) addRanks(cfg *config.Config, ranks *refengine.Engine) {
	for _, url := range ranks.URLs() {
		cfg.Engines.Aggregated = append(cfg.Engines.Aggregated, config.Engine{URL: url, Slots: c.Slots, Budget: c.TokenBudget})
	}
	cfg.Prefill.Index.Tokenize = "engine"
}

// nothingLearned is what learnedPromptTimes returns if the proxy has learned nothing.
const nothingLearned = "nothing"

// learnedPromptTimes returns a text that says how long prompts take by what the proxy has learned,
// or nothingLearned.
func learnedPromptTimes(ctx context.Context, g *gateway.Gateway) string {
	for _, m := range g.Status(ctx).Dispatch.Models {
		for _, group := range m.Groups {
			if s := group.Step; s != nil && s.OwnPromptMs+s.SharedPromptMs > 0 { // the first group for which the proxy has learned anything
				return fmt.Sprintf("%.3g µs per prompt token and %.2g ms for a step with any", 1e3*(s.OwnPromptMs+s.SharedPromptMs), s.PrefillMs)
			}
		}
	}
	return nothingLearned
}

// aggregatedCommandLine returns the command line that gives the same report again.
func (c *demoCmd) aggregatedCommandLine() string {
	line := fmt.Sprintf("evenkeel demo --aggregated --requests %d --slots %d --extra=%d --policies %s --seed %d ", c.Requests, c.Slots,
		c.Extra, c.Policies, c.Seed)
	line += c.lawFlagOr(fmt.Sprintf("--workers %d --c0 %v --c1 %v --prefill-base %v --prefill-per-token %v --prefill-shared %v",
		c.Workers, c.C0, c.C1, c.PrefillBase, c.PrefillPerToken, c.PrefillShared))
	line += fmt.Sprintf(" --token-budget %d --jitter %v --window %v --max-age %v --max-hold %v",
		c.TokenBudget, c.Jitter, c.Window, c.MaxAge, c.MaxHold)
	if c.Trace != "" {
		line += " --trace " + c.Trace
	}
	return line
}

// describePrefill returns the text of the fact "prefill" in the report, which stands behind the
// word "prefill": which ranks compute prompts, and how long that takes.
func (c *demoCmd) describePrefill() string {
	return fmt.Sprintf("by the same ranks, %d tokens of a rank in a step at most; a step takes %s more per prompt token of the slowest rank, "+
		"%s per prompt token of a rank in the mean, and %s if any rank computes one; a request reaches the scheduler up to %s late",
		c.TokenBudget, micros(c.PrefillPerToken), micros(c.PrefillShared), millis(c.PrefillBase), millis(c.Jitter))
}

// engineNotes returns notes on how far the numbers of these reference engines apply to real
// engines: one on times, one on slots, and one that explains the words balanced and delayer, which
// stand for a row of the table each.
func (c *demoCmd) engineNotes() []string {
	slotsNote := fmt.Sprintf("These ranks have %d slots, because they share a laptop's cores with the proxy and the load; the "+
		"ranges of `make claim NAME=rounds` go from 16 to 64. With more slots more prompts come in a step. They have no prefix "+
		"cache.", c.Slots)
	wordsNote := fmt.Sprintf("Balanced means: each step has the same KV tokens and the same prompt tokens, equally many on each rank. "+
		"It does not mean fewer steps with a prefill. delayer is jsq-kv with engines that begin no prompt for up to %d steps, "+
		"until each rank has one.", delayerMaxSteps)
	return []string{fullScaleTimesNote(c), slotsNote, wordsNote}
}

// fullScaleTimesNote returns a note on how long a step takes at full scale, and on which times the
// demo scales down.
func fullScaleTimesNote(c *demoCmd) string {
	m := fullAggregated
	return fmt.Sprintf("Engine time is scaled down. At full scale a step takes %s + %s per KV token of the fullest rank, %s per "+
		"prompt token of the slowest rank, %s per prompt token of a rank in the mean, and %s if any rank computes a prompt: about "+
		"the middle of the ranges from which `make claim NAME=rounds` draws its loads. The defaults here are %d times as fast, "+
		"and so are the time of tokenizers (up to %s here) and max_hold (%g s here). The time of HTTP and of the proxy is not "+
		"scaled.",
		millis(m.C0), micros(time.Duration(m.C1)), micros(m.Own), micros(m.Shared), millis(m.Prefill),
		demoSpeedup, millis(c.Jitter), c.MaxHold.Seconds())
}
