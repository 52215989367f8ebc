// Command pictures makes the pictures of docs/img from real runs: the live page
// and the terminal view of a proxy under load while one of its ranks is down,
// and the report of a demo. What others have drawn there (bench/dashboards) it
// only makes smaller.
//
//	go run ./bench/pictures               # make pictures
//	go run ./bench/pictures -only demo
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"evenkeel/bench/process"
)

type options struct {
	out, only, binary string
	duration          time.Duration
	requests          int
}

func main() {
	var o options
	flag.StringVar(&o.out, "out", "docs/img", "folder of the pictures")
	flag.StringVar(&o.only, "only", "", "live, demo or none: the others stay as they are; empty: all")
	flag.StringVar(&o.binary, "bin", "", "the program that is shown; empty: it is built")
	flag.DurationVar(&o.duration, "duration", 280*time.Second, "of the run that the page shows; a rank goes down after six sevenths")
	flag.IntVar(&o.requests, "requests", 700, "of the demo, for each policy")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	path, err := chromium()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "evenkeel-pictures-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	if o.binary, err = process.Evenkeel(ctx, o.binary, dir); err != nil {
		return err
	}
	b, err := open(ctx, path)
	if err != nil {
		return err
	}
	defer b.close()
	for _, p := range []struct {
		name string
		make func(context.Context, options, string, *browser, io.Writer) error
	}{{"live", drawLive}, {"demo", drawDemo}} {
		if o.only == "" || o.only == p.name {
			if err := p.make(ctx, o, dir, b, out); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return shrinkAll(o.out, out)
}
