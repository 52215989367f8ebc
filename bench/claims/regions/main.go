// Command regions writes the tables of docs/results/regions.md: the claims of both papers
// and our own (C1 to C11 of its table), each with what was measured and whether it
// reproduces, what forwarding saves in replicas, and what faults break.
//
// The same program gives the same tables to the bit; nothing outside the marked
// parts of the document changes.
package main

import (
	"fmt"
	"slices"
	"strings"

	"evenkeel/bench/sim/regions"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

func main() { program.Main() }

var program = policytables.Program[*book]{
	Name: "regions", Seeds: 3, Blocks: blocks,
	Book: func(b *policytables.Book) *book { return &book{b} },
}

var blocks = []page.Block[*book]{
	{Name: "geo-default", Title: "Our default", Tables: (*book).defaults},
	{Name: "geo-grid", Title: "Our default on a grid", Tables: (*book).grid},
	{Name: "geo-claims", Title: "Claims", Tables: (*book).claims},
	{Name: "geo-sweeps", Title: "Policies and parameters", Tables: (*book).sweeps},
	{Name: "geo-cost", Title: "Replicas", Tables: (*book).cost},
	{Name: "geo-faults", Title: "Faults", Tables: (*book).faults},
}

// book has all that was simulated, each once.
type book struct{ *policytables.Book }

// place is a scenario on engines of a preset. A scenario may be a variant: "skew, 300 ms between
// turns".
type place struct{ scenario, preset string }

func (p place) String() string { return p.scenario + " on " + p.preset }

// on is what policies did in a place.
func (b *book) on(scenario, preset string, arms ...string) *page.Outcome {
	return b.In(place{scenario, preset}, arms, func(o *page.Outcome, lacking []string) error {
		name, other, _ := strings.Cut(scenario, ", ")
		sc, err := regions.Named(name, preset)
		if err != nil {
			return err
		}
		for _, v := range variants {
			if v.name == other {
				v.change(sc)
			}
		}
		samples, err := (&regions.Plan{Scenario: sc, Arms: lacking, Seeds: b.Seeds}).Samples(b.Ctx)
		if err != nil {
			return err
		}
		o.Sampled(lacking, samples)
		return nil
	})
}

// span is how ratios lie, as they are written.
type span []float64

func (s *span) add(v float64) { *s = append(*s, page.Rounded(v, 2)) }
func (s span) least() float64 { return slices.Min(s) }
func (s span) most() float64  { return slices.Max(s) }
func (s span) String() string { return fmt.Sprintf("%.2f to %.2f", s.least(), s.most()) }

// command makes a table's numbers again.
func (b *book) command(scenario, preset string, arms ...string) string {
	return fmt.Sprintf("`evenkeel simulate --tier geo --scenario %s --preset %s --policies %s --seeds %d`", scenario, preset,
		strings.Join(arms, ","), b.Seeds)
}

func table(head string, rows [][]string) string {
	t := page.Markdown{Head: strings.Split(head, " | "), Rows: rows}
	t.Text = len(t.Head)
	return t.String()
}

// verdict in words.
func verdict(ok bool) string {
	if ok {
		return "reproduced"
	}
	return "**not reproduced**"
}

// weaker is the verdict where a claim holds, but by less than was published.
const weaker = "weaker than claimed"
