// Command reproduce writes the tables of docs/results/decode-policies.md: policies side by side
// on real and drawn traces in the barrier simulator, what BalanceRoute says they
// should show, and how good the predictors are; with --tier prefill those of
// docs/results/prefill-policies.md. Other traces of the same formats may be given in place of the
// two embedded ones.
//
// The same program gives the same tables to the bit; nothing outside the marked
// parts of the document changes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// Where tables go: our own document, or, when it is not about our traces at full
// length, a file that is not kept.
const (
	document        = "docs/results/decode-policies.md"
	scratch         = "out/reproduce.md"
	prefillDocument = "docs/results/prefill-policies.md"
	prefillScratch  = "out/reproduce-prefill.md"
)

type options struct {
	tier   string // decode or prefill
	out    string
	quick  bool
	only   []string // blocks; nil: all
	traces []string
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // flag has said why
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, o, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "reproduce:", err)
		os.Exit(1)
	}
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("reproduce", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, "usage: go run ./bench/claims/decode-policies [--tier decode|prefill] [--out FILE] [--quick] [--only NAMES] [TRACE...]\n\n"+
			"Writes the tables of %s or %s between their markers. A file that is not there is made, with\n"+
			"the tables alone. TRACE is Azure CSV or Mooncake JSON lines, gzipped or not, in place of the\n"+
			"two embedded ones.\n\n", document, prefillDocument)
		f.PrintDefaults()
	}
	f.StringVar(&o.tier, "tier", "decode", "whose tables: decode or prefill")
	f.StringVar(&o.out, "out", "", "document to write (default "+document+" or "+prefillDocument+"; below out/ with --quick or TRACE)")
	f.BoolVar(&o.quick, "quick", false, "one seed of 2,500 requests and fewer sizes, to see that it works")
	only := f.String("only", "", "comma-separated names of the tables to write: "+strings.Join(page.Names(blocks), ", ")+
		"; of prefill "+strings.Join(page.Names(prefillBlocks), ", "))
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.traces = f.Args()
	if o.tier != "decode" && o.tier != "prefill" {
		err := fmt.Errorf("--tier %s: there are decode and prefill", o.tier)
		fmt.Fprintln(stderr, err)
		return o, err
	}
	if *only != "" {
		o.only = strings.Split(*only, ",")
	}
	if _, err := page.Choose(o.blocks(), o.only); err != nil {
		err = fmt.Errorf("--only %w", err)
		fmt.Fprintln(stderr, err)
		return o, err
	}
	if o.out == "" {
		ours, another := document, scratch
		if o.tier == "prefill" {
			ours, another = prefillDocument, prefillScratch
		}
		o.out = ours
		if o.quick || len(o.traces) > 0 {
			o.out = another
		}
	}
	return o, nil
}

// blocks are those of the tier.
func (o options) blocks() []page.Block[*book] {
	if o.tier == "prefill" {
		return prefillBlocks
	}
	return blocks
}

// target is what `make` calls the tables of the tier.
func (o options) target() string {
	if o.tier == "prefill" {
		return "reproduce-prefill"
	}
	return "reproduce"
}

// run makes the tables and, when all are there, writes them.
func run(ctx context.Context, o options, progress io.Writer) error {
	b, err := newBook(ctx, o, progress)
	if err != nil {
		return err
	}
	return b.fill(o.out, o.only)
}

// fill writes blocks into a document; nil is all of them.
func (b *book) fill(path string, only []string) error {
	chosen, err := page.Choose(b.opts.blocks(), only)
	if err != nil {
		return err
	}
	for i := range chosen {
		chosen[i].Tables = b.under(chosen[i])
	}
	if err := page.Fill(path, b.opts.target(), b, chosen); err != nil {
		return err
	}
	fmt.Fprintf(b.Progress, "%s written\n", path)
	return nil
}

// under has a block begin with the command that makes it again.
func (b *book) under(bl page.Block[*book]) func(*book) string {
	line := report.Words{Text: "go run ./bench/claims/decode-policies", Before: " "}
	line.Add(b.opts.tier == "prefill", "--tier prefill")
	line.Add(true, "--only %s", bl.Name)
	line.Add(b.opts.quick, "--quick")
	for _, t := range b.opts.traces {
		line.Add(true, "%s", t)
	}
	return func(b *book) string { return page.Code(line.Text) + "\n\n" + bl.Tables(b) }
}
