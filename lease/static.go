package lease

import "time"

// Static is ownership without a lease, for one binary and nothing else: the first of an order that was seen alive of late owns the scope,
// and its home always does when it lives. Who cannot see the home but is seen by its
// clients believes itself the owner: a partition makes two. So a taker uses only
// a share of the slots.
type Static struct {
	home, self string
	order      []string // who takes it over, first to last
	dead       time.Duration
	seen       map[string]time.Time
	begun      time.Time
}

// NewStatic begins to watch. Nobody is believed dead before they were watched
// for so long.
func NewStatic(self, home string, order []string, dead time.Duration, now time.Time) *Static {
	return &Static{home: home, self: self, order: order, dead: dead, seen: map[string]time.Time{}, begun: now}
}

// Saw tells that a dispatcher answered a probe.
func (s *Static) Saw(id string, now time.Time) { s.seen[id] = now }

// Owner is who owns the scope now; empty: nobody that is known to live.
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

// View is Owner as a lease would say it.
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
	last, ok := s.seen[id]
	if !ok {
		last = s.begun
	}
	return now.Before(last.Add(s.dead))
}
