// Package steer decides where a prompt goes among candidates that could all take it: by the policies that choose, and
// by what overrules them (hotspots and the affinity of sessions). It has no clock, lock, log or metric: its owner
// gives it the time and reports what came of it.
package steer

// Steer is the policies and what overrules them. A change of configuration replaces Policies as a whole.
type Steer struct {
	*Policies
	Hotspots *Hotspots // nil: off
	Affinity *Affinity // nil: off
}

// Overrule sets what may overrule the policy. If a part is configured as before, it keeps what it has seen.
func (s *Steer) Overrule(hotspots bool, a AffinityConfig) {
	switch {
	case !hotspots:
		s.Hotspots = nil
	case s.Hotspots == nil:
		s.Hotspots = NewHotspots()
	}
	switch {
	case !a.Enabled:
		s.Affinity = nil
	case s.Affinity == nil || s.Affinity.ttl != a.TTL || s.Affinity.most != a.MaxKeys:
		s.Affinity = NewAffinity(a)
	default:
		s.Affinity.factor = a.LoadFactor
	}
}
