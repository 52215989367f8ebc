package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/policy"
)

// fullScale has the step times of real engines, which are slower than the demo's engines.
var fullScale = report.StepModel{C0: 55 * time.Millisecond, C1: 200}

// mooncakeKVPerRequest is the mean number of KV tokens that a running request of Mooncake's
// conversation trace holds, as trace.Resident computes it.
const mooncakeKVPerRequest = 13_125

// makeReport makes the report of all trials, with notes on how far the numbers apply to real
// engines. Bound is the mean over the trials of what the same steps would have given with equal
// loads on all ranks: no policy can balance better.
func (c *demoCmd) makeReport(trials []*trial, requests []trace.Request, source string, began time.Time) *report.Report {
	r := &report.Report{Title: "evenkeel demo", Command: c.commandLine(), Model: c.stepModel()}
	resultsIfBalanced := make([]report.Sample, 0, len(trials))
	for _, t := range trials {
		r.Runs = append(r.Runs, t.run)
		resultsIfBalanced = append(resultsIfBalanced, t.ifBalanced)
	}
	r.Bound = report.Summarize(resultsIfBalanced...)
	r.Facts = c.facts(trials, requests, source, began)
	if c.Aggregated {
		r.Title = "evenkeel demo, ranks that prefill and decode"
	}
	var notes []string
	switch {
	case c.deployment != nil: // --law was given, with --aggregated or without
		notes = c.lawNotes(r.Runs)
	case c.Aggregated:
		notes = c.aggregatedNotes(trials)
	default:
		notes = c.scaleNotes(r)
	}
	r.Notes = slices.Concat(notes, c.measuredNotes(r))
	return r
}

// commandLine returns the command line that gives the same report again.
func (c *demoCmd) commandLine() string {
	if c.Aggregated {
		return c.aggregatedCommandLine()
	}
	line := fmt.Sprintf("evenkeel demo --requests %d %s --slots %d --extra %d --policies %s --seed %d",
		c.Requests, c.lawFlagOr(fmt.Sprintf("--workers %d --c0 %v --c1 %v", c.Workers, c.C0, c.C1)), c.Slots, c.Extra, c.Policies, c.Seed)
	line += fmt.Sprintf(" --connector %s --prefills %d --prefill-base %v --prefill-per-token %v --window %v --max-age %v",
		c.Connector, c.Prefills, c.PrefillBase, c.PrefillPerToken, c.Window, c.MaxAge)
	if c.Trace != "" {
		line += " --trace " + c.Trace
	}
	return line
}

// facts returns the conditions of the run for the report: machine, trace, engines, load and
// policies. The last fact, books, is a result: for each policy, the counts that show whether
// engines and proxy gave back all KV and all slots.
func (c *demoCmd) facts(trials []*trial, requests []trace.Request, source string, began time.Time) []report.Fact {
	v, commit := buildInfo()
	specs, audits := c.describeTrials(trials)
	used := trace.Trace{Requests: requests}
	s := used.Summary()
	prefill := fmt.Sprintf("%d engines, %s + %s per prompt token, one prompt at a time", c.Prefills, millis(c.PrefillBase),
		millis(c.PrefillPerToken))
	inSystem := fmt.Sprintf("%d requests in the system: %d in slots, %d more", c.concurrency(), c.Workers*c.Slots, c.Extra)
	if c.Aggregated {
		prefill = c.describePrefill()
		inSystem = fmt.Sprintf("%d requests in the system, which has %d slots", c.concurrency(), c.Workers*c.Slots)
	}
	return []report.Fact{
		{Name: "when", Value: fmt.Sprintf("%s, %.0f s in all", began.Format("2006-01-02 15:04:05 MST"), time.Since(began).Seconds())},
		{Name: "machine", Value: describeMachine()},
		{Name: "program", Value: fmt.Sprintf("evenkeel %s, commit %s, %s; engines, proxy and load share one process", v, commit, runtime.Version())},
		{Name: "trace", Value: fmt.Sprintf("%s, %d requests, seed %d", source, len(requests), c.Seed)},
		{Name: "prompt tokens", Value: describeTokens(s.Prompt)},
		{Name: "output tokens", Value: describeTokens(s.Output)},
		{Name: "decode", Value: fmt.Sprintf("%d ranks behind one barrier, %d slots each; %s", c.Workers, c.Slots, c.describeStep())},
		{Name: "prefill", Value: prefill},
		{Name: "load", Value: fmt.Sprintf("closed loop, %s; every stream checked token by token", inSystem)},
		{Name: "policies as they ran", Value: strings.Join(specs, "; ")},
		{Name: "dispatch window", Value: millis(c.Window)},
		{Name: "books", Value: strings.Join(audits, "; ")},
	}
}

