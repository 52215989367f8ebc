package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
)

// budget is how many tokens of a rank a step computes.
const budget = 512

// intervals are the engine's --prefill-schedule-interval: each has an engine of its own. An engine
// without requests computes nothing, so that both can run on the same cores.
var intervals = [...]int{1, 2}

// site is the engines, and evenkeel in front of them.
type site struct {
	*testbed.World
	options
	engines [len(intervals)]*vllm.Engine
	law     law // that was measured first, and that evenkeel gets
}

// build starts the engines, one after the other, and waits until they answer.
func (w *site) build(ctx context.Context) error {
	in, err := vllm.Install(ctx, w.Cache, os.Stderr)
	if err != nil {
		return err
	}
	for i, interval := range intervals {
		if w.short && i > 0 {
			return nil
		}
		began := time.Now()
		w.Logf("an engine starts: one to five minutes")
		e, err := ranks.Start(ctx, w.World, in, w.name(i), "--max-num-batched-tokens", fmt.Sprint(budget), "--prefill-schedule-interval",
			fmt.Sprint(interval))
		if err != nil {
			return err
		}
		w.engines[i] = e
		if err := e.Ready(ctx, 10*time.Minute); err != nil {
			return err
		}
		w.Logf("the engine with interval %d answers after %.0f s", interval, time.Since(began).Seconds())
	}
	return nil
}

// name is that of an engine's files.
func (w *site) name(engine int) string { return fmt.Sprintf("interval%d", intervals[engine]) }

// steps are all that an engine has made so far.
func (w *site) steps(engine int) ([]step, error) {
	var logs [ranks.Count][]byte
	for rank := range logs {
		text, err := os.ReadFile(w.File(fmt.Sprintf("%s.steps.%d", w.name(engine), rank)))
		if err != nil {
			return nil, fmt.Errorf("the steps of rank %d: %w", rank, err)
		}
		logs[rank] = text
	}
	return join(logs)
}

// allSteps are those of all engines.
func (w *site) allSteps() (all []step, err error) {
	for i := range w.engines {
		steps, err := w.steps(i)
		if err != nil {
			return nil, err
		}
		all = append(all, steps...)
	}
	return all, nil
}

// serve starts evenkeel with a policy in front of an engine. It knows the law that was measured
// first.
func (w *site) serve(ctx context.Context, policy string, engine int) (*testbed.Proxy, error) {
	p := w.Proxies("evenkeel")[0]
	return p, p.ServeWith(ctx, fmt.Sprintf(`listen: %q
admin: {listen: %q}
self_test: false
profiles:
  internal: {connector: none, dp_mode: internal}
dispatch: {policy: %q, step_model: %s}
prefill: {scrape: {timeout: 5s}}
%s`, p.Clients, p.Address, policy, w.law.config(), testbed.Aggregated(testbed.EnginesAt([]string{w.engines[engine].URL},
		", profile: internal, slots: %d, ranks: %d, token_budget: %d, prefill_schedule_interval: %d", ranks.Slots, ranks.Count, budget,
		intervals[engine]))))
}
