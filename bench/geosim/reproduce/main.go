// Command reproduce writes the tables of docs/geo.md: the claims of both papers
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
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/geosim"
	"evenkeel/bench/report"
)

func main() {
	out := flag.String("out", "docs/geo.md", "document to write")
	seeds := flag.Int("seeds", 5, "runs of every arm")
	only := flag.String("only", "", "comma-separated names of the tables to write: "+strings.Join(names(), ", "))
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *out, *seeds, *only)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "reproduce:", err)
		os.Exit(1)
	}
}

// block is a table with its place in the document.
type block struct {
	name  string
	write func(b *book) (string, error)
}

var blocks = []block{
	{"geo-default", (*book).defaults}, {"geo-model", (*book).models}, {"geo-claims", (*book).claims}, {"geo-arms", (*book).arms}, {"geo-sweeps", (*book).sweeps},
	{"geo-cost", (*book).cost}, {"geo-faults", (*book).faults},
}

func names() []string {
	all := make([]string, len(blocks))
	for i := range blocks {
		all[i] = blocks[i].name
	}
	return all
}

func run(ctx context.Context, path string, seeds int, only string) error {
	if seeds < 1 {
		return fmt.Errorf("-seeds %d: at least 1", seeds)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	page := string(text)
	b := &book{ctx: ctx, seeds: seeds, runs: map[key]report.Metrics{}}
	wanted := blocks
	if only != "" {
		wanted = nil
		for name := range strings.SplitSeq(only, ",") {
			at := -1
			for i := range blocks {
				if blocks[i].name == name {
					at = i
				}
			}
			if at < 0 {
				return fmt.Errorf("-only %s: there are %s", name, strings.Join(names(), ", "))
			}
			wanted = append(wanted, blocks[at])
		}
	}
	for _, bl := range wanted {
		table, err := bl.write(b)
		if err != nil {
			return fmt.Errorf("table %s: %w", bl.name, err)
		}
		if page, err = put(page, bl.name, table); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return os.WriteFile(path, []byte(page), 0o644)
}

// put sets a table between its markers.
func put(page, name, table string) (string, error) {
	opening, closing := "<!-- "+name+": written by `make reproduce-geo` -->\n", "<!-- end of "+name+" -->\n"
	before, rest, found := strings.Cut(page, opening)
	_, after, closed := strings.Cut(rest, closing)
	if !found || !closed {
		return "", fmt.Errorf("no place for a table: put the lines %q and %q there", strings.TrimSpace(opening), strings.TrimSpace(closing))
	}
	return before + opening + strings.TrimSpace(table) + "\n" + closing + after, nil
}

// book has all that was simulated, each once.
type book struct {
	ctx   context.Context
	seeds int
	runs  map[key]report.Metrics
}

type key struct{ scenario, preset, arm string }

// need simulates what is missing. A scenario may be a variant: "skew, twice the
// clients".
func (b *book) need(scenario, preset string, arms ...string) error {
	var missing []string
	for _, a := range arms {
		if _, done := b.runs[key{scenario, preset, a}]; !done {
			missing = append(missing, a)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	name, other, _ := strings.Cut(scenario, ", ")
	sc, err := geosim.Named(name, preset)
	if err != nil {
		return err
	}
	for i := range variants {
		if variants[i].name == other {
			variants[i].change(sc)
		}
	}
	began := time.Now()
	runs, err := (&geosim.Plan{Scenario: sc, Arms: missing, Seeds: b.seeds}).Run(b.ctx)
	if err != nil {
		return err
	}
	for i, r := range runs {
		b.runs[key{scenario, preset, missing[i]}] = r.Metrics
	}
	fmt.Fprintf(os.Stderr, "%s on %s: %d arms in %.1f s\n", scenario, preset, len(missing), time.Since(began).Seconds())
	return nil
}

// of is a mean; what was not simulated before is a bug.
func (b *book) of(scenario, preset, arm string, m report.Metric) float64 {
	metrics, ok := b.runs[key{scenario, preset, arm}]
	if !ok {
		panic("not simulated: " + scenario + " " + preset + " " + arm)
	}
	return metrics[m].Mean
}

// ratio of a metric under one arm to that under another.
func (b *book) ratio(scenario, preset, arm, other string, m report.Metric) float64 {
	return b.of(scenario, preset, arm, m) / b.of(scenario, preset, other, m)
}

// span is how ratios lie.
type span struct{ least, most float64 }

func newSpan() span { return span{1e18, -1e18} }

func (s *span) add(v float64) { s.least, s.most = min(s.least, v), max(s.most, v) }

func (s span) String() string { return fmt.Sprintf("%.2f to %.2f", s.least, s.most) }

// command makes a table's numbers again.
func (b *book) command(scenario, preset string, arms ...string) string {
	return fmt.Sprintf("`evenkeel simulate --tier geo --scenario %s --preset %s --policies %s --seeds %d`", scenario, preset, strings.Join(arms, ","), b.seeds)
}

func table(head string, rows [][]string) string {
	var out strings.Builder
	out.WriteString("| " + head + " |\n|" + strings.Repeat("---|", strings.Count(head, "|")+1) + "\n")
	for _, r := range rows {
		out.WriteString("| " + strings.Join(r, " | ") + " |\n")
	}
	return out.String()
}

// verdict in words.
func verdict(ok bool) string {
	if ok {
		return "reproduced"
	}
	return "**not reproduced**"
}
