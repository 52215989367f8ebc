package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
)

// clients are how many requests are in the system: half as many again as there
// are slots, so that a policy has something to choose from.
const clients = 24

// draw is a list of requests: most prompts are short and a few are as long as
// twenty of them, so that where they lie matters.
func draw(seed uint64, n int) []ranks.Request {
	return ranks.Draw(seed, n, ranks.Lengths{Median: 400, Sigma: 1.6, Least: 32, Most: 5000},
		ranks.Lengths{Median: 60, Sigma: .6, Least: 15, Most: 200})
}

// run is what one policy made of a list.
type run struct {
	policy string
	report.Sample
	failed int
	why    error // of the first that failed
	model  stepModel
}

// What a run shows beside what its list does, of the full part.
const (
	engineLevel report.Metric = "engine_imbalance_tokens"
	engineRuns  report.Metric = "engine_running"
	engineWaits report.Metric = "engine_waiting"
	engineTop   report.Metric = "engine_fullest_tokens"
)

// play sends a list through evenkeel under a policy, always so many requests at
// once, and measures.
func (w *site) play(ctx context.Context, policy string, list []ranks.Request) (_ *run, err error) {
	if err := w.serve(ctx, policy); err != nil {
		return nil, fmt.Errorf("%s: %w", policy, err)
	}
	defer func() { err = errors.Join(err, w.proxy.End(time.Minute)) }()
	c := ranks.NewClient()
	defer c.CloseIdleConnections()
	watch := w.watch(ctx)
	p := c.Closed(ctx, w.proxy.URL(), list, clients)
	r := &run{policy: policy}
	r.Sample, r.failed, r.why = p.Measure()
	seen := watch()
	r.levels(seen, p.Full, p.Empty)
	r.model = seen.model
	return r, ctx.Err()
}
