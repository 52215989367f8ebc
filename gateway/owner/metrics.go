package owner

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	set       *Set
	admits    *prometheus.Desc
	epoch     *prometheus.Desc
	storeAway *prometheus.Desc

	servesForeign *prometheus.Desc // nil if the scopes are decode groups

	// The fields below are nil for regions.
	voted           *prometheus.Desc
	membersDiffer   *prometheus.Desc
	takeovers       *prometheus.CounterVec
	takeoverSeconds prometheus.Histogram
}

func newMetrics(s *Set) *metrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, []string{string(s.kind)}, nil)
	}
	const away = "1 while the store of the lease fails, or answers too slowly for an owner to renew in time."
	if s.kind == Regions {
		return &metrics{
			set: s, admits: desc("evenkeel_geo_owner", "1 while this proxy admits requests to the region's engines. Only with geo.ownership."),
			epoch:         desc("evenkeel_geo_epoch", "Epoch of the region's ownership, the highest known here. It is 0 with a static order."),
			storeAway:     desc("evenkeel_geo_lease_store_away", away),
			servesForeign: desc("evenkeel_geo_takeover_active", "1 while this proxy serves the engines of a region that is not its own."),
		}
	}
	return &metrics{
		set: s, admits: desc("evenkeel_ha_owner", "1 while this proxy admits requests to the decode group."),
		epoch:     desc("evenkeel_ha_epoch", "Epoch of the decode group's ownership, the highest known here."),
		storeAway: desc("evenkeel_ha_lease_store_away", away),
		voted: desc("evenkeel_ha_pledged", "1 while this proxy admits requests only because all other members have promised not to take over "+
			"(ha.members), and the store of the lease confirms nothing."),
		membersDiffer: desc("evenkeel_ha_members_differ", "1 while the holder of the decode group's lease has another list in ha.members than "+
			"this proxy. While that is so, no owner goes on when the store of the lease is away."),
		takeovers: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_ha_acquired_total",
			Help: "Times that the decode group became this proxy's, with a new epoch."}, []string{"group"}),
		takeoverSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "evenkeel_ha_takeover_seconds", Help: "Time from the last sign of a group's former owner until this proxy admitted requests to " +
				"the group. It is short after a hand-over, and longer than a lease after the owner died.", Buckets: s.deps.Buckets,
		}),
	}
}

// after is the time since the last owner's sign of life, if hadOwner.
func (m *metrics) countTakeover(group string, after time.Duration, hadOwner bool) {
	if m.takeovers == nil {
		return
	}
	m.takeovers.WithLabelValues(group).Inc()
	if hadOwner {
		m.takeoverSeconds.Observe(after.Seconds())
	}
}
