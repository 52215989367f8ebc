package gateway

import (
	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/edge"
)

// registerEdge exports what the public listener counts.
func (g *Gateway) registerEdge() {
	stats := func() edge.Stats {
		if g.listener == nil { // not started
			return edge.Stats{}
		}
		return g.listener.Stats()
	}
	gauge := func(name, help string, v func() float64) {
		g.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, v))
	}
	counter := func(name, help, reason string, v func() uint64) {
		g.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: name, Help: help, ConstLabels: prometheus.Labels{"reason": reason},
		}, func() float64 { return float64(v()) }))
	}
	gauge("evenkeel_connections_open", "Connections of clients.", func() float64 { return float64(stats().Open) })
	gauge("evenkeel_bodies_bytes", "Bytes of request bodies being read, and of those that no decode engine has taken over yet.", func() float64 { return float64(g.bodies.Held()) })
	const refused, cut = "evenkeel_connections_refused_total", "evenkeel_clients_cut_total"
	const refusedHelp, cutHelp = "Connections closed at once because there were too many.", "Answers cut because their client did not read them."
	counter(refused, refusedHelp, "total", func() uint64 { return stats().RefusedTotal })
	counter(refused, refusedHelp, "address", func() uint64 { return stats().RefusedByAddr })
	counter(cut, cutHelp, "stalled", func() uint64 { return stats().CutStalled })
	counter(cut, cutHelp, "lagging", func() uint64 { return stats().CutLagging })
}
