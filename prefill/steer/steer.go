// Package steer says where a prompt goes among candidates that could all have it:
// the policies that choose, and what overrules them (hotspots and the affinity of
// sessions). It has no clock, lock, log or metric: its owner gives it the time and
// tells of its outcomes.
package steer

// Steer is all of it. A change of configuration replaces Policies as a whole.
type Steer struct {
	*Policies
	Hotspots *Hotspots // nil: off
	Affinity *Affinity // nil: off
}

// Overrule sets what may overrule the policy. What a configuration leaves as it
// was keeps what it has seen.
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
