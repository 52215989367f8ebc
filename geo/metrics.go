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
	rejects, hits, bytes, dollars, patience               *prometheus.CounterVec
	queue, inflight, available, snapshot                  *prometheus.GaugeVec
	probe, wait, ttft, costError                          *prometheus.HistogramVec

	node *Node
	all  []vector
}

// vector is one of these.
type vector interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

var secondsBuckets = []float64{1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60, 120}

// errorBuckets are of differences: what came earlier than predicted is below 0.
var errorBuckets = []float64{-10, -2.5, -1, -0.5, -0.25, -0.1, -0.05, -0.01, 0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30, 120}

func newMetrics(n *Node) *metrics {
	var all []vector
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return kept(&all, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "evenkeel_geo_" + name, Help: help}, labels))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return kept(&all, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_geo_" + name, Help: help}, labels))
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return kept(&all, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "evenkeel_geo_" + name, Help: help, Buckets: buckets}, labels))
	}
	m := &metrics{
		node:          n,
		up:            gauge("peer_up", "1 while a peer answers its probes and speaks our version.", "peer"),
		peerAvailable: gauge("peer_available", "1 while a peer takes forwards for the model.", "peer", "model"),
		unavailable:   counter("peer_unavailable_total", "Times a peer became unavailable for a model, by why.", "peer", "reason"),
		rtt:           gauge("rtt_seconds", "Round trip to a peer, an average of its probes.", "peer"),
		probe:         histogram("probe_seconds", "Probes of a peer that were answered.", secondsBuckets, "peer"),
		age:           gauge("probe_age_seconds", "Since a peer's last good probe.", "peer"),
		queue:         gauge("queue_requests", "Requests in the arrival queue.", "model"),
		wait:          histogram("queue_wait_seconds", "Time in the arrival queue until a request went somewhere.", secondsBuckets, "route"),
		decisions:     counter("decisions_total", "Decisions: to a local replica, to a peer, or to wait, the last once a request.", "policy", "route"),
		forwards:      counter("forwards_total", "Requests sent to a peer, by how they ended.", "peer", "outcome"),
		inflight:      gauge("forwards_inflight", "Requests that are at a peer.", "peer"),
		fallbacks:     counter("fallbacks_total", "Requests that came back and were served here, by why.", "peer", "cause"),
		received:      counter("received_total", "Requests of other dispatchers, by how they ended here.", "origin", "outcome"),
		rejects:       counter("rejects_total", "Requests on the peer listener that were refused, by why.", "reason"),
		ttft:          histogram("ttft_seconds", "From a request's arrival in the queue to the first event of its answer, by where.", secondsBuckets, "route", "peer"),
		costError:     histogram("cost_error_seconds", "Time to first token at a peer less what was predicted.", errorBuckets, "peer"),
		hits:          counter("hit_tokens_total", "Prompt tokens thought to be cached at a peer, and those it says were.", "peer", "source"),
		snapshot:      gauge("snapshot_bytes", "Memory of what is remembered of the prompts sent to a peer.", "peer"),
		bytes:         counter("egress_bytes_total", "Bytes of forwards: out to a peer, in from it.", "peer", "direction"),
		dollars:       counter("egress_usd_total", "What those bytes cost by the configured prices.", "peer"),
		patience:      counter("patience_total", "Requests that waited for the replica that holds their prefix, by whether it took them.", "outcome"),
		available:     gauge("n_avail", "Local replicas that take a request now.", "model"),
	}
	m.all = all
	return m
}

func kept[V vector](all *[]vector, v V) V {
	*all = append(*all, v)
	return v
}

// createSeries makes the series of the peer listener, and createPeerSeries those of a peer. A
// counter that begins to exist with its first event has not increased, so no alert
// would see that event.
func (m *metrics) createSeries() {
	for _, reason := range rejects {
		m.rejects.WithLabelValues(reason)
	}
	for _, outcome := range []string{patienceHolder, patienceExpired} {
		m.patience.WithLabelValues(outcome)
	}
}

func (m *metrics) createPeerSeries(peer string) {
	for _, outcome := range []string{OutcomeOK, OutcomeFallback, OutcomeLost, OutcomeGone, OutcomeRelayed} {
		m.forwards.WithLabelValues(peer, outcome)
	}
	for _, cause := range causes {
		m.fallbacks.WithLabelValues(peer, cause)
	}
}

// Whether a request's patience paid.
const (
	patienceHolder  = "holder"
	patienceExpired = "expired"
)

// Describe is prometheus.Collector's.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.all {
		v.Describe(ch)
	}
}

// Collect reads what the node knows of its peers now.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	n, now := m.node, m.node.clock.Now()
	n.mu.Lock()
	for _, p := range n.peers {
		m.up.WithLabelValues(p.id).Set(oneIf(p.up && p.major == policy.Protocol))
		rtt, _ := p.rtt.Ms()
		m.rtt.WithLabelValues(p.id).Set(rtt / 1000)
		m.snapshot.WithLabelValues(p.id).Set(float64(p.sent.Stats().Bytes))
		if p.probed {
			m.age.WithLabelValues(p.id).Set(now.Sub(p.good).Seconds())
		}
	}
	n.mu.Unlock()
	for _, v := range m.all {
		v.Collect(ch)
	}
}

// forget drops the series of a peer that is gone.
func (m *metrics) forget(peer string) {
	for _, v := range m.all {
		v.DeletePartialMatch(prometheus.Labels{"peer": peer}) // none of a vector without that label
	}
}

func (m *metrics) decided(policyName string, act policy.Act) {
	m.decisions.WithLabelValues(policyName, act.String()).Inc()
}

// Received counts a request of another dispatcher by how it ended here.
func (n *Node) Received(origin, outcome string) {
	n.metrics.received.WithLabelValues(origin, outcome).Inc()
}

// Rejected counts a refusal on the peer listener.
func (n *Node) Rejected(reason string) { n.metrics.rejects.WithLabelValues(reason).Inc() }

// Served observes the first event of a request that was served here.
func (n *Node) Served(ttft time.Duration) {
	n.metrics.ttft.WithLabelValues(routeLocal, "").Observe(ttft.Seconds())
}
