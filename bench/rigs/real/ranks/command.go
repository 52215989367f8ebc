package ranks

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

// Options are those of a command that plays policies in rounds before such an engine.
type Options struct {
	testbed.Options
	Cache, Out       string
	Rounds, Requests int
	Seed             uint64

	began time.Time
}

// Flags are a command's flags, with those of its options.
func (o *Options) Flags(name string) *flag.FlagSet {
	o.began = time.Now()
	flags := o.Options.Flags(name)
	flags.StringVar(&o.Cache, "cache", os.Getenv("EVENKEEL_REAL_CACHE"),
		"folder of the installation; empty: evenkeel/real in the user's cache folder")
	flags.StringVar(&o.Out, "out", "", "the page whose tables are written anew as well")
	flags.IntVar(&o.Rounds, "rounds", 5, "how often each policy runs; 0: only the law")
	flags.Uint64Var(&o.Seed, "seed", 1, "of the lists and of the order of the policies")
	return flags
}

// Logf tells on standard error what the command does.
func (o *Options) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%4.0f s  %s\n", time.Since(o.began).Seconds(), fmt.Sprintf(format, args...))
}

// Tables are what a command prints, and what it writes into its page once everything is measured.
type Tables struct {
	Out    io.Writer
	Target string // what `make` is told to make them again
	blocks []block
}

type block struct{ name, title, text string }

// Show prints the tables of a block.
func (t *Tables) Show(name, title string, write func(io.Writer)) {
	var text strings.Builder
	write(&text)
	fmt.Fprintf(t.Out, "\n## %s\n\n%s", title, &text)
	t.blocks = append(t.blocks, block{name, title, text.String()})
}

// Save writes the blocks into a page; "" is none.
func (t *Tables) Save(file string) (err error) {
	if file == "" {
		return nil
	}
	for _, b := range t.blocks {
		err = errors.Join(err, page.Write(file, t.Target, b.name, b.title, b.text))
	}
	return err
}

// Samples are what runs measured, by rounds.
func Samples[R any](rounds [][]R, of func(R) report.Sample) [][]report.Sample {
	all := make([][]report.Sample, len(rounds))
	for i, round := range rounds {
		for _, r := range round {
			all[i] = append(all[i], of(r))
		}
	}
	return all
}
