package owner

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/geo"
	"evenkeel/lease"
)

// AreaStatus is who admits to an area, and how its engines are.
type AreaStatus struct {
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"`
	Holder string `json:"holder"` // dispatcher's id; empty: nobody
	Epoch  int64  `json:"epoch"`
	Up     int    `json:"engines_up"`
	All    int    `json:"engines"`
	Away   bool   `json:"store_away,omitempty"` // the store of leases fails or is too slow
}

// RegionStatus is a region whose engines may be ours.
type RegionStatus struct {
	Region string `json:"region"`
	Home   bool   `json:"home"`
	AreaStatus
	Rank int `json:"rank"` // among those that may take it
}

// HAStatus is this proxy among those that serve the same engines.
type HAStatus struct {
	Mode    string        `json:"mode"`
	Role    string        `json:"role"`    // owner: admits to some decode group; standby: to none, and forwards
	Members []string      `json:"members"` // that live and do not leave
	Groups  []GroupStatus `json:"groups"`
}

// GroupStatus is a decode group and who admits to it.
type GroupStatus struct {
	Group string `json:"group"`
	AreaStatus
	Order   []string `json:"order"`                    // of those that should own it
	Pledged bool     `json:"pledged,omitempty"`        // it is ours by the promises of all other members alone
	Differs bool     `json:"members_differ,omitempty"` // its holder has another list in ha.members than this proxy
}

func statusOf(v *lease.View, r Reach) AreaStatus {
	return AreaStatus{Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Up: r.Up, All: r.All, Away: v.Away}
}

// RegionsStatus lists the regions whose engines this proxy may serve, its own
// first; none without ownership.
func (s *Set) RegionsStatus() (list []RegionStatus) {
	if !s.Has(Regions) {
		return nil
	}
	reach, all, n := s.host.Engines(), *s.all.Load(), s.standing.(*neighbours)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		one := RegionStatus{Region: name, Home: a.home, AreaStatus: statusOf(a.view.Load(), reach[name]), Rank: n.rank(a)}
		if list = append(list, one); a.home {
			copy(list[1:], list)
			list[0] = one
		}
	}
	return list
}

// GroupsStatus says which decode groups this proxy owns; nil: it is alone.
func (s *Set) GroupsStatus() *HAStatus {
	if !s.Has(Groups) {
		return nil
	}
	o, all, reach := s.standing.(*siblings), *s.all.Load(), s.host.Engines()
	h := &HAStatus{Mode: s.conf.HA.Mode, Role: geo.HAStandby, Members: o.live(), Groups: []GroupStatus{}}
	slices.Sort(h.Members)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		v := a.view.Load()
		if v.Admits {
			h.Role = "owner"
		}
		h.Groups = append(h.Groups, GroupStatus{Group: name, AreaStatus: statusOf(v, reach[name]), Order: o.order(a), Pledged: v.Pledged, Differs: v.Differs})
	}
	return h
}

// metrics are a Set's series. It implements prometheus.Collector.
type metrics struct {
	set    *Set
	admits *prometheus.Desc
	epoch  *prometheus.Desc
	away   *prometheus.Desc

	takeover *prometheus.Desc // regions

	pledged *prometheus.Desc // groups
	differs *prometheus.Desc
	taken   *prometheus.CounterVec
	after   prometheus.Histogram
}

func newMetrics(s *Set) *metrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, []string{string(s.kind)}, nil)
	}
	const away = "1 while the store of the lease fails, or answers too slowly for an owner to renew in time."
	if s.kind == Regions {
		return &metrics{
			set: s, admits: desc("evenkeel_geo_owner", "1 while this proxy admits requests to the region's engines. Only with geo.ownership."),
			epoch:    desc("evenkeel_geo_epoch", "Epoch of the region's ownership, the highest known here. It is 0 with a static order."),
			away:     desc("evenkeel_geo_lease_store_away", away),
			takeover: desc("evenkeel_geo_takeover_active", "1 while this proxy serves the engines of a region that is not its own."),
		}
	}
	return &metrics{
		set: s, admits: desc("evenkeel_ha_owner", "1 while this proxy admits requests to the decode group."),
		epoch:   desc("evenkeel_ha_epoch", "Epoch of the decode group's ownership, the highest known here."),
		away:    desc("evenkeel_ha_lease_store_away", away),
		pledged: desc("evenkeel_ha_pledged", "1 while this proxy admits requests only because all other members have promised not to take over (ha.members), and the store of the lease confirms nothing."),
		differs: desc("evenkeel_ha_members_differ", "1 while the holder of the decode group's lease has another list in ha.members than this proxy. While that is so, no owner goes on when the store of the lease is away."),
		taken:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_ha_acquired_total", Help: "Times that the decode group became this proxy's, with a new epoch."}, []string{"group"}),
		after: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "evenkeel_ha_takeover_seconds", Help: "Time from the last sign of a group's former owner until this proxy admitted requests to the group. It is short after a hand-over, and longer than a lease after the owner died.", Buckets: s.host.Buckets,
		}),
	}
}

// took counts a takeover, and how long it took if there was an owner before.
func (m *metrics) took(area string, after time.Duration, before bool) {
	if m.taken == nil {
		return
	}
	m.taken.WithLabelValues(area).Inc()
	if before {
		m.after.Observe(after.Seconds())
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.admits, m.epoch, m.away, m.takeover, m.pledged, m.differs} {
		if d != nil {
			ch <- d
		}
	}
	if m.taken != nil {
		m.taken.Describe(ch)
		m.after.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	bit := map[bool]float64{true: 1}
	for name, a := range *m.set.all.Load() {
		v := a.view.Load()
		for desc, value := range map[*prometheus.Desc]float64{
			m.admits: bit[v.Admits], m.epoch: float64(v.Epoch), m.away: bit[v.Away], m.takeover: bit[v.Admits && !a.home], m.pledged: bit[v.Pledged], m.differs: bit[v.Differs],
		} {
			if desc != nil {
				ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, name)
			}
		}
	}
	if m.taken != nil {
		m.taken.Collect(ch)
		m.after.Collect(ch)
	}
}
