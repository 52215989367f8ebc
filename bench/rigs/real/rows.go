package main

import (
	"context"
	"slices"

	"evenkeel/mooncake"
)

// boundEarly begins the names of the rows in which decode ranks are bound before the prefill.
const boundEarly = "bound at arrival: "

// rowsOf are all rows of a connector, in an order that needs few restarts. With nixl-push they run
// twice: with decode ranks that are bound after the prefill, and before it. With none, there are those that need no prefill
// engine.
func rowsOf(connector string) (all []row) {
	for _, s := range slices.Concat(shapes, generateShapes) {
		all = append(all, s.row())
	}
	if connector == mooncake.None {
		return together(slices.Concat(all, clients, endpoints, loads, troubles, generating, alone))
	}
	all = slices.Concat(all, clients, caches, loads, leases, troubles, prefillTroubles, generating, rollouts, promptLogprobs)
	if connector != mooncake.NIXLPush {
		return slices.Concat(all, endpoints, embeddings, handoffs, dataParallel)
	}
	return slices.Concat(all, atArrival(all), dataParallel, atArrival(dataParallel))
}

// atArrival are the same rows for a proxy that binds decode ranks at arrival.
func atArrival(all []row) (bound []row) {
	for _, r := range all {
		bound = append(bound, row{name: boundEarly + r.name, engines: r.engines, run: func(ctx context.Context, w *site) outcome {
			w.bind = mooncake.BindArrival
			defer func() { w.bind = "" }()
			return r.run(ctx, w)
		}})
	}
	return bound
}
