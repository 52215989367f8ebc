package gateway

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/lease"
)

// AreaStatus is a region whose engines may be ours.
type AreaStatus struct {
	Region string `json:"region"`
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"`
	Holder string `json:"holder"` // dispatcher's id; empty: nobody
	Epoch  int64  `json:"epoch"`
	Rank   int    `json:"rank"` // among those that may take it
	Up     int    `json:"engines_up"`
	All    int    `json:"engines"`
}

// Owners lists the regions whose engines this proxy may serve; none without
// ownership.
func (g *Gateway) Owners() (list []AreaStatus) {
	o := g.owners
	if o == nil {
		return nil
	}
	for _, name := range o.names {
		a := o.areas[name]
		v := a.view.Load()
		up, all := g.fleet.reach(name)
		list = append(list, AreaStatus{
			Region: name, Home: a.home, Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Rank: o.rank(a), Up: up, All: all,
		})
	}
	return list
}

var (
	descOwner    = prometheus.NewDesc("evenkeel_geo_owner", "1 while this proxy admits requests to the region's engines.", []string{"region"}, nil)
	descEpoch    = prometheus.NewDesc("evenkeel_geo_epoch", "Epoch of the region's ownership, as known here; 0 with a static order.", []string{"region"}, nil)
	descTakeover = prometheus.NewDesc("evenkeel_geo_takeover_active", "1 while this proxy serves the engines of another's region.", []string{"region"}, nil)
)

// Describe implements prometheus.Collector.
func (o *owners) Describe(ch chan<- *prometheus.Desc) {
	ch <- descOwner
	ch <- descEpoch
	ch <- descTakeover
}

// Collect implements prometheus.Collector.
func (o *owners) Collect(ch chan<- prometheus.Metric) {
	for _, name := range slices.Sorted(maps.Keys(o.areas)) {
		a := o.areas[name]
		v := a.view.Load()
		bit := func(b bool) float64 {
			if b {
				return 1
			}
			return 0
		}
		for desc, value := range map[*prometheus.Desc]float64{descOwner: bit(v.Admits), descEpoch: float64(v.Epoch), descTakeover: bit(v.Admits && !a.home)} {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, name)
		}
	}
}
