package gateway

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/config"
	"evenkeel/lease"
)

// HAStatus is this proxy among those that serve the same engines.
type HAStatus struct {
	Mode    string        `json:"mode"`
	Role    string        `json:"role"`    // owner: admits to some decode group; standby: to none, and forwards
	Members []string      `json:"members"` // that live and do not leave
	Groups  []GroupStatus `json:"groups"`
}

// GroupStatus is a decode group and who admits to it.
type GroupStatus struct {
	Group  string   `json:"group"`
	Phase  string   `json:"phase"`
	Admits bool     `json:"admits"`
	Holder string   `json:"holder"` // dispatcher's id; empty: nobody
	Epoch  int64    `json:"epoch"`
	Order  []string `json:"order"` // of those that should own it
	Up     int      `json:"engines_up"`
	All    int      `json:"engines"`
}

// HA says which decode groups this proxy owns; nil: it is alone.
func (g *Gateway) HA() *HAStatus {
	s := g.groups
	if s == nil {
		return nil
	}
	h := &HAStatus{Mode: g.conf().HA.Mode, Role: config.HAStandby, Groups: []GroupStatus{}}
	s.mu.Lock()
	h.Members = s.members.Order("")
	s.mu.Unlock()
	slices.Sort(h.Members)
	all := *s.all.Load()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		v := all[name].view.Load()
		if v.Admits {
			h.Role = "owner"
		}
		s.mu.Lock()
		order := s.members.Order(name)
		s.mu.Unlock()
		up, engines := g.fleet.groupUp(name)
		h.Groups = append(h.Groups, GroupStatus{
			Group: name, Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Order: order, Up: up, All: engines,
		})
	}
	return h
}

var (
	descHAOwner = prometheus.NewDesc("evenkeel_ha_owner", "1 while this proxy admits requests to the decode group.", []string{"group"}, nil)
	descHAEpoch = prometheus.NewDesc("evenkeel_ha_epoch", "Epoch of the decode group's ownership, as known here.", []string{"group"}, nil)
)

// Describe implements prometheus.Collector.
func (s *groups) Describe(ch chan<- *prometheus.Desc) {
	ch <- descHAOwner
	ch <- descHAEpoch
	s.taken.Describe(ch)
	s.after.Describe(ch)
}

// Collect implements prometheus.Collector.
func (s *groups) Collect(ch chan<- prometheus.Metric) {
	for name, a := range *s.all.Load() {
		v := a.view.Load()
		owner := 0.0
		if v.Admits {
			owner = 1
		}
		ch <- prometheus.MustNewConstMetric(descHAOwner, prometheus.GaugeValue, owner, name)
		ch <- prometheus.MustNewConstMetric(descHAEpoch, prometheus.GaugeValue, float64(v.Epoch), name)
	}
	s.taken.Collect(ch)
	s.after.Collect(ch)
}
