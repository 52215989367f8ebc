package discover

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Changes of an engine, as the log names them.
const (
	added   = "added"
	changed = "changed" // the source describes the engine differently now
	away    = "away"    // the engine gets no new requests from now on
	back    = "back"    // the engine gets new requests again
	removed = "removed"
)

// metrics has the Prometheus metrics of a Discoverer. newMetrics has the help of each.
type metrics struct {
	engines *prometheus.GaugeVec
	answers *prometheus.CounterVec
	stale   *prometheus.GaugeVec
	probes  *prometheus.CounterVec
}

// newMetrics makes the metrics, and registers them with reg; nil: they are not exported.
func newMetrics(reg prometheus.Registerer) *metrics {
	with := promauto.With(reg)
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return with.NewGaugeVec(prometheus.GaugeOpts{Name: "evenkeel_discovery_" + name, Help: help}, labels)
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return with.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_discovery_" + name, Help: help}, labels)
	}
	return &metrics{
		engines: gauge("engines", "Engines that the source lists. away: gets no new work, because it is not ready or is leaving. trying: its "+
			"trial runs. unfit: it failed the trial. listed: it is also in engines of the config and is left alone.", "source", "state"),
		answers: counter("answers_total", "Lists that a source sent. A failed one changes nothing.", "source", "outcome"),
		stale:   gauge("stale", "1 while the source fails and its last list stays in force.", "source"),
		probes:  counter("probes_total", "Trials of engines before their first request.", "role", "outcome"),
	}
}

// createSeries creates the series of a source, so that each starts at 0 and an alert notices the
// first count.
func (m *metrics) createSeries(source string) {
	m.stale.WithLabelValues(source).Set(0)
	for _, outcome := range []string{"used", "failed"} {
		m.answers.WithLabelValues(source, outcome)
	}
	for _, role := range []string{Prefill, Decode, Aggregated} {
		for _, outcome := range []string{"passed", "failed"} {
			m.probes.WithLabelValues(role, outcome)
		}
	}
}

// countAnswer counts an answer of a source, and sets the gauge that shows whether the source fails.
// err is the failure; nil: the source sent a list.
func (m *metrics) countAnswer(source string, err error) {
	if err != nil {
		m.answers.WithLabelValues(source, "failed").Inc()
		m.stale.WithLabelValues(source).Set(1)
		return
	}
	m.answers.WithLabelValues(source, "used").Inc()
	m.stale.WithLabelValues(source).Set(0)
}

// countTrial counts a trial of an engine with this role. err is why it failed; nil: it passed.
func (m *metrics) countTrial(role string, err error) {
	outcome := "passed"
	if err != nil {
		outcome = "failed"
	}
	m.probes.WithLabelValues(role, outcome).Inc()
}

// setEngineCounts sets, for each source and state, how many engines of the source are in this
// state. Without such engines it sets 0.
func (m *metrics) setEngineCounts(s *Status) {
	type series struct{ source, state string }
	count := map[series]int{}
	for _, e := range s.Engines {
		count[series{e.Source, e.State}]++
	}
	for _, source := range s.Sources {
		for _, state := range states {
			m.engines.WithLabelValues(source.Name, state).Set(float64(count[series{source.Name, state}]))
		}
	}
}
