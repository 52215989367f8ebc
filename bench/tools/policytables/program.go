// Package policytables is what the programs share that run policies side by side and write the
// tables of a page: the flags (program.go), the book that the tables are made of (book.go) and the
// traces (traces.go). Which tables there are, each program says itself.
package policytables

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

// Program is bench/claims/NAME. It writes the tables of docs/results/NAME.md.
type Program[B page.Book] struct {
	Name   string
	Seeds  int                                   // runs of a scenario, unless the run is quick
	Traces func(files []string) (*Traces, error) // reads what the policies run on (ReadTraces); nil: the program has no traces
	Blocks []page.Block[B]
	Book   func(*Book) B // makes the program's own book, which has the methods that make its tables
}

// Page is the program's page, seen from the root of the repository.
func (p Program[B]) Page() string { return "docs/results/" + p.Name + ".md" }

// Scratch is the file for tables that are not those of the page: of a quick run, or of a user's
// traces. It is not kept.
func (p Program[B]) Scratch() string { return "out/" + p.Name + ".md" }

// Target is what `make` is told to make the tables again.
func (p Program[B]) Target() string { return "claim NAME=" + p.Name }

// Options are what a user asks of a program.
type Options struct {
	Out   string // the file to write
	Quick bool
	Only  []string // names of blocks; nil is all of them
	Files []string // traces that the user gives, in place of the embedded ones
}

// Main is the program's main.
func (p Program[B]) Main() {
	testbed.Main(p.Name, func(ctx context.Context, args []string, _ io.Writer) error {
		o, err := p.parse(args)
		if err != nil {
			return err
		}
		return p.run(ctx, o)
	})
}

func (p Program[B]) parse(args []string) (o Options, err error) {
	f := flag.NewFlagSet(p.Name, flag.ContinueOnError)
	traces, more, scratch := "", "", "with --quick"
	if p.Traces != nil {
		traces, scratch = " [TRACE...]", "with --quick or TRACE"
		more = " Each TRACE is a file with\nAzure's CSV or Mooncake's JSON lines, gzipped or not. The program then uses these " +
			"traces in place\nof the two embedded ones."
	}
	f.Usage = func() {
		fmt.Fprintf(f.Output(), "usage: go run ./bench/claims/%s [--out FILE] [--quick] [--only NAMES]%s\n\n"+
			"The program writes the tables of %s between their markers.\n"+
			"If the file does not exist, the program makes it, with the tables alone.%s\n\n", p.Name, traces, p.Page(), more)
		f.PrintDefaults()
	}
	f.StringVar(&o.Out, "out", "", "the document to write (default "+p.Page()+"; "+scratch+" "+p.Scratch()+")")
	f.BoolVar(&o.Quick, "quick", false, "simulate one seed, of at most 2,500 requests of a trace, to see that the program works")
	only := f.String("only", "", "the comma-separated names of the tables to write: "+strings.Join(page.Names(p.Blocks), ", "))
	if err := testbed.Parse(f, args); err != nil {
		return o, err
	}
	if o.Files = f.Args(); p.Traces == nil && len(o.Files) > 0 {
		return o, fmt.Errorf("%q: the program takes no files", o.Files[0])
	}
	if *only != "" {
		o.Only = strings.Split(*only, ",")
	}
	if _, err := page.Choose(p.Blocks, o.Only); err != nil {
		return o, fmt.Errorf("--only %w", err)
	}
	if o.Out == "" {
		o.Out = p.Page()
		if o.Quick || len(o.Files) > 0 {
			o.Out = p.Scratch()
		}
	}
	return o, nil
}

func (p Program[B]) run(ctx context.Context, o Options) (err error) {
	b := NewBook(ctx, o, p.Seeds, os.Stderr)
	if p.Traces != nil {
		if b.Traces, err = p.Traces(o.Files); err != nil {
			return err
		}
	}
	return p.Fill(b)
}

// Fill makes the tables that the options name and, when all of them are there, writes them.
func (p Program[B]) Fill(b *Book) error {
	chosen, err := page.Choose(p.Blocks, b.Only)
	if err != nil {
		return err
	}
	for i := range chosen {
		if p.Traces != nil { // without traces, each table has its own command, or is of the whole program
			chosen[i].Tables = p.under(b.Options, chosen[i])
		}
	}
	if err := page.Fill(b.Out, p.Target(), p.Book(b), chosen); err != nil {
		return err
	}
	fmt.Fprintf(b.Progress, "%s is written\n", b.Out)
	return nil
}

// under has a block begin with the command that makes it again, on the same traces.
func (p Program[B]) under(o Options, bl page.Block[B]) func(B) string {
	line := report.Words{Text: "go run ./bench/claims/" + p.Name, Before: " "}
	line.Add(true, "--only %s", bl.Name)
	line.Add(o.Quick, "--quick")
	for _, file := range o.Files {
		line.Add(true, "%s", file)
	}
	return func(b B) string { return page.Code(line.Text) + "\n\n" + bl.Tables(b) }
}
