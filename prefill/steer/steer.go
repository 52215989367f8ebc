// Package steer holds the policies that choose a candidate for a prompt, and two mechanisms that
// may overrule them: hotspots and session affinity. It has no clock, lock, log or metric: its owner
// passes the time and reports the results.
package steer

// Overrides holds the policies and what overrules them. A new configuration replaces Policies as a
// whole.
type Overrides struct {
	*Policies
	Hotspots *Hotspots // nil: not detected
	Affinity *Affinity // nil: sessions do not stay with their engine
}

// Configure configures the mechanisms. One that stays on keeps its state.
func (o *Overrides) Configure(hotspots bool, a AffinityConfig) {
	switch {
	case !hotspots:
		o.Hotspots = nil
	case o.Hotspots == nil:
		o.Hotspots = NewHotspots()
	}
	switch {
	case !a.Enabled:
		o.Affinity = nil
	case o.Affinity == nil:
		o.Affinity = NewAffinity(a)
	}
}
