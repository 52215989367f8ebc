// Package steer helps to choose among the candidates that could take a prompt. It holds the policies, and two mechanisms
// that may overrule a policy: hotspots and session affinity. It has no clock, lock, log or metric: its owner passes the
// time and reports the results.
package steer

// Overrides holds the policies and the mechanisms that overrule them. A new configuration replaces Policies as a whole.
type Overrides struct {
	*Policies
	Hotspots *Hotspots // nil: hotspots are not detected
	Affinity *Affinity // nil: sessions do not stay with their engine
}

// Configure configures the mechanisms that may overrule a policy. A mechanism that stays on keeps
// its state.
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