// describeTrials returns two texts for each trial: its policy with all settings, and the counts of
// its audit.
func (c *demoCmd) describeTrials(trials []*trial) (specs, audits []string) {
	specs, audits = make([]string, len(trials)), make([]string, len(trials))
	for i, t := range trials {
		specs[i] = t.policy.spec
		if c.Aggregated { // there are no hand-offs to count
			if t.policy.name == delayerPolicy {
				specs[i] += fmt.Sprintf(" (the engines hold prompts for up to %d steps)", delayerMaxSteps)
			}
			audits[i] = fmt.Sprintf("%s: drift of the proxy's books %d", t.policy.name, t.audit.drift)
			continue
		}
		audits[i] = fmt.Sprintf("%s: %d hand-offs pulled, %d parts of KV written, %d leaked, %d still pinned, "+
			"%d pulls or writes of other KV, drift of the proxy's books %d",
			t.policy.name, t.audit.pulls, t.audit.writes, t.audit.leaks, t.audit.pinned, t.audit.kvErrors, t.audit.drift)
	}
	return specs, audits
}

// describeTokens returns a text with the mean, the percentiles and the maximum of a number of
// tokens.
func describeTokens(s trace.Stats) string {
	return fmt.Sprintf("mean %.0f, p50 %d, p90 %d, p99 %d, largest %d", s.Mean, s.P50, s.P90, s.P99, s.Max)
}

// describeMachine returns a text about this machine: the name of the processor, if /proc/cpuinfo
// has it, the number of CPUs, and the platform.
func describeMachine() string {
	name := ""
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer func() { _ = f.Close() }() // the file was only read, so an error of Close has no effect
		for lines := bufio.NewScanner(f); lines.Scan() && name == ""; {
			if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
				name = strings.TrimSpace(value) + ", "
			}
		}
	}
	return fmt.Sprintf("%s%d CPUs, %s/%s", name, runtime.GOMAXPROCS(0), runtime.GOOS, runtime.GOARCH)
}

// scaleNotes returns notes on how far the numbers of this run apply to engines at full scale. It
// computes the notes from the run.
func (c *demoCmd) scaleNotes(r *report.Report) []string {
	var notes []string
	for _, note := range []string{c.fixedPartNote(), c.kvShareNote(r), c.meanStepNote(r.Runs)} {
		if note != "" {
			notes = append(notes, note)
		}
	}
	return notes
}

// fixedPartNote returns a note on c0, the part of a step's time that does not depend on the load;
// empty: c0 is not smaller than at full scale.
func (c *demoCmd) fixedPartNote() string {
	if c.C0 >= fullScale.C0 {
		return ""
	}
	return fmt.Sprintf("Engine time is scaled down: a step's fixed part c0 is %s here and %s at full scale, %.3g times more; "+
		"its part per KV token, c1 = %s, is not scaled.",
		millis(c.C0), millis(fullScale.C0), float64(fullScale.C0)/float64(c.C0), millis(c.C1))
}

// kvShareNote returns a note on KV's share of a step: the part of its time that depends on the
// load; empty: it was not measured. A step takes c0, and c1 per KV token. The demo's engines have a
// smaller c0 than engines at full scale, but the same c1, so KV's share is larger here. The note
// has the share that was measured here, the share here with level (equal) loads, and three shares
// with the c0 of full
// scale: with the loads of this run, and with full slots and the requests of two traces.
func (c *demoCmd) kvShareNote(r *report.Report) string {
	ifLevel, ok := r.Bound[report.KVShare] // the share here if, in each of the same steps, all ranks had the same load
	if !ok {
		return ""
	}
	first := r.Runs[0]
	measured := first.Metrics[report.KVShare]
	// Only c0 is scaled down, so the c1 of this run also applies at full scale.
	atFullScale := report.StepModel{C0: fullScale.C0, C1: float64(c.C1)}
	withLoadsHere := atFullScale.KVShare(c.meanRankLoad(r))
	// All slots of a rank are full, and requests are as long as those of a trace.
	withAzure := atFullScale.KVShare(float64(c.Slots) * trace.Resident(trace.Azure().Requests))
	withMooncake := atFullScale.KVShare(float64(c.Slots) * mooncakeKVPerRequest)
	return fmt.Sprintf("KV's share of a step is %.0f %% here under %s, %.0f %% if ranks were level; with c0 = %s the same "+
		"loads' would be %.0f %%. At full scale, level, %d slots a rank: Azure's conversation trace %.0f %%, Mooncake's %.0f %%.",
		100*measured.Mean, first.Policy, 100*ifLevel.Mean, millis(atFullScale.C0), 100*withLoadsHere, c.Slots, 100*withAzure,
		100*withMooncake)
}

