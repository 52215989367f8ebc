package owner

import (
	"time"

	"evenkeel/geo"
)

// Room is what a decode rank has for us: of its slots as many as a cautious owner
// uses, 0 being all, and the KV tokens of others' requests. Of a rank that nobody
// has looked at yet it is one slot.
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
	if !known && !a.told {
		return 1, 0
	}
	return max(1, min(slots-r.Requests, int(a.share*float64(slots)))), r.KVTokens
}

// cautious says whether others' requests may still run on the engines. It is called
// with a.mu held.
func (a *Scope) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static: another may believe itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// keepFound keeps what of others was found: what engines say less what is ours. Of a rank
// that does not tell it keeps what it had. It is called with a.mu held.
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
