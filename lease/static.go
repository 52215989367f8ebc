package lease

import "time"

// Static is ownership without a lease and without a store. The home owns the scope while it is
// alive, else the first proxy of a fixed order that is alive. In a network partition, a proxy that
// cannot reach the home also takes the scope, so that there are two owners. An owner other than the
// home therefore uses only a share of the slots.
type Static struct {
	home, self string
	order      []string // that may take the scope over, the preferred one first
	deadAfter  time.Duration
	lastSeen   map[string]time.Time
	startedAt  time.Time
}

// NewStatic begins to watch the other proxies; at the start, all count as just seen.
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

// View is as that of a lease, so that callers need not distinguish the two; Epoch is always 0.
func (s *Static) View(now time.Time) View {
	v := View{Phase: Watching, Holder: s.Owner(now)}
	if v.Holder == s.self {
		v.Phase, v.Admits = Owner, true
	}
	return v
}

func (s *Static) alive(id string, now time.Time) bool {
	if id == s.self {
		return true
	}
	lastSeen, wasSeen := s.lastSeen[id]
	if !wasSeen {
		lastSeen = s.startedAt
	}
	return now.Before(lastSeen.Add(s.deadAfter))
}
