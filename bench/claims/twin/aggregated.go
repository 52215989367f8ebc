package main

import (
	"context"
	"fmt"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/mixed"
)

const (
	mixedJudgement = 20261207 // the seed
	mixedLoads     = 5        // each foretells two runs
	mostMixed      = 1200     // tokens a second of a load, so that two cores carry all of them side by side
	mostPrefills   = 0.95     // share of the steps that have a prompt
)

var mixedPolicies = [2]string{"rr", "evenkeel"}

// mixedScenes are loads drawn as for `make claim NAME=rounds`: the first ones with an open loop, with no more tokens than this machine
// carries, and without chats, because which rank has the beginning of one would depend on the policy. Under both policies the simulated
// ranks keep up, no answer takes longer than half the run, and there are steps without a prompt, or nobody could learn what these take.
func (o options) mixedScenes(ctx context.Context) (list []scene, err error) {
	for number := 0; len(list) < mixedLoads && ctx.Err() == nil; number++ {
		l := mixed.Draw(mixedJudgement, number)
		if l.Rho == 0 || l.Chats > 0 {
			continue
		}
		requests := l.Requests(int(o.lasts.Seconds()*1000/l.Gap*1.2) + 1000)
		s := scene{name: "load " + l.String(), policies: mixedPolicies, mixed: l, requests: requests, rate: rateOf(requests)}
		tokens, most := 0, 0
		for _, q := range requests {
			tokens, most = tokens+q.Output, max(most, q.Output)
		}
		if float64(tokens)/float64(len(requests))*s.rate > mostMixed {
			continue
		}
		tells := true
		for _, p := range mixedPolicies {
			got, err := mixed.Serve(ctx, l.For(o.lasts), mixed.Contender{Name: p, Spec: p, Learn: true})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			lasts := float64(o.lasts.Milliseconds())
			tells = tells && got.TTFT99 < lasts*longest && got.Prefill < mostPrefills && float64(most)*got.TPOT95 < lasts/2
		}
		if tells {
			list = append(list, s)
		}
	}
	return list, ctx.Err()
}

// serveMixed starts a proxy in front of ranks that prefill and decode, with the law of the load.
func serveMixed(ctx context.Context, w *testbed.World, s scene, name, dispatch string) (p *testbed.Proxy, engines []*refengine.Engine,
	err error) {
	l := s.mixed
	room, kv := unlimited, ""
	if l.Room > 0 {
		room, kv = int(l.Room), fmt.Sprintf(", kv_tokens: %d", l.Room)
	}
	captured := 0
	if n := len(l.Law.Sizes); n > 0 {
		captured = l.Law.Sizes[n-1]
	}
	engines, err = w.Engines(refengine.Config{
		Role: refengine.Aggregated, Model: "m", DPSize: l.Ranks, Slots: l.Slots, KVTokens: room, MaxBatchedTokens: int(l.Budget),
		C0: millis(l.Law.C0Ms), C1: millis(l.Law.C1Ms), CR: millis(l.Law.RequestMs),
		CM: millis(l.Law.MostMs), CS: millis(l.Law.MeanMs), Form: l.Law.Form, Captured: captured,
		PrefillBase: millis(l.Law.PrefillMs), PrefillPerToken: millis(l.Law.OwnMs), PrefillShared: millis(l.Law.SharedMs),
		Jitter: 20 * time.Millisecond, PromptTokensDetails: true, StepLog: 1 << 20,
	})
	if err != nil {
		return nil, nil, err
	}
	p, err = proxy(ctx, w, name, dispatch, "aggregated: {connector: none, first_event_timeout: 1h}",
		testbed.Aggregated(testbed.EnginesAt(engines[0].URLs(), ", slots: %d, token_budget: %d%s", l.Slots, l.Budget, kv)))
	return p, engines, err
}
