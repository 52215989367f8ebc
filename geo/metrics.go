package geo

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/geo/policy"
)

// Routes as metrics and x-evenkeel-route name them.
const (
	routeLocal   = "local"
	routeForward = "forward"
)

type metrics struct {
	up, peerAvailable, rtt, age                           *prometheus.GaugeVec
	unavailable, decisions, forwards, fallbacks, received *prometheus.CounterVec
	rejects, bytes, dollars                               *prometheus.CounterVec
	queue, inflight, available                            *prometheus.GaugeVec
	ttft, costError                                       *prometheus.HistogramVec

	peers   *Peers
	vectors []vector
}

// vector is a metric with labels, whose series can be deleted by label.
type vector interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

var secondsBuckets = []float64{1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60, 120}

// errorBuckets are bounds of the actual less the predicted time, in seconds; negative: the actual
// time was shorter.
var errorBuckets = []float64{-10, -2.5, -1, -0.5, -0.25, -0.1, -0.05, -0.01, 0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30, 120}

// newMetrics makes the metrics of Peers.
func newMetrics(ps *Peers) *metrics {
	var all []vector
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return keepVector(&all, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "evenkeel_geo_" + name, Help: help}, labels))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return keepVector(&all, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_geo_" + name, Help: help}, labels))
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return keepVector(&all,
			prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "evenkeel_geo_" + name, Help: help, Buckets: buckets}, labels))
	}
	m := &metrics{
		peers:         ps,
		up:            gauge("peer_up", "1 while the peer answers its probes and speaks this proxy's major version.", "peer"),
		peerAvailable: gauge("peer_available", "1 if the peer takes forwards for the model, as last judged.", "peer", "model"),
		unavailable:   counter("peer_unavailable_total", "Times that the peer became unavailable for a model, by reason.", "peer", "reason"),
		rtt:           gauge("rtt_seconds", "Round trip to the peer, averaged over its probes.", "peer"),
		age:           gauge("probe_age_seconds", "Time since the peer's last good probe.", "peer"),
		queue:         gauge("queue_requests", "Requests in the arrival queue of this proxy.", "model"),
		decisions:     counter("decisions_total", "Decisions of the geo policy. A request that waits counts once under wait.", "policy", "route"),
		forwards: counter("forwards_total", "Requests that were sent to a peer, by how they ended. lost: in the middle of an answer.",
			"peer", "outcome"),
		inflight: gauge("forwards_inflight", "Requests that are at the peer now.", "peer"),
		fallbacks: counter("fallbacks_total", "Requests that came back from a peer before their first event and were served here, by cause.",
			"peer", "cause"),
		received: counter("received_total", "Requests of other proxies, by how they ended here. The outcomes are those of "+
			"evenkeel_requests_total, which counts these requests too.", "origin", "outcome"),
		rejects: counter("rejects_total", "Requests on the peer listener that were refused, by reason.", "reason"),
		ttft: histogram("ttft_seconds", "Time from arrival to the first event, by where the request was served. peer is empty for local.",
			secondsBuckets, "route", "peer"),
		costError: histogram("cost_error_seconds", "Time to the first event at a peer, less the predicted time.", errorBuckets, "peer"),
		bytes: counter("egress_bytes_total", "Bytes of forwards with their headers, without TLS. out: to the peer. in: from it.", "peer",
			"direction"),
		dollars:   counter("egress_usd_total", "Cost of these bytes by the configured prices.", "peer"),
		available: gauge("n_avail", "Local prefill engines that can take a request, as the last probe was told.", "model"),
	}
	m.vectors = all
	return m
}

// keepVector adds a metric to the list of those that Describe and Collect pass on, and returns it.
func keepVector[V vector](all *[]vector, v V) V {
	*all = append(*all, v)
	return v
}

// createSeries makes the series of the peer listener. If a counter only came into existence with
// its first event, its value would never increase from 0 to 1, and no alert would see this event.
func (m *metrics) createSeries() {
	for _, reason := range rejects {
		m.rejects.WithLabelValues(reason)
	}
}

// createPeerSeries makes the counters of a peer, so that an alert sees their first increase from 0
// to 1.
func (m *metrics) createPeerSeries(peer string) {
	for _, outcome := range []string{OutcomeOK, OutcomeFallback, OutcomeLost, OutcomeGone, OutcomeRelayed} {
		m.forwards.WithLabelValues(peer, outcome)
	}
	for _, cause := range causes {
		m.fallbacks.WithLabelValues(peer, cause)
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors {
		v.Describe(ch)
	}
}

// Collect implements prometheus.Collector. It sets the gauges of the peers before it collects all
// metrics.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	ps, now := m.peers, m.peers.clock.Now()
	ps.mu.Lock()
	for _, p := range ps.peers {
		m.up.WithLabelValues(p.id).Set(oneIf(p.usable()))
		rtt, _ := p.rtt.Ms()
		m.rtt.WithLabelValues(p.id).Set(rtt / 1000)
		if p.probed {
			m.age.WithLabelValues(p.id).Set(now.Sub(p.lastAnsweredAt).Seconds())
		}
	}
	ps.mu.Unlock()
	for _, v := range m.vectors {
		v.Collect(ch)
	}
}

// dropSeries drops the series in which a label has this value: those of a removed peer, or of a
// model.
func (m *metrics) dropSeries(label, value string) {
	for _, v := range m.vectors {
		v.DeletePartialMatch(prometheus.Labels{label: value}) // no effect on metrics without this label
	}
}

func (m *metrics) countDecision(policyName string, act policy.Act) {
	m.decisions.WithLabelValues(policyName, act.String()).Inc()
}

// CountReceived counts a request from another proxy, by its outcome.
func (ps *Peers) CountReceived(origin, outcome string) {
	ps.metrics.received.WithLabelValues(origin, outcome).Inc()
}

// CountRejected counts a refusal on the peer listener.
func (ps *Peers) CountRejected(reason string) { ps.metrics.rejects.WithLabelValues(reason).Inc() }

// ObserveLocalTTFT records the time to the first event of a request that was served in this region.
func (ps *Peers) ObserveLocalTTFT(ttft time.Duration) {
	ps.metrics.ttft.WithLabelValues(routeLocal, "").Observe(ttft.Seconds())
}

// oneIf is the value of a gauge that is 1 if b is true, and 0 otherwise.
func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
