// Command rounds says what it is worth to hold prompts until several ranks compute one in the same
// steps: loads whose every property is drawn are served by virtual ranks that prefill and decode
// behind one barrier, under policies that know the same. The same seeds give the same tables to the
// bit.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/mixed"
	"evenkeel/bench/tools/page"
)

type options struct {
	seeds []uint64
	loads int
	only  int
	out   string
}

func main() {
	testbed.Main("rounds", testbed.Page(testbed.Parsed(parse, options.run), []string{"-out", "docs/results/rounds.md"}))
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("rounds", flag.ContinueOnError)
	seeds := f.String("seeds", "1,2,20261129", "of the loads, separated by commas; each gives a table of its own")
	f.IntVar(&o.loads, "loads", 32, "how many of each seed")
	f.IntVar(&o.only, "load", -1, "number of the only load that is served, of the first seed, with a line for each policy; -1: all are")
	f.StringVar(&o.out, "out", "", "document to write the tables into; empty: they are printed")
	if err := testbed.Parse(f, args); err != nil {
		return o, err
	}
	for _, text := range strings.Split(*seeds, ",") {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return o, fmt.Errorf("-seeds %s: %q is no seed; write numbers with commas between them", *seeds, text)
		}
		o.seeds = append(o.seeds, n)
	}
	if o.loads < 1 {
		return o, fmt.Errorf("-loads %d: there must be one", o.loads)
	}
	return o, nil
}

func (o options) run(ctx context.Context, out io.Writer) error {
	if o.only >= 0 {
		return o.one(ctx, out)
	}
	var all []*trials
	for _, seed := range o.seeds {
		t, err := try(ctx, seed, o.loads, os.Stderr)
		if err != nil {
			return err
		}
		all = append(all, t)
	}
	return page.Show(out, o.out, "claim NAME=rounds", "rounds", "Prompts in rounds", o.tables(all))
}

// one prints what each policy makes of one load.
func (o options) one(ctx context.Context, out io.Writer) error {
	l := mixed.Draw(o.seeds[0], o.only)
	fmt.Fprintf(out, "load %s\n", l)
	for _, p := range policies() {
		got, err := mixed.Serve(ctx, l, p)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%-34s %8.1f tokens/s, TTFT %8.0f ms, p99 %8.0f, TPOT %6.1f, p95 %6.1f, prefill in %3.0f %% of steps, %3.0f %% of "+
			"ranks empty in them\n",
			p.Name, got.Tokens, got.TTFT, got.TTFT99, got.TPOT50, got.TPOT95, 100*got.Prefill, 100*got.Empty)
	}
	return nil
}

// try runs all policies on all loads, as many loads at once as there are processors.
func try(ctx context.Context, seed uint64, loads int, progress io.Writer) (*trials, error) {
	t := &trials{seed: seed, policies: policies()}
	for i := range loads {
		t.loads = append(t.loads, mixed.Draw(seed, i))
	}
	of, err := report.Trials(ctx, loads, 1, func(done, total int) { fmt.Fprintf(progress, "seed %d, %d of %d loads\n", seed, done, total) },
		func(ctx context.Context, i int, _ uint64) (all []mixed.Outcome, err error) {
			for _, p := range t.policies {
				got, err := mixed.Serve(ctx, t.loads[i], p)
				if err != nil {
					return nil, fmt.Errorf("load %s: %w", t.loads[i], err)
				}
				all = append(all, got)
			}
			return all, nil
		})
	for i := range of {
		t.of = append(t.of, of[i][0])
	}
	return t, err
}
