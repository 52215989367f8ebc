package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"evenkeel/bench/trace"
)

// idle refuses flags that were given and that what runs would not look at: those
// of another tier (the tag tier says whose a flag is; without, of all), and those
// that another flag takes the place of or makes sense of.
func (c *simulateCmd) idle(k *kong.Context) error {
	var given []*kong.Flag
	for _, p := range k.Path {
		if p.Flag != nil && !slices.Contains(given, p.Flag) {
			given = append(given, p.Flag)
		}
	}
	var foreign, tiers []string
	for _, f := range given {
		if of := f.Tag.Get("tier"); of != "" && !slices.Contains(strings.Split(of, ","), c.Tier) {
			foreign = append(foreign, "--"+f.Name)
			tiers = append(tiers, strings.Split(of, ",")...)
		}
	}
	if len(foreign) > 0 {
		slices.Sort(tiers)
		return usageError{fmt.Errorf("%s with --tier %s: only --tier %s has that; leave it out, or choose the tier",
			strings.Join(foreign, ", "), c.Tier, strings.Join(slices.Compact(tiers), " and "))}
	}
	replays := []string{"log", "policies", "out", "json", "tier"}
	for _, f := range given {
		if c.Log != "" && !slices.Contains(replays, f.Name) {
			return usageError{fmt.Errorf("--%s with --log: the log has what happened; a replay takes --%s", f.Name, strings.Join(replays[1:4], ", --"))}
		}
		switch {
		case f.Name == "workers" && c.Scenario != "":
			return usageError{fmt.Errorf("--workers with --scenario: the scenario says how many ranks there are")}
		case f.Name == "ahead" && c.Bind != bindArrival:
			return usageError{fmt.Errorf("--ahead without --bind arrival: late, policies fill slots ahead by themselves")}
		case f.Name == "format" && (c.Trace == "" || strings.HasPrefix(c.Trace, trace.SynthPrefix)):
			return usageError{fmt.Errorf("--format without a file: it is that of --trace FILE")}
		case c.Tier == "prefill" && !c.Prefill.Both && slices.Contains([]string{"c0", "c1", "chunk"}, f.Name):
			return usageError{fmt.Errorf("--%s with --tier prefill: engines only decode with --both", f.Name)}
		case c.Tier == "prefill" && c.Prefill.Both && f.Name == "hold":
			return usageError{fmt.Errorf("--hold with --both: engines decode what they prefilled, and no rank fetches it")}
		}
	}
	return nil
}
