package gateway

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/tracing"
)

// metrics are the gateway's own; its parts register theirs.
type metrics struct {
	spans *prometheus.CounterVec
}

// secondsBuckets cover a decision of microseconds and a prefill of minutes.
var secondsBuckets = []float64{
	10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60, 120, 300,
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		spans: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_trace_spans_total", Help: "Spans of sampled requests that ended, by what became of them: exported, dropped because the queue was full, or failed because the collector did not take them.",
		}, []string{"outcome"}),
	}
	for _, outcome := range []string{tracing.Exported, tracing.Dropped, tracing.Failed} {
		m.spans.WithLabelValues(outcome)
	}
	reg.MustRegister(m.spans, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_clock_seconds", Help: "The time here, Unix time, to hold against that of others.",
	}, func() float64 { return float64(time.Now().UnixMilli()) / 1000 }))
	return m
}
