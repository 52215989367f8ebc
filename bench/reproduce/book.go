package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"evenkeel/bench/report"
	"evenkeel/bench/trace"
)

// blocks in the order in which they are computed, and stand in a document of
// their own.
var blocks = []report.Block[*book]{
	{Name: "closed", Title: "Closed loop", Tables: (*book).closedLoop},
	{Name: "scaling", Title: "More ranks", Tables: (*book).scaling},
	{Name: "drawn", Title: "Drawn traces", Tables: (*book).drawnTraces},
	{Name: "short", Title: "Short answers", Tables: (*book).shortAnswers},
	{Name: "open", Title: "Open loop", Tables: (*book).openLoop},
	{Name: "sweeps", Title: "beta and gamma", Tables: (*book).sweeps},
	{Name: "limits", Title: "KV limits, late telemetry", Tables: (*book).limits},
	{Name: "predictors", Title: "Predictors", Tables: (*book).predictors},
	{Name: "reference", Title: "Beside the reference", Tables: (*book).reference},
	{Name: "claims", Title: "What should be seen", Tables: (*book).claims},
}

// compared are the policies of every table. Some tables have more: what only one of them is to show is
// not simulated for the others.
var compared = []string{"jsq", "jsq-kv", "pjsq-kv", "br0", "brh", "evenkeel"}

