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
	Phase     string `json:"phase"`
	Admits    bool   `json:"admits"`
	Holder    string `json:"holder"` // id of the proxy that owns the scope; empty: no proxy does
	Epoch     int64  `json:"epoch"`
	Up        int    `json:"engines_up"`
	All       int    `json:"engines"`
	StoreAway bool   `json:"store_away,omitempty"` // the store of leases fails, or is too slow
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
	Order         []string `json:"order"`                    // proxies in the order in which they should own the group
	Voted         bool     `json:"pledged,omitempty"`        // this proxy owns the group only by the promises of all other members
	MembersDiffer bool     `json:"members_differ,omitempty"` // the holder of the lease has another list in ha.members than this proxy
}

func statusOf(v *lease.View, engines EngineCounts) ScopeStatus {
	return ScopeStatus{Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch,
		Up: engines.Up, All: engines.All, StoreAway: v.StoreAway}
}

// RegionsStatus lists this proxy's own region first; nil: regions have no owners.
func (s *Set) RegionsStatus() (list []RegionStatus) {
	if !s.Has(Regions) {
		return nil
	}
	engines, all := s.deps.Engines(), *s.all.Load()
	neighbours := s.succession.(*neighbours) // always of this type
	for _, name := range slices.Sorted(maps.Keys(all)) {
		scope := all[name]
		status := RegionStatus{Region: name, Home: scope.home, ScopeStatus: statusOf(scope.view.Load(), engines[name]),
			Rank: neighbours.takeoverRank(scope)}
		if scope.home {
			list = slices.Insert(list, 0, status)
		} else {
			list = append(list, status)
		}
	}
	return list
}

// GroupsStatus is nil if groups have no owners.
func (s *Set) GroupsStatus() *HAStatus {
	if !s.Has(Groups) {
		return nil
	}
	all := *s.all.Load()
	engineCounts := s.deps.Engines()     // after all, so that it has the engines of a new group
	siblings := s.succession.(*siblings) // always of this type
	const owner, standby = "owner", geo.HAStandby
	status := &HAStatus{Mode: s.conf.HA.Mode, Role: standby, Members: siblings.liveMembers(), Groups: []GroupStatus{}}
	slices.Sort(status.Members)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		scope := all[name]
		v := scope.view.Load()
		if v.Admits {
			status.Role = owner
		}
		status.Groups = append(status.Groups,
			GroupStatus{Group: name, ScopeStatus: statusOf(v, engineCounts[name]), Order: siblings.ownerOrder(scope), Voted: v.Voted,
				MembersDiffer: v.MembersDiffer})
	}
	return status
}

// Facts fills in what this proxy may serve, and its role.
func (s *Set) Facts(f *detect.Facts) {
	for _, r := range s.RegionsStatus() {
		f.Scopes = append(f.Scopes,
			detect.Scope{Region: r.Region, Home: r.Home, Phase: r.Phase, Admits: r.Admits, Holder: r.Holder, Epoch: r.Epoch})
	}
	if ha := s.GroupsStatus(); ha != nil {
		f.Proxy.Role = ha.Role
		for _, g := range ha.Groups {
			f.Scopes = append(f.Scopes,
				detect.Scope{Region: f.Proxy.Region, Group: g.Group, Home: true, Phase: g.Phase, Admits: g.Admits, Holder: g.Holder, Epoch: g.Epoch})
		}
	}
}

func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.admits, m.epoch, m.storeAway, m.servesForeign, m.voted, m.membersDiffer} {
		if d != nil { // nil: only for the other kind
			ch <- d
		}
	}
	if m.takeovers != nil { // only decode groups have these
		m.takeovers.Describe(ch)
		m.takeoverSeconds.Describe(ch)
	}
}

func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	bit := map[bool]float64{true: 1}
	for name, scope := range *m.set.all.Load() {
		v := scope.view.Load()
		// Absent metrics share the key nil, and are skipped.
		for desc, value := range map[*prometheus.Desc]float64{
			m.admits: bit[v.Admits], m.epoch: float64(v.Epoch), m.storeAway: bit[v.StoreAway], m.servesForeign: bit[v.Admits && !scope.home],
			m.voted: bit[v.Voted], m.membersDiffer: bit[v.MembersDiffer],
		} {
			if desc != nil {
				ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, name)
			}
		}
	}
	if m.takeovers != nil { // only decode groups have these
		m.takeovers.Collect(ch)
		m.takeoverSeconds.Collect(ch)
	}
}
