// Command bind says what it costs to bind a request to a decode rank before its prefill, as some
// connectors want it, and what of the gain over a balance by KV tokens is kept: the same requests
// in the barrier simulator, bound late and at arrival, with prefills that take more and more steps.
// The same program gives the same figures to the bit.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

// options are what is run.
type options struct {
	parts   []part
	samples string
	out     string
}

func main() {
	testbed.Main("bind", testbed.Page(func(ctx context.Context, args []string, out io.Writer) error {
		o, err := parse(args)
		if err != nil {
			return err
		}
		return o.run(ctx, out, os.Stderr)
	}, []string{"-samples", "bench/out/bind.jsonl", "-out", "docs/results/bind.md"}))
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("bind", flag.ContinueOnError)
	p := usual[0]
	traces := f.String("traces", strings.Join(p.traces, ","), "traces: mooncake, azure, or synth:NAME")
	ranks := f.String("ranks", list(p.ranks), "decode ranks behind one barrier")
	slots := f.String("slots", list(p.slots), "slots a rank")
	loads := f.String("loads", strings.Join(p.loads, ","), "closed, or the share of what the ranks could serve if they were level")
	steps := f.String("steps", list(p.steps), "lengths of a prefill, in mean steps")
	f.IntVar(&p.seeds, "seeds", p.seeds, "runs of each")
	f.IntVar(&p.requests, "requests", p.requests, "of a run; 0: as many as the ranks need")
	f.StringVar(&o.samples, "samples", "", "file that every run is written to, and those that it has are not run again; empty: none")
	f.StringVar(&o.out, "out", "",
		"page whose verdicts are written, with a CSV of all figures beside it and plots in the folder img beside its folder; "+
			"empty: verdicts and CSV are printed")
	if err := testbed.Parse(f, args); err != nil {
		return o, err
	}
	another := false
	f.Visit(func(f *flag.Flag) { another = another || f.Name != "out" && f.Name != "samples" })
	if o.parts = usual; !another {
		return o, nil
	}
	p.traces, p.loads = strings.Split(*traces, ","), strings.Split(*loads, ",")
	if p.ranks, err = numbers(*ranks, strconv.Atoi); err != nil {
		return o, fmt.Errorf("-ranks: %w", err)
	}
	if p.slots, err = numbers(*slots, strconv.Atoi); err != nil {
		return o, fmt.Errorf("-slots: %w", err)
	}
	number := func(text string) (float64, error) { return strconv.ParseFloat(text, 64) }
	if p.steps, err = numbers(*steps, number); err != nil {
		return o, fmt.Errorf("-steps: %w", err)
	}
	o.parts = []part{p}
	return o, nil
}

func list[N int | float64](all []N) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(all), "[]"), " ", ",")
}

func numbers[N int | float64](list string, read func(string) (N, error)) (all []N, err error) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := read(text)
		if err != nil {
			return nil, err
		}
		if n < 0 {
			return nil, fmt.Errorf("%v is negative", n)
		}
		all = append(all, n)
	}
	return all, nil
}

// run runs what is not in the file of samples yet, and writes what was found. One that is ended
// writes what there is.
func (o options) run(ctx context.Context, out, progress io.Writer) (err error) {
	s, err := openSamples(o.samples)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	cells := o.cells()
	missing, err := s.fill(ctx, cells, progress)
	if err != nil && ctx.Err() == nil {
		return err
	}
	b := &book{options: o, samples: s, scenarios: o.scenarios(), runs: len(cells), missing: missing}
	if err := b.write(out); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// fill runs the cells that are missing, one after the other, and returns how many still are.
func (s *samples) fill(ctx context.Context, cells []cell, progress io.Writer) (missing int, err error) {
	if err := s.check(ctx, cells); err != nil {
		return len(cells), err
	}
	for _, c := range cells {
		if _, ok := s.of[c]; !ok {
			missing++
		}
	}
	all := missing
	for _, c := range cells {
		if _, ok := s.of[c]; ok {
			continue
		}
		m, err := c.run(ctx, s)
		if err != nil {
			return missing, fmt.Errorf("%v: %w", c, err)
		}
		if err := s.add(c, m); err != nil {
			return missing, err
		}
		missing--
		fmt.Fprintf(progress, "%d of %d: %s, %d x %d, %s, seed %d, prefills of %g steps, %s\n", all-missing, all, c.Trace, c.Ranks, c.Slots,
			c.Load, c.Seed, c.Steps, c.Arm)
	}
	return missing, nil
}

// write puts what was found into the page, and writes the CSV beside it and the figures, or prints
// all but these.
func (b *book) write(out io.Writer) error {
	if b.out == "" {
		_, err := fmt.Fprintf(out, "%s\n%s", b.found(), b.csv())
		return err
	}
	pictures := filepath.Join(filepath.Dir(b.out), "..", "img")
	if err := os.MkdirAll(pictures, 0o755); err != nil {
		return err
	}
	for _, f := range figures {
		picture, err := b.draw(f)
		if err != nil {
			return err
		}
		if err := report.Replace(filepath.Join(pictures, f.file), picture); err != nil {
			return err
		}
	}
	if err := page.Write(b.out, "claim NAME=bind", "bind", "What was asked, and what came out", b.found()); err != nil {
		return err
	}
	return report.Replace(strings.TrimSuffix(b.out, ".md")+".csv", b.csv())
}
