package request

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what requests count.
type metrics struct {
	itl                             prometheus.Observer
	recomputes                      *prometheus.CounterVec
	losses                          *prometheus.CounterVec
	moves                           *prometheus.CounterVec
	heedless, latePulls, miscounted prometheus.Counter

	localRequests                             *prometheus.CounterVec
	localTokens, localFailures, localDeclined prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, buckets []float64, open *atomic.Int64) *metrics {
	m := &metrics{
		recomputes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_recomputes_total", Help: "Requests that a decode engine gave back for want of KV memory, by how they went on.",
		}, []string{"tier"}),
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
	}
	for _, why := range []string{localShort, localAsked, localEnded} {
		m.localRequests.WithLabelValues(why)
	}
	for _, tier := range tiers {
		m.recomputes.WithLabelValues(tier)
		m.losses.WithLabelValues(tier)
		m.moves.WithLabelValues(tier)
	}
	itl := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "evenkeel_itl_seconds", Help: "Gap between two events that carry tokens.", Buckets: buckets})
	m.itl = itl
	reg.MustRegister(itl, m.recomputes, m.losses, m.moves, m.heedless, m.latePulls, m.miscounted, m.localRequests, m.localTokens, m.localFailures, m.localDeclined, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_requests_open", Help: "Client requests being served now.",
	}, func() float64 { return float64(open.Load()) }))
	return m
}
