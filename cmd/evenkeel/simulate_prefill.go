package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/prefill"
	"evenkeel/internal/namedargs"
	prefillpolicy "evenkeel/prefill/policy"
)

// defaultCapacity is how many KV tokens fit into a prefill engine without --capacity.
const defaultCapacity = 1_000_000

// prefillColumns are the columns of the table for --tier prefill. The JSON output has all metrics.
var prefillColumns = []report.Metric{report.TTFTMean, report.TTFTP50, report.TTFTP90, report.TTFTP99, report.HitRatio, report.HitError,
	report.Utilisation, report.Uneven, report.TPOTMean, report.TPOTP95, report.BurstMean}

// simulatePrefill compares prefill policies at each load of --load, one load after the other, and
// prints a table for each.
func (c *simulateCmd) simulatePrefill(ctx context.Context, std streams) error {
	plan, source, err := c.prefillPlan()
	if err != nil {
		return err
	}
	loads, err := c.parseLoads()
	if err != nil {
		return err
	}
	began := time.Now()
	fmt.Fprintf(std.err, "%s, %d seeds; %s\n", source, c.Seeds, c.describePrefillEngines())
	all := report.Report{Bound: report.Metrics{}} // Bound is empty, because this tier has no results for balanced engines
	var b bytes.Buffer
	for _, load := range loads {
		plan.Load = load
		show := newLineProgress(std.err)
		plan.Progress = func(done, total int) {
			show.update(done, total, fmt.Sprintf("load %g: %d of %d runs done", plan.Load, done, total))
		}
		result, err := plan.Run(ctx)
		if err != nil {
			return err
		}
		all.Runs = append(all.Runs, result.Runs...)
		fmt.Fprintf(&b, "load %g, %.0f requests an hour\n", plan.Load, result.PerHour)
		if err := (&report.Report{Runs: result.Runs}).Lines(&b, prefillColumns...); err != nil {
			return err
		}
		b.WriteByte('\n')
	}
	if c.JSON {
		return all.JSON(std.out)
	}
	fmt.Fprintf(&b, "%.0f s in all. Again: %s\n", time.Since(began).Seconds(), c.prefillCommandLine())
	for _, note := range c.prefillNotes(plan) {
		writeWrapped(&b, note)
	}
	_, err = b.WriteTo(std.out)
	return err
}

// prefillEngines returns how many prefill engines the tier prefill has: --prefills, or 8.
func (c *simulateCmd) prefillEngines() int {
	if c.Prefills == nil {
		return 8
	}
	return *c.Prefills
}

// drawnPrompts is how many requests a random trace has without --requests.
const drawnPrompts = 12_000

// prefillPlan makes the plan of the simulation from the flags. It also returns the name of the
// trace.
func (c *simulateCmd) prefillPlan() (_ *prefill.Plan, traceName string, _ error) {
	f := &c.Prefill
	plan := &prefill.Plan{
		Requests: c.Requests, Seeds: c.Seeds, Push: f.Push, CapacityFactor: f.WrongCapacity,
		// With --no-learn, evenkeel is told how long a prefill takes, and does not learn it.
		TellLine: !f.Learn, Burst: f.Burst, NoHotspots: !f.Hotspots, Affinity: f.Affinity,
		Engines: prefill.Engines{
			Ranks: c.prefillEngines(), Capacity: cmp.Or(c.Capacity, defaultCapacity), Hold: f.Hold, Slow: f.Slow,
			Line: prefillpolicy.Latency{TPMs: f.Tp, T0Ms: f.T0, Beta2: f.Beta2},
		},
		Definitions: map[string]prefillpolicy.Definition{},
	}
	if f.Both { // engines both prefill and decode
		plan.Engines.Decode = &prefill.Decode{C0: c.C0, C1: c.C1, Chunk: f.Chunk}
	}
	for name, score := range f.Define {
		plan.Definitions[name] = prefillpolicy.Definition{Score: score}
	}
	if c.Policies == "" {
		plan.Policies = append(prefill.Policies(), slices.Sorted(maps.Keys(f.Define))...)
	} else {
		plan.Policies = namedargs.List(c.Policies)
	}
	source := "Mooncake's conversation trace"
	plan.Trace = trace.Mooncake()
	if c.Trace != "" {
		var err error
		if plan.Trace, source, err = c.readTrace(cmp.Or(c.Requests, drawnPrompts)); err != nil {
			return nil, "", err
		}
	}
	plan.Load = 0.5 // a value that Validate accepts; simulatePrefill sets each load of --load in turn
	return plan, source, plan.Validate()
}

