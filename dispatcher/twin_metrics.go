package dispatcher

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"evenkeel/dispatcher/board"
)

var (
	againstLabels = []string{"group", "against"}

	descTwinError = prometheus.NewDesc("evenkeel_twin_error_ratio", "Share of a step by which the replay under the policy in force may be "+
		"wrong. It is twice the deviation from the steps that the engines really made. Smaller differences do not count as saved or lost.",
		againstLabels[:1], nil)
	descTwinAge = prometheus.NewDesc("evenkeel_twin_age_seconds", "Time since the end of the minutes that the twin replayed last.",
		againstLabels[:1], nil)
	descTwinSaved = prometheus.NewDesc("evenkeel_twin_saved_seconds_total", "Time of steps that the policy in force saved against another "+
		"policy, by the twin's replays. Each step counts once. Differences no larger than the error of the replay do not count.", againstLabels,
		nil)
	descTwinLost = prometheus.NewDesc("evenkeel_twin_lost_seconds_total", "Time of steps that the policy in force lost against another "+
		"policy, by the twin's replays. Each step counts once. Differences no larger than the error of the replay do not count.", againstLabels,
		nil)
)

// twinGauges are the gauges of the groups for which the twin has a result. The twin replays the last minutes under other policies.
var twinGauges = gaugeSet{
	descs: []*prometheus.Desc{descTwinError, descTwinAge, descTwinSaved, descTwinLost},
	send: func(ch chan<- prometheus.Metric, g *board.GroupStatus, group string) {
		if g.Twin == nil {
			return
		}
		ch <- prometheus.MustNewConstMetric(descTwinError, prometheus.GaugeValue, g.Twin.ErrorRatio, group)
		ch <- prometheus.MustNewConstMetric(descTwinAge, prometheus.GaugeValue, g.Twin.AgeSeconds, group)
		for _, a := range g.Twin.Against {
			ch <- prometheus.MustNewConstMetric(descTwinSaved, prometheus.CounterValue, a.SavedSeconds, group, a.Policy)
			ch <- prometheus.MustNewConstMetric(descTwinLost, prometheus.CounterValue, a.LostSeconds, group, a.Policy)
		}
	},
}

// addTwin adds the metrics of the twin, which exist even if no policy is replayed. It returns the counter of the seconds that replays take.
func (m *metrics) addTwin() (work prometheus.Counter) {
	m.groupGauges = append(m.groupGauges, twinGauges)
	return promauto.With(m.registry).NewCounter(prometheus.CounterOpts{
		Name: "evenkeel_twin_work_seconds_total", Help: "Time that the twin spent on replays. It is at most a hundredth of one core.",
	})
}
