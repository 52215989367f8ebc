package testbed

import (
	"context"
	"errors"
	"math"
	"sync"

	"evenkeel/bench/lab/load"
)

// Drive runs loads side by side while act happens; nil is no act. It waits for the end of all, and
// returns what each load showed. A load with neither a count nor a duration goes on until act and
// all other loads have ended. An error of act ends all loads at once.
func Drive(ctx context.Context, act func() error, loads ...load.Config) ([]*load.Result, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	endless, end := context.WithCancel(ctx)
	defer end()
	results, errs := make([]*load.Result, len(loads)), make([]error, len(loads)+1)
	var bounded, others sync.WaitGroup
	for i, c := range loads {
		c.KeepFailures = math.MaxInt // a tally needs every one
		if c.Count > 0 || c.Duration > 0 {
			bounded.Go(func() { results[i], errs[i] = load.Run(ctx, c) })
			continue
		}
		c.Duration = math.MaxInt64
		others.Go(func() { results[i], errs[i] = load.Run(endless, c) })
	}
	if act != nil {
		if err := act(); err != nil {
			errs[len(loads)] = err
			stop()
		}
	}
	bounded.Wait()
	end()
	others.Wait()
	return results, errors.Join(errs...)
}
