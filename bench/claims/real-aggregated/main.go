// Command aggregated measures a real engine whose ranks prefill and decode, and what evenkeel makes
// of it by sending prompts in rounds: vLLM with a MoE model on two data-parallel ranks, each bound
// to a core, so that it runs on any machine with two cores and Python. First a prompt on one rank
// delays the tokens of the other, which shows the law of the step. Then every policy gets the same
// lists of requests, in turns, and so does vLLM's own balancing.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
)

func main() {
	testbed.Main("real-aggregated", testbed.Page(func(ctx context.Context, args []string, out io.Writer) error {
		if slices.Equal(args, rows) { // bench/rigs/real compares the answers of such engines, for the same page
			of := exec.CommandContext(ctx, "go", append([]string{"run", "./bench/rigs/real"}, args...)...)
			of.Stdout, of.Stderr = out, os.Stderr
			return of.Run()
		}
		return play(ctx, args, out)
	}, rows, []string{"-out", document}))
}

const document = "docs/results/real-aggregated.md"

var rows = []string{"-connector", "none", "-out", document}

// options are the command line's.
type options struct {
	ranks.Options
	policies string
	repeats  int
	load     float64
	survey   bool
	short    bool // only a short trial
	report   string
}

// play is the command. It writes what it does to standard error, and the tables
// to out.
func play(ctx context.Context, args []string, out io.Writer) (err error) {
	var o options
	flags := o.Flags("aggregated")
	flags.StringVar(&o.policies, "policies", "rr,"+theirs+",jsq-kv,evenkeel", "to compare, in any order; "+theirs+
		" is vLLM's own balancing, with which the others are compared")
	flags.IntVar(&o.Requests, "requests", 60, "of a list; each takes about a third of a second")
	flags.IntVar(&o.repeats, "repeats", 5, "how often the delay by each prompt is measured")
	flags.Float64Var(&o.load, "load", 0.75,
		"of the open lists, as a share of the requests per second that "+theirs+" serves of the closed ones")
	flags.BoolVar(&o.survey, "survey", false, "only: what evenkeel survey sees of the engine")
	flags.BoolVar(&o.short, "trial", false, "only: evenkeel survey --trial in its short form, against one engine: about five minutes")
	flags.StringVar(&o.report, "report", "", "the file to which its report goes, as evenkeel survey --out writes it")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if o.Requests <= clients {
		return fmt.Errorf("-requests is %d; a closed loop has %d at any time, so use more", o.Requests, clients)
	}
	w := &site{options: o}
	if w.World, err = testbed.New(ctx, "aggregated", o.Options.Options); err != nil {
		return err
	}
	defer func() { _ = w.Close(false) }()
	if err := w.build(ctx); err != nil {
		return err
	}
	if o.short {
		return w.trial(ctx, out)
	}
	tables := ranks.Tables{Out: out, Target: "claim NAME=real-aggregated"}
	seen, err := w.survey(ctx)
	if err != nil {
		return err
	}
	tables.Show("survey", "What a survey sees", func(out io.Writer) { writeSurvey(out, seen) })
	if o.survey {
		return tables.Save(o.Out)
	}
	delays, err := w.delays(ctx)
	if err != nil {
		return err
	}
	tables.Show("delay", "What a prompt costs the other rank", func(out io.Writer) { writeDelays(out, delays) })
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
	tables.Show("law", "The law of the step", func(out io.Writer) { writeLaws(out, w.law, fit(all)) })
	if o.Rounds > 0 {
		tables.Show("closed", "A closed loop", func(out io.Writer) { writeRuns(out, closed, o) })
		tables.Show("open", "An open loop", func(out io.Writer) { writeRuns(out, open, o) })
	}
	o.Logf("logs are in %s", w.Dir)
	return tables.Save(o.Out)
}
