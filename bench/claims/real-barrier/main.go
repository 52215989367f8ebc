// Command barrier measures what a data-parallel decode barrier costs on a real
// engine, and what evenkeel's policies make of it: vLLM with a MoE model on two
// ranks, each bound to a core, so that it runs on any machine with two cores and
// Python. Placements that are pinned to ranks show the law of the step first.
// Then every policy gets the same lists of requests, in turns.
package main

import (
	"context"
	"io"
	"strings"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
)

func main() {
	testbed.Main("real-barrier", testbed.Page(play, []string{"-out", "docs/results/real-barrier.md"}))
}

// options are the command line's.
type options struct {
	ranks.Options
	policies string
}

// play is the command. It writes what it does to standard error, and the tables
// to out.
func play(ctx context.Context, args []string, out io.Writer) (err error) {
	var o options
	flags := o.Flags("barrier")
	flags.StringVar(&o.policies, "policies", "jsq,pjsq,jsq-kv,pjsq-kv,br0,brh,evenkeel",
		"to compare, in any order; "+reference+" is what the others are compared with")
	flags.IntVar(&o.Requests, "requests", 100, "of a list; each takes about a sixth of a second")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	w := &site{options: o}
	if w.World, err = testbed.New(ctx, "barrier", o.Options.Options); err != nil {
		return err
	}
	defer func() { _ = w.Close(false) }()
	if err := w.build(ctx); err != nil {
		return err
	}
	rows, err := w.law(ctx, 3)
	if err != nil {
		return err
	}
	fitted := fitLaw(rows)
	tables := ranks.Tables{Out: out, Target: "claim NAME=real-barrier"}
	tables.Show("law", "The law of the step", func(out io.Writer) { writeLaw(out, rows, fitted) })
	all, err := w.rounds(ctx, strings.Split(o.policies, ","))
	if err != nil {
		return err
	}
	if len(all) > 0 {
		tables.Show("policies", "The policies", func(out io.Writer) { writeRuns(out, all, o) })
		tables.Show("models", "What evenkeel learned of the step", func(out io.Writer) { writeModels(out, all, fitted) })
	}
	o.Logf("logs are in %s", w.Dir)
	return tables.Save(o.Out)
}

// rounds plays every policy in each round on a list of the round's own, in an
// order of its own.
func (w *site) rounds(ctx context.Context, policies []string) ([][]*run, error) {
	return ranks.Rounds(w.Rounds, len(policies), w.Seed, func(round, i int) (*run, error) {
		r, err := w.play(ctx, policies[i], draw(w.Seed+uint64(round), w.Requests))
		if err == nil {
			w.Logf("round %d: %s", round+1, r)
		}
		return r, err
	})
}
