package lease

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"
	"time"
)

// Members are the dispatchers that may own the scopes of one region, in the order
// in which they should. Each has its own view of them: where views differ, scopes
// move more than they need to, and never have two owners.
type Members struct {
	self   string
	spread bool          // each scope has an order of its own, so that all have some; else one has all
	settle time.Duration // who is here for less long is preferred to nobody
	since  map[string]time.Time
}

// NewMembers begins with nobody.
func NewMembers(self string, spread bool, settle time.Duration) *Members {
	return &Members{self: self, spread: spread, settle: settle, since: map[string]time.Time{}}
}

// See tells who lives and does not leave, oneself among them.
func (m *Members) See(live []string, now time.Time) {
	maps.DeleteFunc(m.since, func(id string, _ time.Time) bool { return !slices.Contains(live, id) })
	for _, id := range live {
		if _, ok := m.since[id]; !ok {
			m.since[id] = now
		}
	}
}

// Order returns who should own a scope, first to last: the living members that are on every list. An empty list leaves
// no member out.
func (m *Members) Order(scope string, lists ...[]string) []string {
	ids := slices.AppendSeq(make([]string, 0, len(m.since)), maps.Keys(m.since)) // a status shows none as []
	ids = slices.DeleteFunc(ids, func(id string) bool {
		return slices.ContainsFunc(lists, func(list []string) bool { return len(list) > 0 && !slices.Contains(list, id) })
	})
	slices.SortFunc(ids, func(a, b string) int {
		if m.spread {
			if by := cmp.Compare(weight(scope, b), weight(scope, a)); by != 0 {
				return by
			}
		}
		return cmp.Compare(a, b)
	})
	return ids
}

// here says whether a member was there for so long.
func (m *Members) here(id string, least time.Duration, now time.Time) bool {
	since, ok := m.since[id]
	return ok && now.Sub(since) >= least
}

// Place is one's own place in the order of a scope, and whether the scope is to
// be asked back from its holder. From one that lives and stays only who is here
// for long asks, so that one that comes and goes moves nothing; from one that
// leaves, or is gone, who has had the time to see the others. A member that
// leaves comes last, and so does a member that is not on a list.
func (m *Members) Place(scope, holder string, now time.Time, lists ...[]string) (rank int, home bool) {
	order := m.Order(scope, lists...)
	if rank = slices.Index(order, m.self); rank < 0 {
		return len(order), false
	}
	least := m.settle
	if !slices.Contains(order, holder) {
		least /= 5
	}
	return rank, rank == 0 && m.here(m.self, least, now)
}

// Yields says whether a scope goes from here to who asks for it.
func (m *Members) Yields(scope, asker string, now time.Time, lists ...[]string) bool {
	order := m.Order(scope, lists...)
	theirs, ours := slices.Index(order, asker), slices.Index(order, m.self)
	if ours < 0 {
		return theirs >= 0
	}
	return theirs >= 0 && theirs < ours && m.here(asker, m.settle/2, now) // its clock began before ours
}

// weight is where a rendezvous hash puts a dispatcher for a scope: when one
// comes or goes, only its own scopes move.
func weight(scope, id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(scope + "\x00" + id)) // never fails, by its documentation
	x := h.Sum64()                              // FNV mixes the last bytes little
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
