package reload

import (
	"encoding/binary"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	reloads         *prometheus.CounterVec
	certEnd         *prometheus.GaugeVec
	ok, since, hash prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	m := &metrics{
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_reloads_total", Help: "Files that changed while the proxy ran, by what became of the new version. If it was refused, the version before stays in force, and the log says why.",
		}, []string{"key", "outcome"}),
		certEnd: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "evenkeel_certificate_expiry_timestamp_seconds", Help: "Unix time at which the certificate that the listener presents now ends.",
		}, []string{"key"}),
		ok:    gauge("evenkeel_config_last_reload_successful", "0 if the last config file that was read was refused. /status says where it is wrong."),
		since: gauge("evenkeel_config_last_reload_success_timestamp_seconds", "Unix time at which the config in force came into force."),
		hash:  gauge("evenkeel_config_hash", "The first 48 bits of the SHA-256 of the config file in force. It is equal on proxies with equal files, and 0 without a file."),
	}
	for _, key := range []string{keyConfig, keyKeys, keyToken, keyTLS, keyAdminTLS, keyAuthority, keyPredictor, keyPromptKey, keyGeoTLS, keyGeoCA, keyGeoKeys} {
		for _, outcome := range []string{used, refused} {
			m.reloads.WithLabelValues(key, outcome)
		}
	}
	reg.MustRegister(m.reloads, m.certEnd)
	return m
}

// inForce exports which config is in force.
func (m *metrics) inForce(s *source) {
	ok := 1.0
	if s.last != nil && s.last.Outcome == refused {
		ok = 0
	}
	m.ok.Set(ok)
	m.since.Set(float64(s.at.Unix()))
	m.hash.Set(float64(binary.BigEndian.Uint64(s.used[:8]) >> 16)) // what a float holds
}
