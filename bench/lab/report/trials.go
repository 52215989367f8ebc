package report

import (
	"context"
	"runtime"
	"sync"
)

// Trials tries every policy on every seed, the first of which is 1, as many at once
// as there are processors. All policies of a seed come first: a run that is cut short
// compares like with like. progress, unless it is nil, is told how many are done, one
// call at a time. What each gave stands under its policy, in the order of the seeds.
func Trials[T any](ctx context.Context, policies, seeds int, progress func(done, total int),
	try func(ctx context.Context, policy int, seed uint64) (T, error),
) ([][]T, error) {
	all := make([][]T, policies)
	for i := range all {
		all[i] = make([]T, seeds)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var workers sync.WaitGroup
	var mu sync.Mutex // of done and of all
	done, total := 0, policies*seeds
	for range min(runtime.GOMAXPROCS(0), total) {
		workers.Go(func() {
			for i := range next {
				policy, seed := i%policies, i/policies
				got, err := try(ctx, policy, uint64(seed)+1)
				if err != nil {
					cancel(err)
					continue
				}
				mu.Lock()
				all[policy][seed] = got
				if done++; progress != nil {
					progress(done, total)
				}
				mu.Unlock()
			}
		})
	}
	for i := range total {
		if ctx.Err() != nil {
			break
		}
		next <- i
	}
	close(next)
	workers.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return all, nil
}

// RunsOf sums up what Trials gave, a run for each policy.
func RunsOf(policies []string, samples [][]Sample) (runs []Run) {
	for i, p := range policies {
		runs = append(runs, Run{Policy: p, Seeds: len(samples[i]), Metrics: Summarize(samples[i]...)})
	}
	return runs
}
