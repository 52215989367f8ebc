package request

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
)

type metrics struct {
	itl                             prometheus.Observer
	recomputes, losses, moves       *prometheus.CounterVec // by tier
	heedless, latePulls, miscounted prometheus.Counter

	drains, rebinds *prometheus.CounterVec // of requests that were bound before their prefill

	localRequests                *prometheus.CounterVec
	localFailures, localDeclined prometheus.Counter
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
		Name: "evenkeel_requests_open", Help: "Client requests that are being served now, from the first byte of the request to the last byte of the answer.",
	}, func() float64 { return float64(open.Load()) })
	return &metrics{
		itl: auto.NewHistogram(prometheus.HistogramOpts{Name: "evenkeel_itl_seconds", Help: "Time between two events that carry tokens.", Buckets: buckets}),
		recomputes: counters("evenkeel_recomputes_total",
			"Requests that a decode engine gave back because it had no KV memory left, by how they went on. 0: from the start, because the client had nothing of the answer yet. 1: a completion, by its token ids. 2: a chat, by its token ids. 3: by its text, which is not exact to the token. 4: not at all, it ended with an error. finished: no token was left to compute.", "tier", lifecycle.Tiers),
		losses: counters("evenkeel_decode_losses_total",
			"Answers whose decode engine died or failed after the client had a part of them, by how they went on. The tiers are those of evenkeel_recomputes_total.", "tier", lifecycle.Tiers),
		moves: counters("evenkeel_drained_answers_total",
			"Answers that ran on a rank at the deadline of its drain, by how they went on. The tiers are those of evenkeel_recomputes_total.", "tier", lifecycle.Tiers),
		heedless: counter("evenkeel_heedless_engines_total",
			"Decode calls that the proxy closed and that the engine had not closed 250 ms later. Their slots were given to others all the same, so a rank may have had one request too many."),
		latePulls: counter("evenkeel_late_pulls_total",
			"Answers that were withheld because they had not begun when the prefill engine may have freed their KV. A later answer could be made of another request's KV."),
		miscounted: counter("evenkeel_miscounted_answers_total",
			"Answers whose tokens, as counted while the answer came, differ by more than 1 % from the engine's final usage. This count is the load of decode ranks."),
		drains: counters("evenkeel_bind_drains_total",
			"Prefills that ran although no client waits for the answer any more, because only the end of the prefill frees the blocks of the decode engine that the request was bound to. client_left: the client left. late_callback: the request was given up before its callback came.", "cause", []string{drainLeft, drainLate}),
		rebinds: counters("evenkeel_bind_rebinds_total",
			"Requests that were bound to a decode rank before their prefill and lost it before their first token. decode: the decode engine refused or broke off. prefill: the prefill engine did. callback: no callback came, or a bad one. silent: the prefill ended, and no event came.", "cause",
			[]string{causeDecode, causePrefill, causeCallback, causeSilent}),
		localRequests: counters("evenkeel_local_prefill_requests_total",
			"Requests that a decode rank got without a hand-off. short: little of the prompt was new there. asked: a trusted caller wanted it. ended: probes return no hand-off. endpoint: an engine takes no hand-off at this endpoint.", "reason", []string{localShort, localAsked, localEnded, localWhole}),
		localFailures: counter("evenkeel_local_prefill_failures_total",
			"Requests that a decode rank got without a hand-off and that failed before their first event. A prefill engine gets them then."),
		localDeclined: counter("evenkeel_local_prefill_declined_total",
			"Requests that were short enough for a decode rank to compute, but no rank had room or could be reached."),
	}
}

// The labels of drains, rebinds and localRequests. The HELP texts say what they mean.
const (
	drainLeft, drainLate                                  = "client_left", "late_callback"
	causeDecode, causePrefill, causeCallback, causeSilent = "decode", "prefill", "callback", "silent"
	localShort, localAsked, localWhole, localEnded        = "short", "asked", "endpoint", "ended"
)

// rebound counts a rank that a request was bound to and has lost; f is why the prefill leg ended the decode leg, nil if that has ended by
// itself.
func (m *metrics) rebound(f *failure.Fault) {
	cause := causePrefill
	switch {
	case f == nil:
		cause = causeDecode
	case f.Verdict().Next == lifecycle.Over:
		return
	case f.Why == lifecycle.Unbegun:
		cause = causeSilent
	case f.Leg == lifecycle.Decode:
		cause = causeCallback
	}
	m.rebinds.WithLabelValues(cause).Inc()
}