// meanStepNote returns a note that compares the mean step under the last policy with that under the
// first one; empty: there is only one policy, or too little was measured. A step at full scale has
// a longer fixed part c0, and the same part that depends on the loads. So the same difference of
// loads changes it by fewer per cent, and the note has the ratio once for the steps here and once
// for full scale.
func (c *demoCmd) meanStepNote(runs []report.Run) string {
	if len(runs) < 2 {
		return ""
	}
	first, last := runs[0], runs[len(runs)-1]
	firstStep, okFirst := first.Metrics[report.StepMean]
	lastStep, okLast := last.Metrics[report.StepMean]
	if !okFirst || !okLast {
		return ""
	}
	ratioHere := lastStep.Mean / firstStep.Mean
	ratioAtFullScale := c.atFullScaleMs(lastStep.Mean) / c.atFullScaleMs(firstStep.Mean) // with the same loads, and c0 as at full scale
	return fmt.Sprintf("Imbalance and idle share carry over to full scale. TPOT and throughput do not: they gain at most "+
		"the idle share times KV's share of the step. The mean step of %s against that of %s: %+.1f %% here, %+.1f %% with the same loads and "+
		"c0 = %s.",
		last.Policy, first.Policy, 100*(ratioHere-1), 100*(ratioAtFullScale-1), millis(fullScale.C0))
}

// aggregatedNotes returns notes on the engines, and on the times of prompts that the proxy has
// learned. Only a policy that may hold prompts back gets a note on these times, because only it
// uses them.
func (c *demoCmd) aggregatedNotes(trials []*trial) []string {
	notes := c.engineNotes()
	// If all ranks compute equally many prompt tokens, each token of a rank takes the rank's own time
	// and the shared time.
	perPromptToken := c.PrefillPerToken + c.PrefillShared
	for _, t := range trials {
		spec, err := policy.ParseSpec(t.policy.spec)
		if err == nil && spec.Accepts("max_hold") { // the policy may hold prompts back
			notes = append(notes, fmt.Sprintf("The proxy learns from the times of tokens what a prompt takes. Under %s it knew %s; the engines "+
				"take %s and %s. Until it knows something, it holds no prompt.",
				t.policy.name, t.learnedTimes, micros(perPromptToken), millis(c.PrefillBase)))
		}
	}
	return notes
}

// measuredNotes returns notes on what was measured, and on how accurately the engines kept their
// times.
func (c *demoCmd) measuredNotes(r *report.Report) []string {
	ended := "as many requests had ended as there are slots"
	if c.Aggregated {
		ended = fmt.Sprintf("%d requests had ended", c.warmUpRequests())
	}
	notes := []string{"Measured from when " + ended + " until the last one was sent; TTFT and TPOT are of requests sent in that time. Load " +
		"is the KV of running requests in the engines' step log: what waits in an engine for a slot takes capacity, not step time."}
	late, step := 0.0, 0.0 // the largest values of all runs, ms
	for _, run := range r.Runs {
		late, step = max(late, run.Metrics[report.StepLateP99].Mean), max(step, run.Metrics[report.StepMean].Mean)
	}
	if late > 0 {
		note := fmt.Sprintf("Engines, proxy and load share this machine. 99 %% of the steps ended at most %.2f ms later than the engines' clock "+
			"wanted; the clock does not wait for them.", late)
		if late > step {
			note += " That is more than a step: the machine was busy with something else; run it again before you compare."
		}
		notes = append(notes, note)
	}
	return append(notes, "One run a policy: differences of a few per cent are noise.")
}

// meanRankLoad returns the mean load of a rank over the runs of all policies, in KV tokens. The
// metric KVTokens is the load of all ranks together.
func (c *demoCmd) meanRankLoad(r *report.Report) float64 {
	sum := 0.0
	for _, run := range r.Runs {
		sum += run.Metrics[report.KVTokens].Mean
	}
	return sum / float64(len(r.Runs)*c.Workers)
}

// atFullScaleMs returns how long a step of this run would take at full scale, where only c0 is
// larger. Both times are in ms.
func (c *demoCmd) atFullScaleMs(step float64) float64 {
	return step + float64(fullScale.C0-c.C0)/float64(time.Millisecond)
}
