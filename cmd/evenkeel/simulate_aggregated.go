package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/mixed"
	"evenkeel/dispatcher/policy"
	"evenkeel/internal/namedargs"
	"evenkeel/internal/spelling"
)

const (
	tierAggregated = "aggregated"

	defaultAggregatedPolicies = enginePolicy + ",jsq-kv," + delayerPolicy + ",evenkeel"
	mostBudget                = 1 << 20 // --token-budget; no engine has as many tokens in a step
	mostInterval              = 64      // --prefill-schedule-interval; prompts would hardly be computed
	freeSlotShare             = 0.15    // share of the slots that stay free in a closed loop
	drawnRequests             = 20_000  // requests in a random trace
	// maxRequestsAtOnce bounds the slots of all ranks together, and the requests beyond them: a run
	// keeps each request in memory.
	maxRequestsAtOnce = 16_384
)

// aggregatedColumns are the columns of the table for --tier aggregated. The JSON output has all
// metrics.
var aggregatedColumns = []report.Metric{report.TokensPerS, report.TTFTMean, report.TTFTP99, report.TPOTP50, report.TPOTP95,
	report.MixedSteps,
	report.EmptyRanks, report.Failed}

// simulateAggregated compares policies on ranks that both prefill and decode, and prints a table or
// JSON.
func (c *simulateCmd) simulateAggregated(ctx context.Context, std streams) error {
	if c.deployment == nil { // --law, which names a deployment, was not given
		return usageError{errors.New("--tier aggregated needs --law, which says what a step takes; --law list prints all")}
	}
	policies, err := c.parseAggregatedPolicies()
	if err != nil {
		return err
	}
	load, lengths, err := c.aggregatedLoad() // lengths: those of a trace's prompts and answers
	if err != nil {
		return err
	}
	if c.Seeds < 1 {
		return fmt.Errorf("--seeds %d: at least 1", c.Seeds)
	}
	began, bar := time.Now(), newProgress(std.err)
	fmt.Fprintf(std.err, "%s, %d seeds; %d ranks of %d slots that prefill and decode; %s\n",
		lengths.Name, c.Seeds, load.Ranks, load.Slots, describeLaw(c.deployment))
	samples, err := report.Trials(ctx, len(policies), c.Seeds, func(done, total int) {
		bar.update(done, total, fmt.Sprintf("%d of %d runs done", done, total))
	}, func(ctx context.Context, i int, seed uint64) (report.Sample, error) {
		return runAggregated(ctx, c.loadForSeed(load, lengths, seed), policies[i])
	})
	bar.finish()
	if err != nil {
		return err
	}
	r := report.Report{Title: "evenkeel simulate", Command: c.aggregatedCommandLine()}
	for i, p := range policies {
		r.Runs = append(r.Runs, report.Run{Policy: p.Name, Seeds: c.Seeds, Metrics: report.Summarize(samples[i]...), Samples: samples[i]})
	}
	r.Facts = []report.Fact{
		{Name: "when", Value: fmt.Sprintf("%s, %.0f s in all", began.Format("2006-01-02 15:04:05 MST"), time.Since(began).Seconds())},
		{Name: "trace", Value: fmt.Sprintf("the lengths of %s, %d seeds", lengths.Name, c.Seeds)},
		{Name: "ranks", Value: fmt.Sprintf("%d that prefill and decode, %d slots each; %s", load.Ranks, load.Slots, describeLaw(c.deployment))},
	}
	r.Notes = c.aggregatedNotes(&r)
	if c.JSON {
		return r.JSON(std.out)
	}
	return printAggregated(std.out, &r, began)
}

// printAggregated prints the table, the notes, the time since began, and the command line that
// gives the same numbers again.
func printAggregated(out io.Writer, r *report.Report, began time.Time) error {
	var b bytes.Buffer
	if err := r.Lines(&b, aggregatedColumns...); err != nil {
		return err
	}
	b.WriteByte('\n')
	for _, note := range r.Notes {
		writeWrapped(&b, note)
	}
	fmt.Fprintf(&b, "%.0f s in all. Again: %s\n", time.Since(began).Seconds(), r.Command)
	_, err := b.WriteTo(out)
	return err
}

