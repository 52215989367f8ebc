// Package steer helps to choose among the candidates that could take a prompt. It holds the policies, and two mechanisms
// that may overrule a policy: hotspots and session affinity. It has no clock, lock, log or metric: its owner passes the
// time and reports the results.
package steer

// Overrides holds the policies and the mechanisms that overrule them. A new configuration replaces Policies as a whole.
type Overrides struct {
	*Policies
	Hotspots *Hotspots // nil: off
	Affinity *Affinity // nil: off
}

// Overrule configures the mechanisms that may overrule a policy. A mechanism whose configuration does not change keeps its
// state.
func (s *Overrides) Overrule(hotspots bool, a AffinityConfig) {
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
