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

// Configure configures the mechanisms that may overrule a policy. A mechanism whose configuration does not change keeps its
// state, as does Affinity if only its load factor changes.
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
	case o.Affinity == nil || o.Affinity.ttl != a.TTL || o.Affinity.maxSessions != a.MaxKeys: // what it remembers was bounded otherwise
		o.Affinity = NewAffinity(a)
	default: // only the load factor may have changed
		o.Affinity.loadFactor = a.LoadFactor
	}
}
