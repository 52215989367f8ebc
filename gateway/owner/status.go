package owner

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/detect"
	"evenkeel/geo"
	"evenkeel/lease"
)

// ScopeStatus says which proxy owns a scope, and how many of its engines answer.
type ScopeStatus struct {
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"`
	Holder string `json:"holder"` // id of the proxy that owns it; empty: no proxy does
	Epoch  int64  `json:"epoch"`
	Up     int    `json:"engines_up"`
	All    int    `json:"engines"`
	Away   bool   `json:"store_away,omitempty"` // the store of leases fails, or is too slow
}

// RegionStatus is the status of a region whose engines this proxy may serve.
type RegionStatus struct {
	Region string `json:"region"`
	Home   bool   `json:"home"`
	ScopeStatus
	Rank int `json:"rank"` // place of this proxy among the proxies that may take the region over; 0 is the first
}

// HAStatus is the status of this proxy among the proxies that serve the same engines.
type HAStatus struct {
	Mode    string        `json:"mode"`
	Role    string        `json:"role"`    // owner: owns a decode group; standby: owns none, and forwards requests
	Members []string      `json:"members"` // live proxies that are not shutting down
	Groups  []GroupStatus `json:"groups"`
}

// GroupStatus is the status of a decode group: which proxy owns it and which should.
type GroupStatus struct {
	Group string `json:"group"`
	ScopeStatus
	Order   []string `json:"order"`                    // proxies in the order in which they should own the group
	Pledged bool     `json:"pledged,omitempty"`        // this proxy owns it only by the promises of all other members
	Differs bool     `json:"members_differ,omitempty"` // the holder of the lease has another list in ha.members than this proxy
}

// statusOf returns the status of a scope, from the view of its claim and the number of engines that answer.
func statusOf(v *lease.View, r Reach) ScopeStatus {
	return ScopeStatus{Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Up: r.Up, All: r.All,
		Away: v.StoreAway}
}

// RegionsStatus lists the regions whose engines this proxy may serve, its own region first; nil: regions have no
// owners.
func (s *Set) RegionsStatus() (list []RegionStatus) {
	if !s.Has(Regions) {
		return nil
	}
	reach, all, n := s.deps.Engines(), *s.all.Load(), s.standing.(*neighbours)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		status := RegionStatus{Region: name, Home: a.home, ScopeStatus: statusOf(a.view.Load(), reach[name]), Rank: n.rank(a)}
		if a.home {
			list = slices.Insert(list, 0, status)
		} else {
			list = append(list, status)
		}
	}
	return list
}

// GroupsStatus says which proxy owns which decode group; nil: groups have no owners.
func (s *Set) GroupsStatus() *HAStatus {
	if !s.Has(Groups) {
		return nil
	}
	siblings, all, reach := s.standing.(*siblings), *s.all.Load(), s.deps.Engines()
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

// Facts fills in which regions and decode groups this proxy may serve, and its role among the proxies that serve the same engines.
func (s *Set) Facts(f *detect.Facts) {
	for _, a := range s.RegionsStatus() {
		f.Scopes = append(f.Scopes,
			detect.Scope{Region: a.Region, Home: a.Home, Phase: a.Phase, Admits: a.Admits, Holder: a.Holder, Epoch: a.Epoch})
	}
	if ha := s.GroupsStatus(); ha != nil {
		f.Proxy.Role = ha.Role
		for _, a := range ha.Groups {
			f.Scopes = append(f.Scopes,
				detect.Scope{Region: f.Proxy.Region, Group: a.Group, Home: true, Phase: a.Phase, Admits: a.Admits, Holder: a.Holder, Epoch: a.Epoch})
		}
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
			m.admits: bit[v.Admits], m.epoch: float64(v.Epoch), m.away: bit[v.StoreAway], m.takeover: bit[v.Admits && !a.home],
			m.pledged: bit[v.Voted], m.differs: bit[v.Differs],
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
