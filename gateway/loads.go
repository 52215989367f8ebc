package gateway

import (
	"context"

	"evenkeel/gateway/door"
)

// modelLoads is how busy the proxy is with each of its models. Ranks whose capacity is not known count as empty.
func (g *Gateway) modelLoads(ctx context.Context) (list []door.ModelLoad) {
	queued := g.tier.Backlogs()
	for _, m := range g.dispatcher.Status(ctx).Models {
		l, kv, capacity := door.ModelLoad{Model: m.Model, Waiting: m.Pool + queued[m.Model].Requests}, int64(0), int64(0)
		for _, w := range m.Workers {
			l.Running += w.Used
			if w.Up {
				kv, capacity = kv+w.KVTokens, capacity+w.Capacity
			}
		}
		if capacity > 0 {
			l.KV = min(1, float64(kv)/float64(capacity))
		}
		list = append(list, l)
	}
	return list
}