var (
	widest = []string{ // the first table
		"random", "rr", "p2c", "jsq", "jsq-kv", "pjsq-kv", "br0", "brh", "brh:predictor=exact", "brh:predictor=oracle",
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
type book struct {
	simulations
	traces *bookSources
	opts   options
}

// A quick run has one seed, of requests that fill 64 ranks of 16 slots twice.
const (
	fullSeeds     = 5
	prefillSeeds  = 10 // blocks of a trace
	quickRequests = 2500
)

func newBook(ctx context.Context, o options, progress io.Writer) (*book, error) {
	traces, err := newSources(o.traces)
	if err != nil {
		return nil, err
	}
	b := &book{traces: traces, opts: o, simulations: simulations{ctx: ctx, seeds: fullSeeds, progress: progress, done: map[fmt.Stringer]*outcome{}}}
	if o.tier == "prefill" {
		b.seeds = prefillSeeds
	}
	if o.quick {
		b.seeds, b.most = 1, quickRequests
	}
	return b, nil
}

// notAsked stands in place of tables that need our own traces.
const notAsked = "Not made for traces that a user gives."

// under has a block stand under the command that makes it again.
func (b *book) under(bl report.Block[*book]) report.Block[*book] {
	line := "go run ./bench/reproduce"
	if b.opts.tier == "prefill" {
		line += " --tier prefill"
	}
	line += " --only " + bl.Name
	if b.opts.quick {
		line += " --quick"
	}
	for _, t := range b.opts.traces {
		line += " " + t
	}
	tables := bl.Tables
	bl.Tables = func(b *book) string {
		return "`" + line + "`\n\n" + tables(b)
	}
	return bl
}

// joined makes a part of a block of each of a list.
func joined[T any](list []T, part func(T) string) string {
	var parts []string
	for _, x := range list {
		parts = append(parts, part(x))
	}
	return strings.Join(parts, "\n")
}

// leftOut stands in place of a table that cannot be simulated.
func leftOut(sc fmt.Stringer, why string) string {
	return fmt.Sprintf("**%s**\n\nLeft out: %s.\n", sc, why)
}

// row is a policy's line of a table.
func row(o *outcome, policy string, columns []column) []string {
	cells := []string{"`" + policy + "`"}
	for _, c := range columns {
		cells = append(cells, c.show(o.of(policy, c.metric)))
	}
	return cells
}

// titles are the heads of columns.
func titles(first string, columns []column) []string {
	heads := []string{first}
	for _, c := range columns {
		heads = append(heads, c.title)
	}
	return heads
}

// sizes are the ranks of a group that are compared.
func (b *book) sizes() []int {
	if b.opts.quick {
		return []int{4, 8, 64}
	}
	return []int{4, 8, 16, 32, 64}
}

// full is the widest table: a line a policy, in one scenario.
func (b *book) full(sc scenario, policies []string) string {
	o := b.run(sc, policies)
	if o.refused != "" {
		return leftOut(sc, o.refused)
	}
	columns := []column{imbalance, spread, idle, throughput, tpot, ttft, meanWait, longestWait}
	if sc.capacity > 0 {
		columns = append(columns, preempted)
	}
	t := report.Markdown{Head: titles("policy", columns)}
	for _, p := range policies {
		t.Add(row(o, p, columns)...)
	}
	return fmt.Sprintf("**%s**\n\n%s%s%s", sc, &t, bound(o), fenced(b.command(sc, policies)))
}

// fenced is a command below a table; none is nothing.
func fenced(line string) string {
	if line == "" {
		return ""
	}
	return "\n```\n" + line + "\n```\n"
}

// bound says how much there was to gain over the baseline.
func bound(o *outcome) string {
	share, kv := o.of(baseline, report.IdleShare).Mean, o.of(baseline, report.KVShare).Mean
	return fmt.Sprintf("\nUnder `%s` reading KV is %.0f %% of a step, and ranks idle %.1f %% of that: level ranks would make its steps %.1f %% shorter, and no policy can "+
		"do more.\n",
		baseline, 100*kv, 100*share, 100*share*kv)
}

func (b *book) closedLoop() string {
	first, others := b.traces.real[:1], slices.Clone(b.traces.real[1:])
	if b.traces.azure200 != nil {
		others = append(others, b.traces.azure200)
	}
	return b.fullTables(first, widest) + "\n" + b.fullTables(others, foreseeing)
}

func (b *book) drawnTraces() string {
	var sources []*source
	for _, s := range b.traces.drawn {
		if s != b.traces.code {
			sources = append(sources, s)
		}
	}
	if sources == nil {
		return notAsked
	}
	return b.fullTables(sources, compared)
}

func (b *book) fullTables(sources []*source, policies []string) string {
	return joined(sources, func(s *source) string {
		return s.describe() + ".\n\n" + b.full(closed(s, 8), policies)
	})
}

// scaling has, for each trace, a table a metric and a column a size.
func (b *book) scaling() string { return joined(b.traces.real, b.scale) }

func (b *book) scale(on *source) string {
	var (
		outcomes []*outcome
		heads    []string
	)
	text := ""
	for _, g := range b.sizes() {
		o := b.run(closed(on, g), foreseeing)
		if o.refused != "" {
			text += fmt.Sprintf("%d ranks are left out: %s.\n\n", g, o.refused)
			continue
		}
		outcomes, heads = append(outcomes, o), append(heads, fmt.Sprintf("G = %d", g))
	}
	if outcomes == nil {
		return text
	}
	for _, c := range []column{imbalance, idle, throughput} {
		t := report.Markdown{Head: append(append([]string{"policy"}, heads...), "longest wait of any, s")}
		for _, p := range foreseeing {
			row, worst := []string{"`" + p + "`"}, 0.0
			for _, o := range outcomes {
				row = append(row, c.show(o.of(p, c.metric)))
				worst = max(worst, o.of(p, report.WaitMax).Mean)
			}
			t.Add(append(row, longestWait.alone(report.Value{Mean: worst}))...)
		}
		text += fmt.Sprintf("**%s, closed, %d slots a rank: %s**\n\n%s\n", on.name, slotsOfRank, c.title, &t)
	}
	if line := b.command(closed(on, 8), foreseeing); line != "" {
		line = strings.Replace(line, "--workers 8", "--workers $G", 1)
		text += fmt.Sprintf("```\nfor G in %s; do %s; done\n```\n", strings.Trim(fmt.Sprint(b.sizes()), "[]"), line)
	}
	return text
}

func (b *book) openLoop() string {
	sources := append([]*source(nil), b.traces.real...)
	for _, s := range b.traces.drawn {
		if s != b.traces.code {
			sources = append(sources, s)
		}
	}
	return joined(sources, b.openTable)
}

// rhos are the loads of an open loop.
var rhos = []float64{0.7, 0.9}

// openTable is a line a policy: what counts where arrivals do not wait for
// answers, at both loads.
func (b *book) openTable(on *source) string {
	columns := []column{imbalance, idle, throughput, tpot, e2e, longestWait}
	t := report.Markdown{Head: []string{"policy"}}
	var outcomes []*outcome
	for _, rho := range rhos {
		o := b.run(open(on, 8, rho), compared)
		if o.refused != "" {
			return leftOut(open(on, 8, rho), o.refused)
		}
		outcomes = append(outcomes, o)
		for _, c := range columns {
			t.Head = append(t.Head, fmt.Sprintf("%g: %s", rho, c.title))
		}
	}
	for _, p := range compared {
		row := []string{"`" + p + "`"}
		for _, o := range outcomes {
			for _, c := range columns {
				v := o.of(p, c.metric)
				if c == idle {
					row = append(row, c.show(v))
				} else {
					row = append(row, c.alone(v))
				}
			}
		}
		t.Add(row...)
	}
	line := b.command(open(on, 8, rhos[0]), compared)
	if line != "" {
		line = fmt.Sprintf("for RHO in %g %g; do %s; done", rhos[0], rhos[1], strings.Replace(line, fmt.Sprintf("--load %g", rhos[0]), "--load $RHO", 1))
	}
	return fmt.Sprintf("**%s, 8 x %d, open loop**\n\n%s%s", on.name, slotsOfRank, &t, fenced(line))
}

func (b *book) shortAnswers() string {
	on := b.traces.code
	if on == nil {
		return notAsked
	}
	return b.fullTables([]*source{on}, foreseeing) + "\n" + b.openTable(on)
}

// sweeps go through the two weights of BR-H, crosswise around the defaults.
func (b *book) sweeps() string { return joined(b.traces.real, b.sweepOf) }

func (b *book) sweepOf(on *source) string {
	t := report.Markdown{Head: []string{"`brh:predictor=oracle` with"}}
	policies := append(sweep(), "jsq", baseline, "pjsq-kv")
	rows := make([][]string, len(policies))
	for i, p := range policies {
		rows[i] = []string{"`" + strings.TrimPrefix(p, sweepPrefix+",") + "`"}
	}
	text := ""
	for _, g := range b.sweepSizes() {
		o := b.run(closed(on, g), policies)
		if o.refused != "" {
			text += fmt.Sprintf("%d ranks are left out: %s.\n\n", g, o.refused)
			continue
		}
		for _, c := range sweepColumns {
			t.Head = append(t.Head, fmt.Sprintf("G = %d: %s", g, c.title))
		}
		for i, p := range policies {
			rows[i] = append(rows[i], row(o, p, sweepColumns)[1:]...)
		}
	}
	if t.Rows = rows; len(t.Head) > 1 {
		text += t.String()
	}
	return fmt.Sprintf("**%s, closed, %d slots a rank**\n\n%s%s", on.name, slotsOfRank, text, fenced(b.command(closed(on, 8), policies)))
}

func (b *book) sweepSizes() []int {
	if b.opts.quick {
		return []int{8}
	}
	return []int{8, 16}
}

const sweepPrefix = "brh:predictor=oracle"

var sweepColumns = []column{imbalance, idle, throughput, tpot, longestWait}

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
	on := b.traces.real[0]
	tight := closed(on, 8)
	tight.capacity = int64(max(1, tightness*slotsOfRank*trace.Resident(on.from.Trace.Requests)))
	late := closed(on, 8)
	late.stale, late.transfer = 16, 4
	return joined([]scenario{tight, late}, func(sc scenario) string { return b.full(sc, compared) })
}

// tightness is a rank's KV memory in mean loads of a rank.
const tightness = 1.15
