package request

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are what requests count.
type metrics struct {
	itl                             prometheus.Observer
	recomputes, losses, moves       *prometheus.CounterVec // by tier
	heedless, latePulls, miscounted prometheus.Counter

	localRequests                             *prometheus.CounterVec
	localTokens, localFailures, localDeclined prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, buckets []float64, open *atomic.Int64) *metrics {
	auto := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return auto.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	counters := func(name, help, label string, values []string) *prometheus.CounterVec {
		c := auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
		for _, value := range values {
			c.WithLabelValues(value)
		}
		return c
	}
	auto.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_requests_open", Help: "Client requests being served now.",
	}, func() float64 { return float64(open.Load()) })
	return &metrics{
		itl: auto.NewHistogram(prometheus.HistogramOpts{Name: "evenkeel_itl_seconds", Help: "Gap between two events that carry tokens.", Buckets: buckets}),
		recomputes: counters("evenkeel_recomputes_total",
			"Requests that a decode engine gave back for want of KV memory, by how they went on.", "tier", tiers),
		losses: counters("evenkeel_decode_losses_total",
			"Answers whose decode engine died or failed after the client had some of it, by how they went on.", "tier", tiers),
		moves: counters("evenkeel_drained_answers_total",
			"Answers under way on a rank at the deadline of its drain, by how they went on.", "tier", tiers),
		heedless: counter("evenkeel_heedless_engines_total",
			"Decode calls that we left and that the engine had not closed 250 ms later. Their slots were given to others all the same, so a rank may have had one request too many."),
		latePulls: counter("evenkeel_late_pulls_total",
			"Answers given up because they had not begun when the prefill engine may have freed their KV: a later one could be somebody else's."),
		miscounted: counter("evenkeel_miscounted_answers_total",
			"Answers whose tokens, as they were counted while the answer came, differ by more than 1 % from the engine's final usage. The load of decode ranks is this count."),
		localRequests: counters("evenkeel_local_prefill_requests_total",
			"Requests, and legs of a fan-out, that a decode rank was given without a hand-off, by why.", "reason", []string{localShort, localAsked, localEnded, localWhole}),
		localTokens: counter("evenkeel_local_prefill_tokens_total",
			"Prompt tokens that decode ranks were to compute themselves, as predicted."),
		localFailures: counter("evenkeel_local_prefill_failures_total",
			"Of those requests, the ones whose rank failed before the first event; each is prefilled then."),
		localDeclined: counter("evenkeel_local_prefill_declined_total",
			"Requests that a decode rank might have served whole, but none had room."),
	}
}
