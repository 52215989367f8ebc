// Command aggregated measures a real engine whose ranks prefill and decode, and what evenkeel makes of it by sending prompts
// in rounds: vLLM with a MoE model on two data-parallel ranks, each bound to a core, so that it runs on any machine with two
// cores and Python. First a prompt on one rank delays the tokens of the other, which shows the law of the step. Then every
// policy gets the same lists of requests, in turns, and so does vLLM's own balancing.
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
	"evenkeel/bench/world"
)

func main() { world.Main("aggregated", play) }

// options are the command line's.
type options struct {
	world.Options
	cache, out       string
	policies         string
	rounds, requests int
	repeats          int
	load             float64
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
	flags := o.Flags("aggregated")
	flags.StringVar(&o.cache, "cache", os.Getenv("EVENKEEL_REAL_CACHE"), "folder of the installation; empty: evenkeel/real in the user's cache folder")
	flags.StringVar(&o.out, "out", "", "the page whose tables are written anew as well")
	flags.StringVar(&o.policies, "policies", "rr,"+theirs+","+reference+",evenkeel", "to compare, in any order; "+theirs+" is vLLM's own balancing, and "+reference+
		" is what the others are compared with")
	flags.IntVar(&o.rounds, "rounds", 5, "how often each policy runs on a list of each kind; 0: only the delay and the law")
	flags.IntVar(&o.requests, "requests", 100, "of a list; each takes about a third of a second")
	flags.IntVar(&o.repeats, "repeats", 5, "how often the delay by each prompt is measured")
	flags.Float64Var(&o.load, "load", 0.75, "of the open lists, as a share of the requests per second that "+reference+" serves of the closed ones")
	flags.Uint64Var(&o.seed, "seed", 1, "of the lists and of the order of the policies")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.requests <= clients {
		return fmt.Errorf("-requests is %d; a closed loop has %d at any time, so use more", o.requests, clients)
	}
	w := &site{options: o}
	if w.World, err = world.New(ctx, "aggregated", o.Options); err != nil {
		return err
	}
	defer func() { _ = w.Close(false) }()
	if err := w.build(ctx); err != nil {
		return err
	}
	var save []func() error // once all is measured
	show := func(name, title string, write func(io.Writer)) {
		var text strings.Builder
		write(&text)
		fmt.Fprintf(out, "\n## %s\n\n%s", title, &text)
		save = append(save, func() error { return page.Write(o.out, "real-aggregated", name, title, text.String()) })
	}
	delays, err := w.delays(ctx)
	if err != nil {
		return err
	}
	show("delay", "What a prompt costs the other rank", func(out io.Writer) { writeDelays(out, delays) })
	if err := w.learn(ctx); err != nil {
		return err
	}
	closed, open, err := w.compare(ctx)
	if err != nil {
		return err
	}
	all, err := w.allSteps()
	if err != nil {
		return err
	}
	show("law", "The law of the step", func(out io.Writer) { writeLaws(out, w.law, fit(all)) })
	if o.rounds > 0 {
		show("closed", "A closed loop", func(out io.Writer) { writeRuns(out, closed, o) })
		show("open", "An open loop", func(out io.Writer) { writeRuns(out, open, o) })
	}
	o.logf("logs are in %s", w.Dir)
	for _, write := range save {
		if o.out != "" {
			err = errors.Join(err, write())
		}
	}
	return err
}
