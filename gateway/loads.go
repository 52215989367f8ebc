package gateway

import (
	"context"
	"slices"
	"strings"

	"evenkeel/gateway/admission"
	"evenkeel/gateway/fleet/roster"
)

// modelLoads is how busy the engines are with each model, as far as the proxy knows: a model's boards are added up, and the KV of ranks
// whose capacity is not known does not count.
func (g *Gateway) modelLoads(ctx context.Context) (list []admission.ModelLoad) {
	queued, prefills, boards := g.tier.Backlogs(), g.tier.Status(), g.dispatcher.Status(ctx).Models
	for _, route := range g.fleet.Now().Models() {
		if route.Name != route.Board {
			continue // an adapter of another model
		}
		l, kv, capacity := admission.ModelLoad{Model: route.Name, Waiting: queued[route.Name].Requests}, int64(0), int64(0)
		for i := range prefills {
			if c := &prefills[i]; !c.Aggregated && slices.Contains(c.Models, route.Name) {
				l.Running += c.Inflight
			}
		}
		for i := range boards {
			b := &boards[i]
			if b.Model != route.Board && !strings.HasPrefix(b.Model, route.Board+roster.AggregatedMark) &&
				!strings.HasPrefix(b.Model, route.Board+roster.RegionMark) {
				continue
			}
			l.Waiting += b.Pool
			for _, w := range b.Workers {
				l.Running += w.Used
				if w.Up && w.Capacity > 0 {
					kv, capacity = kv+w.KVTokens+w.Others+w.Kept, capacity+w.Capacity
				}
			}
		}
		if capacity > 0 {
			l.KV = min(1, float64(kv)/float64(capacity))
		}
		list = append(list, l)
	}
	return list
}
