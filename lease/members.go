package lease

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"
	"time"
)

// Members are the dispatchers that may own the scopes of one region, in the order
// in which they should. Each dispatcher has its own view of them. If views differ, scopes
// move more often than they need to, but never have two owners.
type Members struct {
	self   string
	spread bool          // each scope has an order of its own, so that each member gets some scopes; false: one member gets all
	settle time.Duration // a member asks a living holder for a scope only after it was here for so long
	since  map[string]time.Time
}

// NewMembers returns the view that the dispatcher self has, before it has seen any member. See Members for spread and settle.
func NewMembers(self string, spread bool, settle time.Duration) *Members {
	return &Members{self: self, spread: spread, settle: settle, since: map[string]time.Time{}}
}

// See sets the members that live and do not leave; this dispatcher is one of them.
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
	ids := slices.AppendSeq(make([]string, 0, len(m.since)), maps.Keys(m.since)) // not nil, so that a status shows an empty list as []
	ids = slices.DeleteFunc(ids, func(id string) bool {
		return slices.ContainsFunc(lists, func(list []string) bool { return len(list) > 0 && !slices.Contains(list, id) })
	})
	slices.SortFunc(ids, func(a, b string) int {
		if m.spread {
			if order := cmp.Compare(weight(scope, b), weight(scope, a)); order != 0 {
				return order
			}
		}
		return cmp.Compare(a, b)
	})
	return ids
}

// here says whether a member has been here for at least so long.
func (m *Members) here(id string, least time.Duration, now time.Time) bool {
	since, ok := m.since[id]
	return ok && now.Sub(since) >= least
}

// Place returns this dispatcher's rank in the order of a scope, and asks: whether it is to ask the holder to hand the scope over. Only
// the first in the order asks, and only once it has been a member for settle, so that a dispatcher that comes and goes moves nothing. If
// the holder is not in the order (it is gone, or on its way out), a fifth of settle is enough: in that time the dispatcher sees the
// other members. A dispatcher that is not in the order itself ranks behind all of it.
func (m *Members) Place(scope, holder string, now time.Time, lists ...[]string) (rank int, asks bool) {
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

// Yields says whether this dispatcher gives a scope to the dispatcher that asks for it.
func (m *Members) Yields(scope, asker string, now time.Time, lists ...[]string) bool {
	order := m.Order(scope, lists...)
	theirs, ours := slices.Index(order, asker), slices.Index(order, m.self)
	if ours < 0 {
		return theirs >= 0
	}
	return theirs >= 0 && theirs < ours && m.here(asker, m.settle/2, now) // half of settle: the asker began to count before we saw it
}

// weight is the weight of a dispatcher for a scope in a rendezvous hash: when a dispatcher
// comes or goes, only its own scopes move.
func weight(scope, id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(scope + "\x00" + id)) // never fails, by its documentation
	mixed := h.Sum64()                          // FNV mixes the last bytes little
	mixed = (mixed ^ mixed>>30) * 0xbf58476d1ce4e5b9
	mixed = (mixed ^ mixed>>27) * 0x94d049bb133111eb
	return mixed ^ mixed>>31
}
