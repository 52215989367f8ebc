package lease

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"
	"time"
)

// Members orders the live proxies of one region for each scope: the first should own it. If the
// views of proxies differ, scopes move more often than necessary, but never have two owners.
type Members struct {
	self string
	// each scope has its own order, so that every member gets some; false: one member gets all
	spread bool
	// how long a proxy must be a member before it asks a live holder for a scope
	settleTime  time.Duration
	memberSince map[string]time.Time // by live member: since when without a break
}

// NewMembers returns the view of the proxy self before it has seen any member.
func NewMembers(self string, spread bool, settleTime time.Duration) *Members {
	return &Members{self: self, spread: spread, settleTime: settleTime, memberSince: map[string]time.Time{}}
}

// See sets the proxies that are alive and not about to leave, including this one.
func (m *Members) See(live []string, now time.Time) {
	maps.DeleteFunc(m.memberSince, func(id string, _ time.Time) bool { return !slices.Contains(live, id) })
	for _, id := range live {
		if _, isMember := m.memberSince[id]; !isMember {
			m.memberSince[id] = now
		}
	}
}

// Order returns the live members that are on every list in allowed, the preferred one first. An
// empty list excludes no member.
func (m *Members) Order(scope string, allowed ...[]string) []string {
	ids := make([]string, 0, len(m.memberSince)) // not nil, so that a status shows [] and not null
	ids = slices.AppendSeq(ids, maps.Keys(m.memberSince))
	ids = slices.DeleteFunc(ids, func(id string) bool {
		return slices.ContainsFunc(allowed, func(list []string) bool { return len(list) > 0 && !slices.Contains(list, id) })
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

func (m *Members) isMemberFor(id string, atLeast time.Duration, now time.Time) bool {
	since, isMember := m.memberSince[id]
	return isMember && now.Sub(since) >= atLeast
}

// TakeoverRank returns this proxy's rank in Order; the one after the last if it is not there. asks:
// this proxy should ask the holder to hand the scope over. Only the first asks, and only after
// settleTime, so that a proxy that comes and goes moves no scopes. If the holder is not in the
// order, because it is gone or about to leave, a fifth is enough: in this time the proxy sees the
// other members.
func (m *Members) TakeoverRank(scope, holder string, now time.Time, allowed ...[]string) (rank int, asks bool) {
	order := m.Order(scope, allowed...)
	if rank = slices.Index(order, m.self); rank < 0 {
		return len(order), false
	}
	settleTime := m.settleTime
	if !slices.Contains(order, holder) {
		settleTime /= 5
	}
	return rank, rank == 0 && m.isMemberFor(m.self, settleTime, now)
}

// ShouldHandOver reports whether this proxy, which holds a scope, should hand it over: asker comes
// before it in Order.
func (m *Members) ShouldHandOver(scope, asker string, now time.Time, allowed ...[]string) bool {
	order := m.Order(scope, allowed...)
	theirs, ours := slices.Index(order, asker), slices.Index(order, m.self)
	if ours < 0 { // this proxy may not own the scope
		return theirs >= 0
	}
	askerIsBefore := theirs >= 0 && theirs < ours
	// Half is enough: the asker itself waited for all of it, and this proxy may have seen it later.
	return askerIsBefore && m.isMemberFor(asker, m.settleTime/2, now)
}

// weight is the weight of a proxy for a scope in a rendezvous hash. When a proxy comes or goes,
// only the scopes that it gets or had change their owner.
func weight(scope, id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(scope + "\x00" + id))
	mixed := h.Sum64() // the steps below mix the last bytes in, which FNV hardly does
	mixed = (mixed ^ mixed>>30) * 0xbf58476d1ce4e5b9
	mixed = (mixed ^ mixed>>27) * 0x94d049bb133111eb
	return mixed ^ mixed>>31
}
