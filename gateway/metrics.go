package gateway

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/tracing"
)

// metrics are the gateway's own; its parts register theirs.
type metrics struct {
	reloads                           *prometheus.CounterVec
	certEnd                           *prometheus.GaugeVec
	configOK, configSince, configHash prometheus.Gauge
	spans                             *prometheus.CounterVec
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
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_reloads_total", Help: "Files that changed while the proxy ran, by what became of the new version: used, or refused.",
		}, []string{"key", "outcome"}),
		certEnd: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "evenkeel_certificate_expiry_timestamp_seconds", Help: "When the certificate that a listener presents now expires.",
		}, []string{"key"}),
	}
	for _, outcome := range []string{tracing.Exported, tracing.Dropped, tracing.Failed} {
		m.spans.WithLabelValues(outcome)
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	m.configOK = gauge("evenkeel_config_last_reload_successful", "0 after a config that was refused.")
	m.configSince = gauge("evenkeel_config_last_reload_success_timestamp_seconds", "Since when the config in force is.")
	m.configHash = gauge("evenkeel_config_hash", "The first 48 bits of the SHA-256 of the config file in force: equal on proxies with equal files.")
	for _, key := range []string{keyConfig, keyKeys, keyToken, keyTLS, keyAdminTLS, keyAuthority, keyPredictor, keyPromptKey, keyGeoTLS, keyGeoCA, keyGeoKeys} {
		for _, outcome := range []string{reloadUsed, reloadRefused} {
			m.reloads.WithLabelValues(key, outcome)
		}
	}
	reg.MustRegister(m.reloads, m.certEnd, m.spans, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_clock_seconds", Help: "The time here, Unix time, to hold against that of others.",
	}, func() float64 { return float64(time.Now().UnixMilli()) / 1000 }))
	return m
}
