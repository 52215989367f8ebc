package engine

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics has the Prometheus metrics of a monitor's instances. newMetrics has the help of each.
type metrics struct {
	up         *prometheus.GaugeVec
	state      *prometheus.GaugeVec
	outages    *prometheus.CounterVec
	canaries   *prometheus.CounterVec
	frozen     *prometheus.GaugeVec
	overSlots  *prometheus.GaugeVec
	lateChecks *prometheus.CounterVec
	shortPulls *prometheus.CounterVec
}

// newMetrics makes the metrics and registers them with reg; nil: they are not exported.
func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return registerOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "evenkeel_engine_" + name, Help: help}, labels))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return registerOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_engine_" + name, Help: help}, labels))
	}
	return &metrics{
		up: gauge("up", "1 while the engine answers its health check.", "engine", "role"),
		state: gauge("state", "1 for the state that the engine is in. out: requests failed in a row. wedged: a request of one token failed too. "+
			"halted: it is paused, or its group re-forms or waits for its recovery, and requests wait.", "engine", "role", "state"),
		outages: counter("outages_total", "Times that a decode engine was taken out although it answers its health check.", "engine", "reason"),
		canaries: counter("canaries_total", "Requests of one token that were sent to decode engines that seemed broken. vouched: the request "+
			"timed out, but streams of the engine went on.", "engine", "outcome"),
		frozen: gauge("gauges_frozen", "1 while a decode engine's gauges do not change although it has requests of this proxy.", "engine"),
		overSlots: gauge("over_slots",
			"Requests that run on the engine's fullest rank beyond slots. Requests that were admitted before slots was "+
				"lowered do not count. Above 0, slots is wrong, or other clients use the engine.", "engine"),
		lateChecks: counter("late_checks_total",
			"Health checks (GET /health) that took longer than 5 s while the engine answered requests. It is busy and stays in service.", "engine"),
		shortPulls: counter("short_pulled_tokens_total",
			"Prompt tokens that a decode engine computed although a hand-off for them was sent. Only "+
				"engines that count external cache hits report this (vLLM: vllm:external_prefix_cache_*). It is a lower bound: up to one block of 128 "+
				"tokens per pull counts as rounding. Prompts that other clients send to the engine without a hand-off count too.", "engine"),
	}
}

// registerOnce registers a collector and returns it. If another monitor of this process has
// registered the same metric, it returns the registered one, so that the monitors share it.
func registerOnce[C prometheus.Collector](reg prometheus.Registerer, c C) C {
	if reg == nil { // the metrics are not exported
		return c
	}
	err := reg.Register(c)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if old, ok := already.ExistingCollector.(C); ok {
			return old
		}
	}
	if err != nil { // another collector uses this name, which is a bug
		panic(err)
	}
	return c
}

// states are the states of an instance, as values of a label.
var states = []string{"up", "out", "wedged", "halted", "down"}

// setState sets the gauges of an instance: up, and for each state 1 if the instance is in it, else
// 0.
func (m *metrics) setState(in Instance, s Status) {
	m.up.WithLabelValues(in.ID, in.Role).Set(gaugeValue(s.Up))
	for _, state := range states {
		m.state.WithLabelValues(in.ID, in.Role, state).Set(gaugeValue(state == s.State().String()))
	}
}

// createSeries creates the series of an instance, so that each starts at 0 and an alert notices the
// first count. The instance counts as down until its first check.
func (m *metrics) createSeries(in Instance) {
	m.setState(in, Status{})
	m.lateChecks.WithLabelValues(in.ID)
	if len(in.Canaries) == 0 { // only engines that get canaries have the other series
		return
	}
	for _, reason := range []string{outFailures, outCanary} {
		m.outages.WithLabelValues(in.ID, reason)
	}
	for _, outcome := range canaryOutcomes {
		m.canaries.WithLabelValues(in.ID, outcome)
	}
	m.frozen.WithLabelValues(in.ID).Set(0)
	m.overSlots.WithLabelValues(in.ID).Set(0)
	m.shortPulls.WithLabelValues(in.ID)
}

// deleteSeries deletes the series of an instance that is not watched any more, so that no old value
// stays on the page.
func (m *metrics) deleteSeries(in Instance) {
	m.up.DeleteLabelValues(in.ID, in.Role)
	m.state.DeletePartialMatch(prometheus.Labels{"engine": in.ID, "role": in.Role})
	m.lateChecks.DeleteLabelValues(in.ID)
	if len(in.Canaries) == 0 { // only engines that get canaries have the other series
		return
	}
	gone := prometheus.Labels{"engine": in.ID}
	m.outages.DeletePartialMatch(gone)
	m.canaries.DeletePartialMatch(gone)
	m.frozen.DeletePartialMatch(gone)
	m.overSlots.DeletePartialMatch(gone)
	m.shortPulls.DeletePartialMatch(gone)
}

// gaugeValue returns the value of a gauge that says whether b is true: 1 or 0.
func gaugeValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
