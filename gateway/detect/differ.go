package detect

import (
	"cmp"
	"fmt"
	"slices"

	"evenkeel/internal/stats"
)

// gauge is a value that engines report of each rank. A rank differs if its value is above the
// group's median by more than leastExcess, half of the median, and several times the usual distance
// from it. A rank with less work makes no step longer, so a low value does not count.
type gauge struct {
	name        string
	leastExcess float64
	value       func(*Gauges) float64
	describe    func(value, middle float64) string
}

var gauges = []gauge{
	{"running", 8, func(g *Gauges) float64 { return g.Running }, func(v, m float64) string {
		return fmt.Sprintf("runs %s requests, and the middle one of the group %s", grouped(v), grouped(m))
	}},
	{"waiting", 4, func(g *Gauges) float64 { return g.Waiting }, func(v, m float64) string {
		return fmt.Sprintf("has %s requests in its queue, and the middle one of the group %s", grouped(v), grouped(m))
	}},
	{"kv_share", 0.15, func(g *Gauges) float64 { return g.KVShare }, func(v, m float64) string {
		return fmt.Sprintf("uses %.0f %% of its KV memory, and the middle one of the group %.0f %%", 100*v, 100*m)
	}},
	{"preempted", 3, func(g *Gauges) float64 { return g.Preempted }, func(v, m float64) string {
		return fmt.Sprintf("preempted %s requests between the last two readings, and the middle one of the group %s", grouped(v), grouped(m))
	}},
	{"computed_tokens", 1000, func(g *Gauges) float64 { return g.Computed }, func(v, m float64) string {
		return fmt.Sprintf("computed %s prompt tokens between the last two readings, because it got no KV for them, and the middle one of the "+
			"group %s",
			grouped(v), grouped(m))
	}},
}

const (
	differShare = 0.5 // share of the median by which a value must exceed the median
	differApart = 6   // number of median absolute deviations by which a value must exceed the median
)

func grouped(v float64) string { return stats.Grouped(int(v)) }

// gaugesFarAboveOthers lists the farthest first, and leaves out a gauge that fewer than differRanks
// ranks report.
func gaugesFarAboveOthers(g *Group) []Differs {
	type far struct {
		Differs
		timesLimit float64 // to compare different gauges
	}
	var all []far
	for _, gauge := range gauges {
		var values []float64
		for i := range g.Ranks {
			if v := g.gaugeOf(i, gauge); v >= 0 {
				values = append(values, v)
			}
		}
		if len(values) < differRanks {
			continue
		}
		middle, limit := gauge.medianAndLimit(values)
		for i := range g.Ranks {
			if v := g.gaugeOf(i, gauge); v-middle > limit { // an unknown value is below 0
				all = append(all, far{Differs{
					Rank: g.Ranks[i].Name, Gauge: gauge.name, Value: v, Median: middle, Says: gauge.describe(v, middle),
				}, (v - middle) / limit})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b far) int { return cmp.Compare(b.timesLimit, a.timesLimit) })
	list := make([]Differs, len(all))
	for i := range all {
		list[i] = all[i].Differs
	}
	return list
}

// medianAndLimit sorts the values, of which there must be at least one.
func (g gauge) medianAndLimit(values []float64) (middle, limit float64) {
	slices.Sort(values)
	middle = stats.Median(values)
	var distances []float64 // from the median
	for _, v := range values {
		distances = append(distances, max(v-middle, middle-v))
	}
	slices.Sort(distances)
	return middle, max(g.leastExcess, differShare*middle, differApart*stats.Median(distances))
}

// gaugeOf is below 0 if it is not known, or the rank does not step with its group.
func (g *Group) gaugeOf(rank int, gauge gauge) float64 {
	if !g.hasGauges(rank) {
		return -1
	}
	return gauge.value(g.Gauges[rank])
}

func (g *Group) hasGauges(rank int) bool {
	return rank < len(g.Gauges) && g.Gauges[rank] != nil && g.Ranks[rank].InSteps
}
