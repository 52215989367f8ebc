package main

import (
	"flag"
	"time"

	"evenkeel/bench/rigs/testbed"
)

type options struct {
	out, only, binary string
	duration          time.Duration
	requests          int
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("pictures", flag.ContinueOnError)
	flags.StringVar(&o.out, "out", "docs/img", "folder of the pictures")
	flags.StringVar(&o.only, "only", "", "live, demo or none: the others stay as they are; empty: all")
	flags.StringVar(&o.binary, "bin", "", "the program that is shown; empty: it is built")
	flags.DurationVar(&o.duration, "duration", 280*time.Second, "of the run that the page shows; a rank goes down after six sevenths")
	flags.IntVar(&o.requests, "requests", 700, "of the demo, for each policy")
	err = testbed.Parse(flags, args)
	return o, err
}
