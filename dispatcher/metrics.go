package dispatcher

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/delivery"
)

// metrics are updated when events happen. Present values are in the type gauges, which reads them
// at each scrape.
type metrics struct {
	registry *prometheus.Registry // has the metrics below and the gauges

	tickSeconds    *prometheus.HistogramVec
	fallbacks      *prometheus.CounterVec
	invalid        *prometheus.CounterVec
	doubleReleases prometheus.Counter

	roundRanks *prometheus.HistogramVec
	roundHold  prometheus.Histogram

	estimateRatio prometheus.Histogram
	quarantines   *prometheus.CounterVec
	// enginesWithSeries are the decode engines in quarantines. Only the scheduler uses it.
	enginesWithSeries map[string]bool
	pairAssignments   *prometheus.CounterVec

	endingsDropped prometheus.Counter

	roundsDropped prometheus.Counter
	logFailures   prometheus.Counter

	groupGauges []gaugeSet
}

// gaugeSet is a set of gauges of barrier groups that another part of the dispatcher adds. group is
// the value of the label group.
type gaugeSet struct {
	descs []*prometheus.Desc
	send  func(ch chan<- prometheus.Metric, g *board.GroupStatus, group string)
}

func newMetrics() *metrics {
	registry := prometheus.NewRegistry()
	create := promauto.With(registry)
	counter := func(name, help string) prometheus.Counter {
		return create.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return create.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		registry: registry, enginesWithSeries: map[string]bool{},
		tickSeconds: create.NewHistogramVec(prometheus.HistogramOpts{
			Name: "evenkeel_tick_seconds", Help: "Dispatch latency: how long one round of decisions about a group takes, which is the snapshot, " +
				"the policy, and the binding of what the policy assigned. The time that requests wait for it is not in it (evenkeel_stage_seconds).",
			Buckets: prometheus.ExponentialBuckets(10e-6, 2, 14), // 10 µs to 82 ms
		}, []string{"policy", "group"}),
		fallbacks: counters("evenkeel_tick_fallbacks_total",
			"Ticks in which the decode policy panicked, chose an impossible rank, or was too slow. slow: it computed for longer than "+
				"dispatch.tick_limit. blocked: it took more than a second and hardly computed. "+board.FallbackSpec+" decided in its place.", "reason"),
		invalid: counters("evenkeel_invalid_assignments_total",
			"Assignments that a decode policy wanted and that no rank can take, by fault. The request was not bound.", "fault"),
		doubleReleases: counter("evenkeel_double_releases_total",
			"Decode slots that were released a second time. The second release changes nothing, but it is a bug in evenkeel."),
		roundRanks: create.NewHistogramVec(prometheus.HistogramOpts{
			Name: "evenkeel_round_ranks", Help: "Ranks of the group that had a prompt to compute when a round was sent. The more there are, the " +
				"fewer ranks wait for the others.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 7), // 1 to 64
		}, []string{"group"}),
		roundHold: create.NewHistogram(prometheus.HistogramOpts{
			Name: "evenkeel_round_hold_seconds", Help: "Time that a request was held for a round, although a rank had a slot and KV room for it. " +
				"It is at most max_hold of the policy.",
			Buckets: []float64{.01, .03, .1, .2, .3, .5, 1, 2, 3, 5, 10},
		}),
		estimateRatio: create.NewHistogram(prometheus.HistogramOpts{
			Name: "evenkeel_unheard_tokens_ratio", Help: "Tokens that the dispatcher thought an answer to have, divided by the tokens that its " +
				"engine counted in the end. Only answers count of which an engine tells nothing before their end. With 1 the load of their rank was " +
				"right. With less it was higher than the dispatcher knew.",
			Buckets: []float64{.1, .25, .5, .75, .9, 1.1, 1.33, 2, 4, 10},
		}),
		quarantines: counters("evenkeel_pair_quarantines_total",
			"Times that the proxy began to avoid an engine or a pair of engines that lost hand-offs, or began again because a trial was "+
				"lost. An engine alone has one label only.",
			"prefiller", "engine"),
		pairAssignments: counters("evenkeel_pair_assignments_total",
			"Assignments of a policy to an avoided pair. moved: to another rank. swapped: in exchange with another request. left: the request "+
				"stays in the pool for another rank. kept: there was no other rank.", "outcome"),
		endingsDropped: counter("evenkeel_predictor_dropped_total",
			"Finished requests that the predictor did not learn from, because learning could not keep up."),
		roundsDropped: counter("evenkeel_decision_log_dropped_total",
			"Rounds that are missing from the decision log, because writing could not keep up."),
		logFailures: counter("evenkeel_decision_log_failures_total",
			"Rounds that are missing from the decision log, because it could not be written."),
	}
	m.createSeries()
	return m
}

func (m *metrics) dropGroup(label string) {
	ofGroup := prometheus.Labels{"group": label}
	m.tickSeconds.DeletePartialMatch(ofGroup)
	m.roundRanks.DeletePartialMatch(ofGroup)
}

// countQuarantine notes the decode engine, so that dropGonePairs drops its series when it has left.
func (m *metrics) countQuarantine(link delivery.Link) {
	m.quarantines.WithLabelValues(link.Prefiller, link.Engine).Inc()
	if link.Engine != "" {
		m.enginesWithSeries[link.Engine] = true
	}
}

func (m *metrics) dropGonePairs(ws []board.Worker) {
	for engine := range m.enginesWithSeries {
		hasRank := slices.ContainsFunc(ws, func(w board.Worker) bool { return w.Engine == engine })
		if !hasRank {
			m.quarantines.DeletePartialMatch(prometheus.Labels{"engine": engine})
			delete(m.enginesWithSeries, engine)
		}
	}
}

// createSeries creates series before the first event, so that they begin with 0. If a counter came
// into existence with its first event, Prometheus would see no increase, and no alert would fire.
func (m *metrics) createSeries() {
	reasons := []string{board.FallbackPanic, board.FallbackInvalid, board.FallbackSlow, board.FallbackBlocked}
	for _, reason := range reasons {
		m.fallbacks.WithLabelValues(reason)
	}
	for _, fault := range []string{board.FaultEntry, board.FaultWorker, board.FaultDown, board.FaultSlot, board.FaultRoom} {
		m.invalid.WithLabelValues(fault)
	}
	for _, outcome := range []string{board.SteerMoved, board.SteerSwapped, board.SteerLeft, board.SteerKept} {
		m.pairAssignments.WithLabelValues(outcome)
	}
}
