// Command pictures makes the pictures of docs/img from real runs: the live page
// and the terminal view of a proxy under load while one of its ranks is down,
// and the report of a demo. What others have drawn there (bench/tools/dashboards) it
// only makes smaller.
//
//	go run ./bench/tools/pictures               # make pictures
//	go run ./bench/tools/pictures -only demo
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/browser"
)

type options struct {
	out, only, binary string
	duration          time.Duration
	requests          int
}

func main() { testbed.Main("pictures", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("pictures", flag.ContinueOnError)
	flags.StringVar(&o.out, "out", "docs/img", "folder of the pictures")
	flags.StringVar(&o.only, "only", "", "live, demo or none: the others stay as they are; empty: all")
	flags.StringVar(&o.binary, "bin", "", "the program that is shown; empty: it is built")
	flags.DurationVar(&o.duration, "duration", 280*time.Second, "of the run that the page shows; a rank goes down after six sevenths")
	flags.IntVar(&o.requests, "requests", 700, "of the demo, for each policy")
	if err := flags.Parse(args); err != nil {
		return err
	}
	path, err := browser.Chromium()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	w, err := testbed.New(ctx, "pictures", testbed.Options{Bin: o.binary})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close(true)) }()
	b, err := browser.Open(ctx, path)
	if err != nil {
		return err
	}
	defer b.Close()
	for _, p := range []struct {
		name string
		make func(context.Context, options, *testbed.World, *browser.Browser, io.Writer) error
	}{{"live", drawLive}, {"demo", drawDemo}} {
		if o.only == "" || o.only == p.name {
			if err := p.make(ctx, o, w, b, out); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return browser.Shrink(o.out, out)
}