// parseAggregatedPolicies returns the policies of --policies: policies of evenkeel, and names for
// what engines do by themselves. If
// --policies is not given, it sets the default.
func (c *simulateCmd) parseAggregatedPolicies() (all []mixed.Contender, err error) {
	if c.Policies == "" {
		c.Policies = defaultAggregatedPolicies
	}
	for _, name := range namedargs.List(c.Policies) {
		p := mixed.Contender{Name: name, Spec: name, Learn: true} // the policy learns how long a step takes, as in the server
		switch {
		case name == delayerPolicy:
			// With delayer, the engines hold prompts, and requests go to the rank with the fewest tokens.
			p.Spec, p.Route, p.Delay = "", mixed.LeastTokens, delayerMaxSteps
		case name == enginePolicy:
			p = mixed.Own(c.deployment.Engine) // the engine's own balancing between its ranks
			p.Name = name
		default:
			if _, err := policy.ParseSpec(name); err != nil {
				return nil, fmt.Errorf("--policies: %w; besides them there are %s and %s%s", err, enginePolicy, delayerPolicy,
					spelling.Hint(name, []string{enginePolicy, delayerPolicy}))
			}
		}
		p.Every, p.Rests = c.Interval, c.deployment.Engine == "sglang"
		all = append(all, p)
	}
	return all, nil
}

// aggregatedLoad makes the load from the flags, and the trace that gives the lengths of its prompts
// and answers. loadForSeed copies both for each seed. --law names the deployment that is simulated:
// its number of ranks, and its law, which is how long a step takes.
func (c *simulateCmd) aggregatedLoad() (_ *mixed.Load, lengths *mixed.Replayed, _ error) {
	if err := c.checkAggregatedFlags(); err != nil {
		return nil, nil, err
	}
	t, name := trace.Azure(), "Azure's conversation trace (2023)"
	if c.Trace != "" {
		var err error
		if t, name, err = c.readTrace(drawnRequests); err != nil {
			return nil, nil, err
		}
	}
	lengths = &mixed.Replayed{Name: name, Requests: t.Requests}
	l := &mixed.Load{
		Texts: lengths, Ranks: c.deployment.Ranks, Slots: c.Slots, Budget: c.Budget,
		Law:  c.deployment.Served(), // how long a step takes that may also compute prompts
		Of:   c.deployment.Name(),   // whose law it is
		Full: 1 - freeSlotShare,     // the share of the slots that requests fill in a closed loop
	}
	if err := c.setPace(l); err != nil {
		return nil, nil, err
	}
	// A rank must have room for the longest request, and a tenth more.
	longest := slices.MaxFunc(t.Requests, func(a, b trace.Request) int { return a.Prompt + a.Output - b.Prompt - b.Output })
	if n := int64(longest.Prompt + longest.Output); c.Capacity > 0 && c.Capacity < n+n/10 {
		return nil, nil, fmt.Errorf("--capacity %d: the longest request of the trace has %d tokens, and a rank needs a tenth more",
			c.Capacity, n)
	}
	return l, lengths, nil
}

// checkAggregatedFlags refuses a law without measured prompts, and numbers that cannot be
// simulated. aggregatedLoad itself checks whether
// --capacity is enough for the trace.
func (c *simulateCmd) checkAggregatedFlags() error {
	if c.deployment.Prompt.Fit.Steps == 0 { // no steps with prompts were measured
		return fmt.Errorf("--law %s does not say what prompts take; take --tier decode, or another law", c.Law)
	}
	if c.Slots < 1 || c.Slots > maxRequestsAtOnce/c.deployment.Ranks {
		return fmt.Errorf("--slots %d: 1 to %d with so many ranks", c.Slots, maxRequestsAtOnce/c.deployment.Ranks)
	}
	if int(c.Budget) < c.Slots || c.Budget > mostBudget {
		return fmt.Errorf("--token-budget %d: %d to %d, because each of the %d slots needs a token", c.Budget, c.Slots, mostBudget, c.Slots)
	}
	if c.Interval < 1 || c.Interval > mostInterval {
		return fmt.Errorf("--prefill-schedule-interval %d: 1 to %d", c.Interval, mostInterval)
	}
	if c.Capacity < 0 {
		return fmt.Errorf("--capacity %d: a number of KV tokens, or 0 for no limit", c.Capacity)
	}
	return nil
}

