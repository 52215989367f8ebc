package owner

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/geo"
	"evenkeel/lease"
)

// ScopeStatus is who admits to a scope, and how its engines are.
type ScopeStatus struct {
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"`
	Holder string `json:"holder"` // id of the proxy that owns it; empty: no proxy does
	Epoch  int64  `json:"epoch"`
	Up     int    `json:"engines_up"`
	All    int    `json:"engines"`
	Away   bool   `json:"store_away,omitempty"` // the store of leases fails or is too slow
}

// RegionStatus is a region whose engines may be ours.
type RegionStatus struct {
	Region string `json:"region"`
	Home   bool   `json:"home"`
	ScopeStatus
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
	ScopeStatus
	Order   []string `json:"order"`                    // of those that should own it
	Pledged bool     `json:"pledged,omitempty"`        // it is ours by the promises of all other members alone
	Differs bool     `json:"members_differ,omitempty"` // its holder has another list in ha.members than this proxy
}

// statusOf is the status of a scope, by the view of its claim and the engines that answer.
func statusOf(v *lease.View, r Reach) ScopeStatus {
	return ScopeStatus{Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Up: r.Up, All: r.All,
		Away: v.Away}
}

// RegionsStatus lists the regions whose engines this proxy may serve, its own region first; nil: regions have no
// owners.
func (s *Set) RegionsStatus() (list []RegionStatus) {
	if !s.Has(Regions) {
		return nil
	}
	reach, all, n := s.host.Engines(), *s.all.Load(), s.standing.(*neighbours)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		status := RegionStatus{Region: name, Home: a.home, ScopeStatus: statusOf(a.view.Load(), reach[name]), Rank: n.rank(a)}
		if list = append(list, status); a.home {
			copy(list[1:], list)
			list[0] = status
		}
	}
	return list
}

// GroupsStatus says who owns which decode group; nil: groups have no owners.
func (s *Set) GroupsStatus() *HAStatus {
	if !s.Has(Groups) {
		return nil
	}
	siblings, all, reach := s.standing.(*siblings), *s.all.Load(), s.host.Engines()
	status := &HAStatus{Mode: s.conf.HA.Mode, Role: geo.HAStandby, Members: siblings.live(), Groups: []GroupStatus{}}
	slices.Sort(status.Members)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		v := a.view.Load()
		if v.Admits {
			status.Role = "owner"
		}
		status.Groups = append(status.Groups,
			GroupStatus{Group: name, ScopeStatus: statusOf(v, reach[name]), Order: siblings.order(a), Pledged: v.Voted, Differs: v.Differs})
	}
	return status
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
			m.admits: bit[v.Admits], m.epoch: float64(v.Epoch), m.away: bit[v.Away], m.takeover: bit[v.Admits && !a.home], m.pledged: bit[v.Voted],
			m.differs: bit[v.Differs],
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
