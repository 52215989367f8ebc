package lease

import (
	"cmp"
	"hash/fnv"
	"slices"
	"time"
)

// Members are the dispatchers that may own the areas of one region, in the order
// in which they should. Each has its own view of them: where views differ, areas
// move more than they need to, and never have two owners.
type Members struct {
	self   string
	spread bool          // each area has an order of its own, so that all have some; else one has all
	settle time.Duration // who is here for less long is preferred to nobody
	since  map[string]time.Time
}

// NewMembers begins with nobody.
func NewMembers(self string, spread bool, settle time.Duration) *Members {
	return &Members{self: self, spread: spread, settle: settle, since: map[string]time.Time{}}
}

// See tells who lives and does not leave, oneself among them.
func (m *Members) See(live []string, now time.Time) {
	for id := range m.since {
		if !slices.Contains(live, id) {
			delete(m.since, id)
		}
	}
	for _, id := range live {
		if _, ok := m.since[id]; !ok {
			m.since[id] = now
		}
	}
}

// Order is who should own an area, first to last: who is here for long before
// who is new, so that one that comes and goes moves nothing.
func (m *Members) Order(area string, now time.Time) []string {
	ids := make([]string, 0, len(m.since))
	for id := range m.since {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int {
		if x, y := m.settled(a, now), m.settled(b, now); x != y {
			if x {
				return -1
			}
			return 1
		}
		if m.spread {
			if by := cmp.Compare(weight(area, b), weight(area, a)); by != 0 {
				return by
			}
		}
		return cmp.Compare(a, b)
	})
	return ids
}

func (m *Members) settled(id string, now time.Time) bool {
	since, ok := m.since[id]
	return ok && now.Sub(since) >= m.settle
}

// Place is one's own place in the order of an area, and whether the area is to
// be asked back from whoever holds it. Who leaves comes last.
func (m *Members) Place(area string, now time.Time) (rank int, home bool) {
	order := m.Order(area, now)
	if rank = slices.Index(order, m.self); rank < 0 {
		return len(order), false
	}
	// One that is new asks for what nobody else should have, once it has had the
	// time to see the others.
	return rank, rank == 0 && (m.settled(m.self, now) || now.Sub(m.since[m.self]) >= m.settle/5)
}

// Yields says whether an area goes from here to who asks for it.
func (m *Members) Yields(area, asker string, now time.Time) bool {
	order := m.Order(area, now)
	theirs, ours := slices.Index(order, asker), slices.Index(order, m.self)
	return theirs >= 0 && (ours < 0 || theirs < ours)
}

// weight is where a rendezvous hash puts a dispatcher for an area: when one
// comes or goes, only its own areas move.
func weight(area, id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(area + "\x00" + id)) // never fails, by its documentation
	x := h.Sum64()                             // FNV mixes the last bytes little
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
