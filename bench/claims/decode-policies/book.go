package main

import (
	"fmt"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

// blocks in the order in which they are computed, and stand in a document of
// their own.
var blocks = []page.Block[*book]{
	{Name: "closed", Title: "Closed loop", Tables: (*book).closedLoop},
	{Name: "scaling", Title: "More ranks", Tables: func(b *book) string { return page.Joined(b.Traces.Real, b.scale) }},
	{Name: "drawn", Title: "Drawn traces", Tables: (*book).drawnTraces},
	{Name: "short", Title: "Short answers", Tables: (*book).shortAnswers},
	{Name: "open", Title: "Open loop", Tables: func(b *book) string { return page.Joined(slices.Concat(b.Traces.Real, b.Traces.Long()), b.openTable) }},
	{Name: "sweeps", Title: "beta and gamma", Tables: func(b *book) string { return page.Joined(b.Traces.Real, b.sweepOf) }},
	{Name: "limits", Title: "KV limits, late telemetry", Tables: (*book).limits},
	{Name: "predictors", Title: "Predictors", Tables: func(b *book) string { return page.Joined(b.Traces.Real, b.holdOut) }},
	{Name: "reference", Title: "Beside the reference", Tables: (*book).reference},
	{Name: "claims", Title: "What should be seen", Tables: (*book).claims},
}

// compared are the policies of every table. Some tables have more: what only one of them is to show
// is not simulated for the others.
var compared = []string{"jsq", "jsq-kv", "pjsq-kv", "br0", "brh", "evenkeel"}

var (
	widest = []string{ // the first table
		"random", "rr", "p2c", "jsq", "jsq-kv", "pjsq-kv", "br0", "br0:paper", "brh", "brh:predictor=exact", "brh:predictor=oracle",
		"evenkeel",
	}
	foreseeing = with("brh:predictor=oracle") // what looking ahead could gain
)

// with is the policies of every table and others.
func with(others ...string) []string { return slices.Concat(compared, others) }

// The policies that others are measured by, and the product's default.
const (
	ours     = "evenkeel"
	baseline = "jsq-kv"
)

// book makes the tables of one run.
type book struct{ *policytables.Book }

// requests of a seed; 0 is all there are.
func (b *book) requests(on *policytables.Source) int {
	if t := on.From.Trace; t != nil && b.Most > len(t.Requests)/2 {
		return 0
	}
	return b.Most
}

// notAsked stands in place of tables that need our own traces.
const notAsked = "Not made for traces that a user gives."

// How tables show metrics.
var (
	imbalance   = page.Column{Metric: report.Imbalance, Title: "imbalance, 1,000 tokens", Scale: 1e-3, Digits: -1}
	spread      = page.Column{Metric: report.MaxMinusMin, Title: "max - min, 1,000 tokens", Scale: 1e-3, Digits: -1}
	idle        = page.Column{Metric: report.IdleShare, Title: "idle, %", Scale: 100, Digits: 1}
	throughput  = page.Column{Metric: report.TokensPerS, Title: "tokens/s", Scale: 1}
	ttft        = page.Column{Metric: report.TTFTP99, Title: "TTFT p99, s", Scale: 1e-3, Digits: 1}
	e2e         = page.Column{Metric: report.E2EP99, Title: "E2E p99, s", Scale: 1e-3, Digits: 1}
	meanWait    = page.Column{Metric: report.WaitMean, Title: "mean wait, s", Scale: 1e-3, Digits: 1}
	longestWait = page.Column{Metric: report.WaitMax, Title: "longest wait, s", Scale: 1e-3}
	preempted   = page.Column{Metric: report.Preempted, Title: "preempted", Scale: 1}
)

// sizes are the ranks of a group that are compared, and sweepSizes those of the sweeps.
func (b *book) sizes() []int {
	if b.Quick {
		return []int{4, 8, 64}
	}
	return []int{4, 8, 16, 32, 64}
}

func (b *book) sweepSizes() []int {
	if b.Quick {
		return []int{8}
	}
	return []int{8, 16}
}

// full is the widest table: a line for each policy, in one scenario.
func (b *book) full(sc scenario, policies []string) string {
	o := b.at(sc, policies...)
	if o.Refused != "" {
		return policytables.LeftOut(sc, o.Refused)
	}
	columns := []page.Column{imbalance, spread, idle, throughput, policytables.TPOT, ttft, meanWait, longestWait}
	if sc.capacity > 0 {
		columns = append(columns, preempted)
	}
	share, kv := o.Of(baseline, report.IdleShare).Mean, o.Of(baseline, report.KVShare).Mean
	bound := fmt.Sprintf("\nUnder `%s` reading KV is %.0f %% of a step, and ranks idle %.1f %% of that: level ranks would make its steps "+
		"%.1f %% shorter, and no policy can "+
		"do more.\n", baseline, 100*kv, 100*share, 100*share*kv)
	return fmt.Sprintf("**%s**\n\n%s%s%s", sc, page.Rows("policy", policies, page.Code, o.Columns("", false, columns...)...), bound,
		page.Fenced(b.command(sc, policies)))
}

func (b *book) closedLoop() string {
	first, others := b.Traces.Real[:1], slices.Clone(b.Traces.Real[1:])
	if b.Traces.Azure200 != nil {
		others = append(others, b.Traces.Azure200)
	}
	return b.fullTables(first, widest) + "\n" + b.fullTables(others, with("br0:paper", "brh:predictor=oracle"))
}

func (b *book) drawnTraces() string {
	if b.Traces.Drawn == nil {
		return notAsked
	}
	return b.fullTables(b.Traces.Long(), compared)
}

func (b *book) fullTables(sources []*policytables.Source, policies []string) string {
	return page.Joined(sources, func(s *policytables.Source) string {
		return s.Describe() + ".\n\n" + b.full(closed(s, 8), policies)
	})
}

// across runs policies in several sizes of group, and says which sizes were left out.
func (b *book) across(on *policytables.Source, sizes []int, policies []string, each func(g int, o *page.Outcome)) (text string) {
	for _, g := range sizes {
		if o := b.at(closed(on, g), policies...); o.Refused != "" {
			text += fmt.Sprintf("%d ranks are left out: %s.\n\n", g, o.Refused)
		} else {
			each(g, o)
		}
	}
	return text
}

// scale has a table for each metric and a column for each size.
func (b *book) scale(on *policytables.Source) string {
	var outcomes []*page.Outcome
	metrics := []page.Column{imbalance, idle, throughput}
	columns := make([][]page.Cells[string], len(metrics))
	text := b.across(on, b.sizes(), foreseeing, func(g int, o *page.Outcome) {
		outcomes = append(outcomes, o)
		for i, c := range metrics {
			c.Title = fmt.Sprintf("G = %d", g)
			columns[i] = append(columns[i], o.Columns("", false, c)...)
		}
	})
	if outcomes == nil {
		return text
	}
	longest := page.Cells[string]{Title: "longest wait of any, s", Of: func(p string) string {
		worst := 0.0
		for _, o := range outcomes {
			worst = max(worst, o.Of(p, report.WaitMax).Mean)
		}
		return longestWait.Alone(report.Value{Mean: worst})
	}}
	for i, c := range metrics {
		text += fmt.Sprintf("**%s, closed, %d slots a rank: %s**\n\n%s\n", on.Name, slotsOfRank, c.Title,
			page.Rows("policy", foreseeing, page.Code, append(columns[i], longest)...))
	}
	if line := b.command(closed(on, 8), foreseeing); line != "" {
		line = strings.Replace(line, "--workers 8", "--workers $G", 1)
		text += fmt.Sprintf("```\nfor G in %s; do %s; done\n```\n", strings.Trim(fmt.Sprint(b.sizes()), "[]"), line)
	}
	return text
}

// rhos are the loads of an open loop.
var rhos = []float64{0.7, 0.9}

// openTable is a line for each policy: what counts where arrivals do not wait for
// answers, at both loads.
func (b *book) openTable(on *policytables.Source) string {
	var columns []page.Cells[string]
	for _, rho := range rhos {
		o := b.at(open(on, 8, rho), compared...)
		if o.Refused != "" {
			return policytables.LeftOut(open(on, 8, rho), o.Refused)
		}
		for _, c := range []page.Column{imbalance, idle, throughput, policytables.TPOT, e2e, longestWait} {
			columns = append(columns, o.Columns(fmt.Sprintf("%g: ", rho), c != idle, c)...)
		}
	}
	line := b.command(open(on, 8, rhos[0]), compared)
	if line != "" {
		line = fmt.Sprintf("for RHO in %g %g; do %s; done", rhos[0], rhos[1],
			strings.Replace(line, fmt.Sprintf("--load %g", rhos[0]), "--load $RHO", 1))
	}
	return fmt.Sprintf("**%s, 8 x %d, open loop**\n\n%s%s", on.Name, slotsOfRank, page.Rows("policy", compared, page.Code, columns...),
		page.Fenced(line))
}

func (b *book) shortAnswers() string {
	on := b.Traces.Code
	if on == nil {
		return notAsked
	}
	return b.fullTables([]*policytables.Source{on}, foreseeing) + "\n" + b.openTable(on)
}

// sweepOf goes through the two weights of BR-H, crosswise around the defaults.
func (b *book) sweepOf(on *policytables.Source) string {
	policies := append(sweep(), "jsq", baseline, "pjsq-kv")
	var columns []page.Cells[string]
	text := b.across(on, b.sweepSizes(), policies, func(g int, o *page.Outcome) {
		columns = append(columns, o.Columns(fmt.Sprintf("G = %d: ", g), false, imbalance, idle, throughput, policytables.TPOT, longestWait)...)
	})
	if columns != nil {
		name := func(p string) string { return page.Code(strings.TrimPrefix(p, sweepPrefix+",")) }
		text += page.Rows("`"+sweepPrefix+"` with", policies, name, columns...)
	}
	return fmt.Sprintf("**%s, closed, %d slots a rank**\n\n%s%s", on.Name, slotsOfRank, text, page.Fenced(b.command(closed(on, 8), policies)))
}

const sweepPrefix = "brh:predictor=oracle"

// sweep lists the specs: beta at gamma 0.9, gamma at beta 48.
func sweep() []string {
	var specs []string
	for _, beta := range []string{"8", "16", "32", "48", "64", "96"} {
		specs = append(specs, sweepPrefix+",beta="+beta)
	}
	for _, gamma := range []string{"0.5", "0.7", "0.8", "0.95", "1"} {
		specs = append(specs, sweepPrefix+",gamma="+gamma)
	}
	return specs
}

// limits shows what makes deciding harder: KV that runs out, and progress that is
// seen late.
func (b *book) limits() string {
	on := b.Traces.Real[0]
	tight := closed(on, 8)
	tight.capacity = int64(max(1, tightness*slotsOfRank*trace.Resident(on.From.Trace.Requests)))
	late := closed(on, 8)
	late.stale, late.transfer = 16, 4
	return page.Joined([]scenario{tight, late}, func(sc scenario) string { return b.full(sc, compared) })
}

// tightness is a rank's KV memory in mean loads of a rank.
const tightness = 1.15