// setPace sets by --load and --pool when requests come. For an open loop, it sets Rho, the requests
// that arrive as a share of those that the ranks could serve in the same time. For a closed loop,
// it sets Full, the requests in the system as a share of the slots; without
// --pool, Full stays as it is.
func (c *simulateCmd) setPace(l *mixed.Load) error {
	slots := l.Ranks * l.Slots
	switch {
	case c.Load != "closed":
		open, err := c.parseLoad(nil) // nil: an open loop needs no fleet
		if err != nil {
			return err
		}
		// Rho 1 stands for ranks whose slots are all in use, so about this many requests are in the
		// system at a time.
		atATime := open.Rho * float64(slots)
		if atATime < 1 {
			return fmt.Errorf("--load %s: there would be less than one request at a time; write a larger share", c.Load)
		}
		l.Rho, l.Full = open.Rho, 0
	case c.Pool != nil:
		if *c.Pool > maxRequestsAtOnce { // the simulator keeps each request in memory
			return fmt.Errorf("--pool %d: at most %d", *c.Pool, maxRequestsAtOnce)
		}
		l.Full = 1 + float64(*c.Pool)/float64(slots) // a negative --pool leaves slots free
		if l.Full <= 0 {
			return fmt.Errorf("--pool %d: no request would be in the system, which has %d slots", *c.Pool, slots)
		}
	}
	return nil
}

// loadForSeed returns a copy of the load for one seed. Each seed begins at another place in the
// trace, and draws other arrival times.
func (c *simulateCmd) loadForSeed(l *mixed.Load, lengths *mixed.Replayed, seed uint64) *mixed.Load {
	load, part := *l, *lengths
	part.From = int(seed-1) * len(lengths.Requests) / c.Seeds // seeds count from 1, and share the trace equally
	load.Texts, load.Seed, load.Room = &part, seed, c.Capacity
	load.Measure(0) // computes how many requests the ranks can serve; 0: Room is not changed
	return &load
}

// runAggregated serves a load under one policy in the simulator, and returns the results.
func runAggregated(ctx context.Context, l *mixed.Load, p mixed.Contender) (report.Sample, error) {
	o, err := mixed.Serve(ctx, l, p)
	return report.Sample{
		report.TokensPerS: o.Tokens, report.TTFTMean: o.TTFT, report.TTFTP99: o.TTFT99, report.TPOTP50: o.TPOT50, report.TPOTP95: o.TPOT95,
		report.MixedSteps: o.Prefill, report.EmptyRanks: o.Empty, report.Failed: float64(o.Unended),
	}, err
}

// aggregatedCommandLine returns the command line that gives the same numbers again. line.Add adds
// nothing if its first argument is false.
func (c *simulateCmd) aggregatedCommandLine() string {
	line := report.Words{Text: "evenkeel simulate --tier aggregated", Before: " --"}
	line.Add(true, "law %s", c.Law)
	line.Add(true, "policies %s", c.Policies)
	line.Add(c.Trace != "", "trace %s", c.Trace)
	line.Add(c.Format != "auto", "format %s", c.Format)
	line.Add(true, "slots %d", c.Slots)
	line.Add(c.Capacity != 0, "capacity %d", c.Capacity)
	line.Add(true, "token-budget %d", c.Budget)
	line.Add(c.Interval > 1, "prefill-schedule-interval %d", c.Interval)
	line.Add(true, "load %s", c.Load)
	if c.Pool != nil { // with =, because --pool may be negative, and a number with a minus after a space could be taken for a flag
		line.Text += fmt.Sprintf(" --pool=%d", *c.Pool)
	}
	line.Add(true, "seeds %d", c.Seeds)
	return line.Text
}

// aggregatedNotes returns notes on how far the numbers apply to real engines.
func (c *simulateCmd) aggregatedNotes(r *report.Report) []string {
	how := "In a closed loop a request comes when one has left"
	if c.Load != "closed" {
		how = "Requests come as a Poisson process, whatever the times of the trace"
	}
	return []string{
		c.simulatedGain("prefill and decode", anotherPart, r.Runs), r.Headline(),
		stepTimesNote + promptTimesNote,
		how + fmt.Sprintf(". A step computes at most %d tokens of a rank. No prompt is in a prefix cache.", c.Budget),
		fmt.Sprintf("engine is what the engine does by itself with one address. %s is what engines do that hold prompts for up to %d steps, "+
			"until each rank has one. × is the ratio to %s. ± is the deviation between seeds, each of which begins elsewhere in the trace.",
			delayerPolicy, delayerMaxSteps, r.Runs[0].Policy),
		"A simulator: the server's own board decides and learns what a step takes; a prompt's length is guessed (sigma 0.3). Engines never fail.",
	}
}
