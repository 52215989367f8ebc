package gateway

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/tracing"
)

// metrics are the gateway's own; prefill tier and dispatcher register theirs.
type metrics struct {
	itl                               prometheus.Observer
	drains                            *prometheus.CounterVec
	recomputes                        *prometheus.CounterVec
	reloads                           *prometheus.CounterVec
	certEnd                           *prometheus.GaugeVec
	configOK, configSince, configHash prometheus.Gauge
	losses                            *prometheus.CounterVec
	moves                             *prometheus.CounterVec
	heedless, latePulls, miscounted   prometheus.Counter
	tokenize                          *prometheus.CounterVec
	spans                             *prometheus.CounterVec

	localRequests                             *prometheus.CounterVec
	localTokens, localFailures, localDeclined prometheus.Counter
}

// secondsBuckets cover a decision of microseconds and a prefill of minutes.
var secondsBuckets = []float64{
	10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60, 120, 300,
}

func newMetrics(reg prometheus.Registerer, open func() float64) *metrics {
	m := &metrics{
		drains: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_drains_total", Help: "Hand-offs nobody will decode, by what became of them: drained, or left to the prefiller's hold timeout.",
		}, []string{"outcome"}),
		spans: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_trace_spans_total", Help: "Spans of sampled requests that ended, by what became of them: exported, dropped because the queue was full, or failed because the collector did not take them.",
		}, []string{"outcome"}),
		recomputes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_recomputes_total", Help: "Requests that a decode engine gave back for want of KV memory, by how they went on.",
		}, []string{"tier"}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_reloads_total", Help: "Files that changed while the proxy ran, by what became of the new version: used, or refused.",
		}, []string{"key", "outcome"}),
		certEnd: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "evenkeel_certificate_expiry_timestamp_seconds", Help: "When the certificate that a listener presents now expires.",
		}, []string{"key"}),
		losses: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_decode_losses_total", Help: "Answers whose decode engine died or failed after the client had some of it, by how they went on.",
		}, []string{"tier"}),
		moves: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_drained_answers_total", Help: "Answers under way on a rank at the deadline of its drain, by how they went on.",
		}, []string{"tier"}),
		heedless: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_heedless_engines_total", Help: "Decode calls that we left and that the engine had not closed 250 ms later. Their slots were given to others all the same, so a rank may have had one request too many.",
		}),
		latePulls: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_late_pulls_total", Help: "Answers given up because they had not begun when the prefill engine may have freed their KV: a later one could be somebody else's.",
		}),
		miscounted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_miscounted_answers_total", Help: "Answers whose tokens, as they were counted while the answer came, differ by more than 1 % from the engine's final usage. The load of decode ranks is this count.",
		}),
		localRequests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_local_prefill_requests_total", Help: "Requests, and legs of a fan-out, that a decode rank was given without a hand-off, by why.",
		}, []string{"reason"}),
		localTokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_local_prefill_tokens_total", Help: "Prompt tokens that decode ranks were to compute themselves, as predicted.",
		}),
		localFailures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_local_prefill_failures_total", Help: "Of those requests, the ones whose rank failed before the first event; each is prefilled then.",
		}),
		localDeclined: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_local_prefill_declined_total", Help: "Requests that a decode rank might have served whole, but none had room.",
		}),
		tokenize: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_prefix_tokenize_total", Help: "Prompts whose token ids were wanted, by who told them: an engine had, an engine, or nobody.",
		}, []string{"outcome"}),
	}
	for _, why := range []string{localShort, localAsked, localEnded} {
		m.localRequests.WithLabelValues(why)
	}
	for _, outcome := range []string{tracing.Exported, tracing.Dropped, tracing.Failed} {
		m.spans.WithLabelValues(outcome)
	}
	for _, outcome := range []string{tokenizeKnown, tokenizeAsked, tokenizeFailed} {
		m.tokenize.WithLabelValues(outcome)
	}
	for _, outcome := range []string{drainDone, drainUnplaced, drainCrowded, drainExpired, drainFailed, drainRefused} {
		m.drains.WithLabelValues(outcome)
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
	for _, tier := range tiers {
		m.recomputes.WithLabelValues(tier)
		m.losses.WithLabelValues(tier)
		m.moves.WithLabelValues(tier)
	}
	itl := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "evenkeel_itl_seconds", Help: "Gap between two events that carry tokens.", Buckets: secondsBuckets})
	m.itl = itl
	reg.MustRegister(itl, m.drains, m.recomputes, m.losses, m.moves, m.reloads, m.certEnd, m.heedless, m.latePulls, m.miscounted, m.tokenize, m.spans, m.localRequests, m.localTokens, m.localFailures, m.localDeclined, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_requests_open", Help: "Client requests being served now.",
	}, open), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_clock_seconds", Help: "The time here, Unix time, to hold against that of others.",
	}, func() float64 { return float64(time.Now().UnixMilli()) / 1000 }))
	return m
}
