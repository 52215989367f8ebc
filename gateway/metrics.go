package gateway

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/edge"
)

// secondsBuckets reach from a decision, which takes microseconds, to a prefill, which may take
// minutes. The unit is seconds.
var secondsBuckets = []float64{
	10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60, 120,
	300,
}

// registerMetrics registers the clock, the metrics of the public listener, and the memory that
// bodies take. The other parts of the proxy register their metrics themselves.
func (g *Gateway) registerMetrics() {
	stats := func() edge.Stats {
		if g.listener == nil { // the proxy has not started
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
	gauge("evenkeel_clock_seconds", "Unix time of the proxy. Compare it with Prometheus's own time to see how far the clocks are apart.",
		func() float64 { return float64(time.Now().UnixMilli()) / 1000 })
	gauge("evenkeel_connections_open", "Connections of clients, including idle ones.", func() float64 { return float64(stats().Open) })
	gauge("evenkeel_bodies_bytes", "Bytes of request bodies (the arrived part of bodies that are being read, and bodies that no decode "+
		"engine has taken over yet) and of answers in one piece that clients have not read yet, from 4 KiB each. limits.bodies_bytes "+
		"bounds them.",
		func() float64 { return float64(g.bodies.Held()) })
	const refused, cut = "evenkeel_connections_refused_total", "evenkeel_clients_cut_total"
	const refusedHelp = "Connections that were closed at once. total: limits.connections were open. address: limits.connections_per_ip of " +
		"that address were open."
	const cutHelp = "Connections that were cut because the client did not read its answer. stalled: one write waited for " +
		"limits.write_timeout. lagging: all writes together waited for five minutes."
	counter(refused, refusedHelp, "total", func() uint64 { return stats().RefusedTotal })
	counter(refused, refusedHelp, "address", func() uint64 { return stats().RefusedByAddr })
	counter(cut, cutHelp, "stalled", func() uint64 { return stats().CutStalled })
	counter(cut, cutHelp, "lagging", func() uint64 { return stats().CutLagging })
}
