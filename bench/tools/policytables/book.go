package policytables

import (
	"context"
	"fmt"
	"io"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// Book is what the tables of one run are made of.
type Book struct {
	page.Runs
	Options
	Traces *Traces // nil: the program runs on none
	Most   int     // requests of a seed; 0: all there are
}

// quickRequests fill 64 ranks of 16 slots twice.
const quickRequests = 2500

// NewBook makes a book that has no traces yet. Each scenario runs with so many seeds, or with one
// if the run is quick.
func NewBook(ctx context.Context, o Options, seeds int, progress io.Writer) *Book {
	b := &Book{Options: o, Runs: page.Runs{Ctx: ctx, Seeds: seeds, Progress: progress, Done: map[string]*page.Outcome{}}}
	if o.Quick {
		b.Seeds, b.Most = 1, quickRequests
	}
	return b
}

// TPOT is how tables show the time per later token.
var TPOT = page.Column{Metric: report.TPOTP95, Title: "TPOT p95, ms", Scale: 1, Digits: 1}

// LeftOut stands in place of a table that cannot be simulated.
func LeftOut(title fmt.Stringer, why string) string {
	return fmt.Sprintf("**%s**\n\nLeft out: %s.\n", title, why)
}

// Verdicts on a claim.
const (
	Pass   = "PASS"
	Fails  = "does not reproduce"
	Weaker = "weaker than published"
)

// Verdict is a verdict in words.
func Verdict(ok bool) string {
	if ok {
		return Pass
	}
	return "**" + Fails + "**"
}
