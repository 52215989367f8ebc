package lease

import "time"

// Static is ownership without a lease and without a store. The home owns the scope while it
// lives; else the first dispatcher of an order that was seen alive lately does. In a network partition, a
// dispatcher that cannot see the home believes that it is the owner, so that there are two. So a taker uses only
// a share of the slots.
type Static struct {
	home, self string
	order      []string // who takes it over, first to last
	dead       time.Duration
	seen       map[string]time.Time
	begun      time.Time
}

// NewStatic begins to watch. A dispatcher counts as dead when it was not seen for the time
// dead, but not before it was watched for so long.
func NewStatic(self, home string, order []string, dead time.Duration, now time.Time) *Static {
	return &Static{home: home, self: self, order: order, dead: dead, seen: map[string]time.Time{}, begun: now}
}

// Saw records that a dispatcher answered a probe.
func (s *Static) Saw(id string, now time.Time) { s.seen[id] = now }

// Owner is the dispatcher that owns the scope now; empty: none of them is known to live.
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

// View returns Owner as a lease's view.
func (s *Static) View(now time.Time) View {
	v := View{Phase: Watching, Holder: s.Owner(now)}
	if v.Holder == s.self {
		v.Phase, v.Admits = Owner, true
	}
	return v
}

// alive says whether a dispatcher was seen lately. This dispatcher always is.
func (s *Static) alive(id string, now time.Time) bool {
	if id == s.self {
		return true
	}
	last, ok := s.seen[id]
	if !ok {
		last = s.begun
	}
	return now.Before(last.Add(s.dead))
}
