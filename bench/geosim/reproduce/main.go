// Command reproduce writes the tables of docs/results/regions.md: the claims of both papers
// and our own (C1 to C10 of its table), each with what was measured and whether it
// reproduces, what forwarding saves in replicas, and what faults break.
//
// The same program gives the same tables to the bit; nothing outside the marked
// parts of the document changes.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/geosim"
	"evenkeel/bench/report"
	"evenkeel/bench/world"
)

func main() {
	out := flag.String("out", "docs/results/regions.md", "document to write")
	seeds := flag.Int("seeds", 5, "runs of every arm")
	only := flag.String("only", "", "comma-separated names of the tables to write: "+strings.Join(report.Names(blocks), ", "))
	flag.Parse()
	world.Main("reproduce", func(ctx context.Context, _ []string, _ io.Writer) error {
		return run(ctx, *out, *seeds, *only)
	})
}

var blocks = []report.Block[*book]{
	{Name: "geo-default", Title: "Our default", Tables: (*book).defaults},
	{Name: "geo-grid", Title: "Our default on a grid", Tables: (*book).grid},
	{Name: "geo-claims", Title: "Claims", Tables: (*book).claims},
	{Name: "geo-sweeps", Title: "Parameters", Tables: (*book).sweeps},
	{Name: "geo-cost", Title: "Replicas", Tables: (*book).cost},
	{Name: "geo-faults", Title: "Faults", Tables: (*book).faults},
}

// makes is what `make` calls the tables.
const makes = "reproduce-geo"

func run(ctx context.Context, path string, seeds int, only string) error {
	if seeds < 1 {
		return fmt.Errorf("-seeds %d: at least 1", seeds)
	}
	var names []string
	if only != "" {
		names = strings.Split(only, ",")
	}
	chosen, err := report.Choose(blocks, names)
	if err != nil {
		return fmt.Errorf("-only %w", err)
	}
	return report.Fill(path, makes, &book{ctx: ctx, seeds: seeds, runs: map[key][]report.Sample{}}, chosen)
}

// book has all that was simulated, each once. After its first error it simulates
// nothing more.
type book struct {
	ctx   context.Context
	seeds int
	runs  map[key][]report.Sample // by seed
	err   error
}

// Err is report.Book's.
func (b *book) Err() error { return b.err }

type key struct{ scenario, preset, arm string }

// need simulates what is missing. A scenario may be a variant: "skew, twice the
// clients".
func (b *book) need(scenario, preset string, arms ...string) {
	missing := slices.DeleteFunc(slices.Clone(arms), func(arm string) bool {
		_, done := b.runs[key{scenario, preset, arm}]
		return done
	})
	if len(missing) == 0 || b.err != nil {
		return
	}
	name, other, _ := strings.Cut(scenario, ", ")
	sc, err := geosim.Named(name, preset)
	if err != nil {
		b.err = err
		return
	}
	for i := range variants {
		if variants[i].name == other {
			variants[i].change(sc)
		}
	}
	began := time.Now()
	samples, err := (&geosim.Plan{Scenario: sc, Arms: missing, Seeds: b.seeds}).Samples(b.ctx)
	if err != nil {
		b.err = err
		return
	}
	for i, arm := range missing {
		b.runs[key{scenario, preset, arm}] = samples[i]
	}
	fmt.Fprintf(os.Stderr, "%s on %s: %d arms in %.1f s\n", scenario, preset, len(missing), time.Since(began).Seconds())
}

// of is a mean, 0 after an error; what nobody needed before is a bug.
func (b *book) of(scenario, preset, arm string, m report.Metric) float64 {
	return report.Summarize(b.samples(scenario, preset, arm)...)[m].Mean
}

// samples are what every seed gave.
func (b *book) samples(scenario, preset, arm string) []report.Sample {
	samples, ok := b.runs[key{scenario, preset, arm}]
	if !ok && b.err == nil {
		panic("not simulated: " + scenario + " " + preset + " " + arm)
	}
	return samples
}

// ratio of a metric under one arm to that under another.
func (b *book) ratio(scenario, preset, arm, other string, m report.Metric) float64 {
	return b.of(scenario, preset, arm, m) / b.of(scenario, preset, other, m)
}

// span is how ratios lie.
type span []float64

func (s *span) add(v float64) { *s = append(*s, v) }
func (s span) least() float64 { return slices.Min(s) }
func (s span) most() float64  { return slices.Max(s) }
func (s span) String() string { return fmt.Sprintf("%.2f to %.2f", s.least(), s.most()) }

// command makes a table's numbers again.
func (b *book) command(scenario, preset string, arms ...string) string {
	return fmt.Sprintf("`evenkeel simulate --tier geo --scenario %s --preset %s --policies %s --seeds %d`", scenario, preset, strings.Join(arms, ","), b.seeds)
}

func table(head string, rows [][]string) string {
	t := report.Markdown{Head: strings.Split(head, " | "), Rows: rows}
	t.Text = len(t.Head)
	return t.String()
}

// atLeast and atMost hold a ratio, as it is printed with two digits, against a limit.
func atLeast(v, limit float64) bool { return printed(v) >= limit }
func atMost(v, limit float64) bool  { return printed(v) <= limit }

func printed(v float64) float64 {
	shown, _ := strconv.ParseFloat(fmt.Sprintf("%.2f", v), 64) // of what was just printed: never fails
	return shown
}

// verdict in words.
func verdict(ok bool) string {
	if ok {
		return "reproduced"
	}
	return "**not reproduced**"
}
