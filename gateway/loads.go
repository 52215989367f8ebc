package gateway

import (
	"context"
	"slices"
	"strings"

	"evenkeel/gateway/admission"
	"evenkeel/gateway/fleet/roster"
)

// modelLoads returns how busy the engines are with each model, as far as this proxy knows. It adds
// up all groups of ranks that serve the model. Ranks whose KV capacity is not known do not count
// for the share of KV in use.
func (g *Gateway) modelLoads(ctx context.Context) (list []admission.ModelLoad) {
	queued, prefills, boards := g.scheduler.Backlogs(), g.scheduler.Status(), g.dispatcher.Status(ctx).Models
	for _, route := range g.fleet.Now().Models() {
		if route.Name != route.Board {
			continue // a LoRA adapter, whose requests count for its base model
		}
		l := admission.ModelLoad{Model: route.Name, Waiting: queued[route.Name].Requests}
		var kvTokens, capacity int64 // sums over the ranks of the model that are up and have a known capacity
		for i := range prefills {
			if c := &prefills[i]; !c.Aggregated && slices.Contains(c.Models, route.Name) {
				l.Running += c.Inflight
			}
		}
		for i := range boards {
			b := &boards[i]
			// A model has a board of its own, and further ones, with a mark in the name, for aggregated
			// ranks and for other regions.
			isOfModel := b.Model == route.Board || strings.HasPrefix(b.Model, route.Board+roster.AggregatedMark) ||
				strings.HasPrefix(b.Model, route.Board+roster.RegionMark)
			if !isOfModel {
				continue
			}
			l.Waiting += b.Pool
			for _, w := range b.Workers {
				l.Running += w.Used
				if w.Up && w.Capacity > 0 {
					kvTokens += w.KVTokens + w.Others + w.Kept
					capacity += w.Capacity
				}
			}
		}
		if capacity > 0 {
			l.KV = min(1, float64(kvTokens)/float64(capacity))
		}
		list = append(list, l)
	}
	return list
}
