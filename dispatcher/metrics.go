package dispatcher

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// observer is the part of a histogram the tick uses.
type observer = prometheus.Observer

// metrics are what the loop counts as it goes. Everything that is a state and
// not an event is read from a Status when somebody scrapes.
type metrics struct {
	tickSeconds    *prometheus.HistogramVec
	fallbacks      *prometheus.CounterVec
	invalid        *prometheus.CounterVec
	doubleReleases prometheus.Counter
}

func newMetrics() *metrics {
	return &metrics{
		tickSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "evenkeel_tick_seconds", Help: "Time of one decision round: snapshot and policy.",
			Buckets: prometheus.ExponentialBuckets(10e-6, 2, 14), // 10 µs to 82 ms
		}, []string{"policy"}),
		fallbacks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_tick_fallbacks_total", Help: "Ticks whose policy failed, so that " + fallbackSpec + " took over.",
		}, []string{"reason"}),
		invalid: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_invalid_assignments_total", Help: "Assignments of a policy that were not bound because they break a hard limit.",
		}, []string{"fault"}),
		doubleReleases: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "evenkeel_double_releases_total", Help: "Slots released a second time; a bug, without effect on the books.",
		}),
	}
}

func (m *metrics) tick(policy string) observer { return m.tickSeconds.WithLabelValues(policy) }

func (m *metrics) register(r prometheus.Registerer, d *Dispatcher) error {
	if r == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{m.tickSeconds, m.fallbacks, m.invalid, m.doubleReleases, gauges{d}} {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("dispatcher: %w; give every dispatcher a registerer of its own", err)
		}
	}
	return nil
}

// gauges reads one Status for each scrape.
type gauges struct{ d *Dispatcher }

var (
	rankLabels     = []string{"group", "rank"}
	descKVTokens   = prometheus.NewDesc("evenkeel_rank_kv_tokens", "KV tokens the rank's requests hold, by our count.", rankLabels, nil)
	descSlots      = prometheus.NewDesc("evenkeel_rank_slots", "Slots of the rank by state.", append(rankLabels, "state"), nil)
	descRunning    = prometheus.NewDesc("evenkeel_rank_running", "Requests whose first event was seen.", rankLabels, nil)
	descImbalance  = prometheus.NewDesc("evenkeel_imbalance_tokens", "Sum over the group's ranks of the largest KV load less their own.", rankLabels[:1], nil)
	descIdle       = prometheus.NewDesc("evenkeel_idle_share_ratio", "Imbalance over ranks times largest load.", rankLabels[:1], nil)
	descPool       = prometheus.NewDesc("evenkeel_pool_entries", "Finished prefills that wait for a decode rank.", nil, nil)
	descPoolOldest = prometheus.NewDesc("evenkeel_pool_oldest_seconds", "Longest time any of them has waited.", nil, nil)
	descDriftSlots = describeDrift("slots")
	descDriftKV    = describeDrift("kv_tokens")
)

// describeDrift fixes the kind, because the prefill tier exports the same
// metric for its own.
func describeDrift(kind string) *prometheus.Desc {
	return prometheus.NewDesc("evenkeel_audit_drift", "Charged minus released minus held; anything but 0 is a bug.", nil, prometheus.Labels{"kind": kind})
}

// Describe implements prometheus.Collector.
func (gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descKVTokens, descSlots, descRunning, descImbalance, descIdle, descPool, descPoolOldest, descDriftSlots, descDriftKV} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	s := g.d.Status(ctx)
	if ctx.Err() != nil {
		return // the loop is stuck; absent gauges say so, stale ones would not
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	entries, oldest := 0, 0.0
	names := labelsOf(s)
	for _, m := range s.Models {
		entries += m.Pool
		oldest = max(oldest, m.OldestSeconds)
		for _, w := range m.Workers {
			group, rank := names.group(m.Model, w.Group), names.rank(w)
			gauge(descKVTokens, float64(w.KVTokens), group, rank)
			gauge(descSlots, float64(max(0, w.Slots-w.Used)), group, rank, "free")
			gauge(descSlots, float64(w.Used), group, rank, "used")
			gauge(descRunning, float64(w.Running), group, rank)
		}
		for _, q := range m.Groups {
			if q.Barrier {
				gauge(descImbalance, float64(q.ImbalanceTokens), names.group(m.Model, q.Name))
				gauge(descIdle, q.IdleShare, names.group(m.Model, q.Name))
			}
		}
	}
	gauge(descPool, float64(entries))
	gauge(descPoolOldest, oldest)
	gauge(descDriftSlots, float64(s.Drift.Slots))
	gauge(descDriftKV, float64(s.Drift.KVTokens))
}

// labels keeps series apart where names alone do not: one duplicate would
// make the whole scrape fail.
type labels struct {
	models map[string]map[string]bool // models that use a group's name
	names  map[string]int             // workers that use a name
}

func labelsOf(s Status) labels {
	l := labels{models: map[string]map[string]bool{}, names: map[string]int{}}
	for _, m := range s.Models {
		for _, w := range m.Workers {
			if l.models[w.Group] == nil {
				l.models[w.Group] = map[string]bool{}
			}
			l.models[w.Group][m.Model] = true
			l.names[w.Name]++
		}
	}
	return l
}

func (l labels) group(model, name string) string {
	if len(l.models[name]) > 1 {
		return model + "/" + name
	}
	return name
}

func (l labels) rank(w WorkerStatus) string {
	if w.Name == "" || l.names[w.Name] > 1 {
		return fmt.Sprintf("%s#%d", w.Name, w.ID)
	}
	return w.Name
}
