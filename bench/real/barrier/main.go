// Command barrier measures what a data-parallel decode barrier costs on a real
// engine, and what evenkeel's policies make of it: vLLM with a MoE model on two
// ranks, each bound to a core, so that it runs on any machine with two cores and
// Python. Placements that are pinned to ranks show the law of the step first.
// Then every policy gets the same lists of requests, in turns.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"evenkeel/bench/page"
	"evenkeel/bench/real/ranks"
	"evenkeel/bench/world"
)

func main() { world.Main("barrier", play) }

// options are the command line's.
type options struct {
	world.Options
	cache, out       string
	policies         string
	rounds, requests int
	seed             uint64
	began            time.Time
}

func (o options) logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%4.0f s  %s\n", time.Since(o.began).Seconds(), fmt.Sprintf(format, args...))
}

// play is the command. It writes what it does to standard error, and the tables
// to out.
func play(ctx context.Context, args []string, out io.Writer) (err error) {
	o := options{began: time.Now()}
	flags := o.Flags("barrier")
	flags.StringVar(&o.cache, "cache", os.Getenv("EVENKEEL_REAL_CACHE"), "folder of the installation; empty: evenkeel/real in the user's cache folder")
	flags.StringVar(&o.out, "out", "", "the page whose tables are written anew as well")
	flags.StringVar(&o.policies, "policies", "jsq,pjsq,jsq-kv,pjsq-kv,br0,brh,evenkeel", "to compare, in any order; pjsq-kv is what the others are compared with")
	flags.IntVar(&o.rounds, "rounds", 5, "how often each policy runs; 0: only the law")
	flags.IntVar(&o.requests, "requests", 100, "of a list; each takes about a sixth of a second")
	flags.Uint64Var(&o.seed, "seed", 1, "of the lists and of the order of the policies")
	if err := flags.Parse(args); err != nil {
		return err
	}
	w := &site{options: o}
	if w.World, err = world.New(ctx, "barrier", o.Options); err != nil {
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
	var save []func() error // once all is measured
	show := func(name, title string, write func(io.Writer)) {
		var text strings.Builder
		write(&text)
		fmt.Fprintf(out, "\n## %s\n\n%s", title, &text)
		save = append(save, func() error { return page.Write(o.out, "real-barrier", name, title, text.String()) })
	}
	show("law", "The law of the step", func(out io.Writer) { writeLaw(out, rows, fitted) })
	all, err := w.rounds(ctx, strings.Split(o.policies, ","))
	if err != nil {
		return err
	}
	if len(all) > 0 {
		show("policies", "The policies", func(out io.Writer) { writeRuns(out, all, o) })
		show("models", "What evenkeel learned of the step", func(out io.Writer) { writeModels(out, all, fitted) })
	}
	o.logf("logs are in %s", w.Dir)
	for _, write := range save {
		if o.out != "" {
			err = errors.Join(err, write())
		}
	}
	return err
}

// rounds plays every policy in each round on a list of the round's own, in an
// order of its own.
func (w *site) rounds(ctx context.Context, policies []string) ([][]*run, error) {
	return ranks.Rounds(w.options.rounds, len(policies), w.seed, func(round, i int) (*run, error) {
		r, err := w.play(ctx, policies[i], draw(w.seed+uint64(round), w.requests))
		if err == nil {
			w.logf("round %d: %s", round+1, r)
		}
		return r, err
	})
}
