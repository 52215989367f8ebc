package owner

import (
	"time"

	"evenkeel/geo"
)

// Room is what a cautious owner takes of a decode rank with so many slots. While requests of the owner before may still
// run on the rank, limit is how many slots we use of it, at least 1, and others the KV tokens of these requests. A
// limit of 0 means all slots. Of a rank at which nobody has looked yet we use one slot.
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
	r, known := a.others[rank]
	if !known && !a.othersNamed {
		return 1, 0
	}
	return max(1, min(slots-r.Requests, int(a.share*float64(slots)))), r.KVTokens
}

// cautious says whether requests of others may still run on the scope's engines. It is called with a.mu held.
func (a *Scope) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static: another may believe itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// keepFound keeps, for each rank, the requests of others that were found there: what its engine says less what is ours.
// silent are the ranks whose engines do not say; what was known of them stays. It is called with a.mu held.
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
