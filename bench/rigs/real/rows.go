package main

import (
	"slices"

	"evenkeel/mooncake"
)

// rowsOf are all rows of a connector, in an order that needs few restarts. With none, there are
// those that need no prefill engine.
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
	return slices.Concat(all, dataParallel)
}
