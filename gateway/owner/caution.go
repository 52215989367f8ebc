package owner

import (
	"time"

	"evenkeel/geo"
)

// Room returns how much of a decode rank this proxy may use. limit is the number of slots that it may use; 0: all of them. While requests
// of other proxies may still run on the rank, limit is at least 1, and others is how many KV tokens those requests hold. If it is not known
// yet what runs on the rank, limit is 1.
func (s *Set) Room(scope, rank string, slots int) (limit int, others int64) {
	a := s.Of(scope)
	if a == nil {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.cautious(time.Now()) {
		return 0, 0
	}
	left, known := a.others[rank]
	if !known && !a.othersNamed {
		return 1, 0
	}
	return max(1, min(slots-left.Requests, int(a.share*float64(slots)))), left.KVTokens
}

// cautious says whether this proxy owns the scope, but requests of other proxies may still run on the scope's engines. It is called with
// a.mu held.
func (a *Scope) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static order: another proxy may consider itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// keepFound stores, for each rank, how many requests and KV tokens of other proxies are on it: the number that its engine reports (found),
// less this proxy's own (ours). For the ranks in silent, whose engines report nothing, the last numbers stay. It is called with a.mu held.
func (a *Scope) keepFound(ours, found []geo.Resident, silent []string) {
	own := map[string]geo.Resident{}
	for _, r := range ours {
		own[r.ID] = r
	}
	for _, r := range found {
		a.others[r.ID] = geo.Resident{ID: r.ID, Requests: max(0, r.Requests-own[r.ID].Requests), KVTokens: max(0, r.KVTokens-own[r.ID].KVTokens)}
	}
	for _, id := range silent {
		if _, known := a.others[id]; !known {
			a.others[id] = geo.Resident{ID: id}
		}
	}
}
