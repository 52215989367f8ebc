// Command chaos runs the real proxy, a process of its own, in front of reference
// engines that fail, die and come back, under clients that check every token
// and operators who change what they can. Then it stops the trouble, waits
// until nothing is under way and holds that nothing was lost, leaked or mixed
// up. A breach is told in full and is exit code 1.
//
// What happens when is drawn from -seed; the machine decides the rest, so a
// seed repeats the plan, not the run.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("chaos", testbed.Judged(run)) }

// run is the command; ok says that no invariant was broken.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	var o options
	flags := o.Flags("chaos")
	name := flags.String("scenario", "mixed", "one of "+strings.Join(names(), ", "))
	flags.DurationVar(&o.duration, "duration", 0, "of the trouble; 0: as the scenario has it")
	flags.IntVar(&o.count, "count", 0, "of requests, instead of a duration; 0: as the scenario has it")
	flags.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano())%1_000_000, "of the plan")
	flags.Float64Var(&o.rate, "rate", 0, "share of the engines' requests that a fault strikes; 0: as the scenario has it")
	flags.Func("connector", "of the engines, instead of the scenario's: "+strings.Join(connectors(), ", "), o.speak)
	flags.IntVar(&o.loops, "event-loops", 0, "the proxy's event_loops; -1: each answer has a goroutine")
	flags.StringVar(&o.record, "record", "", "file for what happens to each request, for go test ./gateway/lifecycle -recording; what its "+
		"fleet is told is beside it in FILE.rosters, for go test ./gateway/recording -rosters; the proxy is built for it")
	flags.BoolVar(&o.race, "race", false, "build the proxy with the race detector")
	asJSON := flags.Bool("json", false, "print the report as JSON")
	if err := testbed.Parse(flags, args); err != nil {
		return false, err
	}
	if o.duration < 0 || o.count < 0 || !(o.rate >= 0) {
		return false, errors.New("-duration, -count and -rate cannot be negative; 0 leaves each as the scenario has it")
	}
	s, err := scenarioOf(*name)
	if err != nil {
		return false, err
	}
	s.duration, s.count, s.rate, s.connector = cmp.Or(o.duration, s.duration), cmp.Or(o.count, s.count), cmp.Or(o.rate, s.rate),
		cmp.Or(o.connector, s.connector)
	if o.record != "" {
		if o.Bin != "" {
			return false, errors.New("only a proxy that is built for it records: leave -bin out")
		}
		if o.record, err = filepath.Abs(o.record); err != nil {
			return false, err
		}
	}
	if !*asJSON {
		fmt.Fprintf(out, "scenario %s, connector %s, seed %d\n", s.name, s.connector, o.seed)
	}
	r, err := play(ctx, s, o)
	if err != nil {
		return false, err
	}
	if *asJSON {
		err = r.writeJSON(out)
	} else {
		err = r.writeTable(out)
	}
	return len(r.Breaches) == 0, err
}