// parseLoads returns the loads that --load lists, or the default of this tier.
func (c *simulateCmd) parseLoads() ([]float64, error) {
	if c.Load == "closed" { // the flag's default, which means something only for the other tiers
		return []float64{0.7}, nil
	}
	var loads []float64
	for item := range strings.SplitSeq(c.Load, ",") {
		load, err := strconv.ParseFloat(strings.TrimSpace(item), 64)
		if err != nil || !(load > 0 && load < 1) { // in this form, NaN is refused as well
			return nil, fmt.Errorf("--load %q: want shares of time in which engines prefill, above 0 and below 1, like 0.7 or 0.5,0.85", c.Load)
		}
		loads = append(loads, load)
	}
	return loads, nil
}

// describePrefillEngines returns a text about the prefill engines: how many, their KV memory, and
// how long a prefill takes, in ms. N is the number of new tokens of a prompt, and H the number of
// tokens before them that are cached. The time has a fixed part (T0), a part per new token (Tp),
// and a part per pair of tokens that attention looks at (Beta2), of which there are N·(H+N/2).
func (c *simulateCmd) describePrefillEngines() string {
	f := &c.Prefill
	words := fmt.Sprintf("%d engines with %d KV tokens each; a prefill takes %g + %g·N ms", c.prefillEngines(),
		cmp.Or(c.Capacity, defaultCapacity), f.T0, f.Tp)
	if f.Beta2 > 0 {
		words += fmt.Sprintf(" + %g·N·(H+N/2)", f.Beta2)
	}
	if f.Slow > 0 { // the first engine is slower than the others by this factor
		words += fmt.Sprintf(", on the first %g times as long", f.Slow)
	}
	if f.Both { // the engines both prefill and decode
		return words + fmt.Sprintf("; they decode too, in steps of %s + %s per KV token, with at most %d tokens of a prompt", millis(c.C0),
			millis(c.C1), f.Chunk)
	}
	return words + fmt.Sprintf("; its KV is fetched %v later", f.Hold)
}

// prefillCommandLine returns the command line that gives the same numbers again. line.Add adds
// nothing if its first argument is false.
func (c *simulateCmd) prefillCommandLine() string {
	f := &c.Prefill
	line := report.Words{Text: "evenkeel simulate --tier prefill", Before: " "}
	line.Add(c.Trace != "", "--trace %s", c.Trace)
	line.Add(c.Format != "auto", "--format %s", c.Format)
	line.Add(c.Load != "closed", "--load %s", c.Load)
	line.Add(true, "--prefills %d --seeds %d", c.prefillEngines(), c.Seeds)
	line.Add(c.Policies != "", "--policies %s", c.Policies)
	line.Add(c.Requests > 0, "--requests %d", c.Requests)
	line.Add(c.Capacity > 0, "--capacity %d", c.Capacity)
	line.Add(true, "--t0 %g --tp %g", f.T0, f.Tp)
	line.Add(f.Beta2 > 0, "--beta2 %g", f.Beta2)
	line.Add(!f.Learn, "--no-learn")
	line.Add(!f.Both, "--hold %v", f.Hold)
	line.Add(f.WrongCapacity != 1, "--wrong-capacity %g", f.WrongCapacity)
	line.Add(f.Slow > 0, "--slow %g", f.Slow)
	line.Add(f.Push > 0, "--push %d", f.Push)
	line.Add(f.Both, "--both --c0 %v --c1 %v --chunk %d", c.C0, c.C1, f.Chunk)
	line.Add(f.Burst > 0, "--burst %g", f.Burst)
	line.Add(!f.Hotspots, "--no-hotspots")
	line.Add(f.Affinity, "--affinity")
	for _, name := range slices.Sorted(maps.Keys(f.Define)) {
		line.Add(true, "--define '%s=%s'", name, f.Define[name])
	}
	return line.Text
}

// prefillNotes returns notes on how far the numbers apply to real engines, and on how they came
// about: the trace is played so fast that, under the policy lmetric, engines prefill for the share
// of time that --load gives; and each seed measures another part of the trace.
func (c *simulateCmd) prefillNotes(p *prefill.Plan) []string {
	var notes []string
	sharesBlocks := slices.ContainsFunc(p.Trace.Requests, func(r trace.Request) bool { return len(r.HashIDs) > 0 })
	if !sharesBlocks {
		notes = append(notes, "The trace does not say which prompts share blocks: no prompt finds anything in a cache, and policies that look "+
			"for hits have none to look for.")
	}
	if p.TellLine { // with --no-learn, evenkeel does not have to learn how long a prefill takes
		notes = append(notes, "The tier is told what a prefill takes, which no server knows.")
	}
	return append(notes,
		"A load is the share of time in which an engine prefills under lmetric; the trace is stretched until it is that. All policies get the "+
			"same arrivals; busy is what each of them made of it.",
		"TTFT is from arrival to the end of the prefill. Seeds share the requests after the first eighth of the trace: each measures a block of "+
			"its own, after an eighth of the trace that fills the caches. ± is the deviation between them.",
		"The server's own tier chose; engines take prompts first come, first served, drop the least recent blocks of their caches, and never "+
			"fail.")
}
