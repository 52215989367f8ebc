package lease

import "time"

// Static is ownership without a lease and without a store. The home owns the scope while it is alive, else the first
// proxy of a fixed order that is alive. In a network partition, a proxy that cannot reach the home also takes
// the scope, so that there are two owners. An owner other than the home therefore uses only a share of the slots.
type Static struct {
	home, self string
	order      []string             // the proxies that may take the scope over, the first one preferred
	deadAfter  time.Duration        // a proxy counts as dead if it was not seen for this time
	lastSeen   map[string]time.Time // by proxy: when it last answered a probe
	startedAt  time.Time            // a proxy that was never seen counts as seen then
}

// NewStatic begins to watch the other proxies. A proxy counts as alive until it was not seen for the time deadAfter; at
// the start, all count as just seen. order lists the proxies that may take the scope over from home, the preferred one first.
func NewStatic(self, home string, order []string, deadAfter time.Duration, now time.Time) *Static {
	return &Static{home: home, self: self, order: order, deadAfter: deadAfter, lastSeen: map[string]time.Time{}, startedAt: now}
}

// Saw records that a proxy answered a probe.
func (s *Static) Saw(id string, now time.Time) { s.lastSeen[id] = now }

// Owner is the proxy that owns the scope now; empty: none is alive.
func (s *Static) Owner(now time.Time) string {
	if s.alive(s.home, now) {
		return s.home
	}
	for _, id := range s.order {
		if s.alive(id, now) {
			return id
		}
	}
	return ""
}

// View returns the ownership as a lease would, so that callers need not distinguish the two; Epoch is always 0.
func (s *Static) View(now time.Time) View {
	v := View{Phase: Watching, Holder: s.Owner(now)}
	if v.Holder == s.self {
		v.Phase, v.Admits = Owner, true
	}
	return v
}

// alive reports whether a proxy has answered a probe within deadAfter. This proxy itself is always alive.
func (s *Static) alive(id string, now time.Time) bool {
	if id == s.self {
		return true
	}
	lastSeen, wasSeen := s.lastSeen[id]
	if !wasSeen { // it counts as seen at the start
		lastSeen = s.startedAt
	}
	return now.Before(lastSeen.Add(s.deadAfter))
}
