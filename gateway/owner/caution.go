package owner

import (
	"time"

	"evenkeel/geo"
)

// RankQuota returns how many of a decode rank's slots this proxy may use (0: all). While requests
// of other proxies may still run on the rank, it is at least 1, and othersKV is how many KV tokens
// they hold. If that is not known yet, it is 1.
func (s *Set) RankQuota(name, rank string, slots int) (slotLimit int, othersKV int64) {
	scope := s.Scope(name)
	if scope == nil { // this proxy shares no engines
		return 0, 0
	}
	scope.mu.Lock()
	defer scope.mu.Unlock()
	if !scope.othersMayRun(time.Now()) {
		return 0, 0
	}
	others, isCounted := scope.othersLoad[rank]
	if !isCounted && !scope.othersReported {
		// After a complete report, a rank without a count has nothing of others.
		return 1, 0
	}
	free := slots - others.Requests // 0 or below if others fill the rank
	share := int(scope.maxShare * float64(slots))
	return max(1, min(free, share)), others.KVTokens // 0 would mean all slots
}

// With a lease, requests of others may run for a while after a takeover. With a static order
// (withoutEnd), they may run as long as this proxy owns a foreign region: it does not reach that
// region's own proxy, which may still send requests. The caller holds the scope's mu.
func (scope *Scope) othersMayRun(now time.Time) bool {
	switch {
	case scope.ownedSince.IsZero(): // not the owner
		return false
	case scope.othersMayRunFor == withoutEnd:
		return !scope.home // in its own region, this proxy comes first in the order
	}
	return now.Before(scope.ownedSince.Add(scope.othersMayRunFor))
}

// setOthersLoad stores what the engines report (all) less this proxy's own requests (ours). Ranks
// in silent keep their numbers, or get 0, because RankQuota would otherwise allow only one slot.
// The caller holds the scope's mu.
func (scope *Scope) setOthersLoad(ours, all []geo.Resident, silent []string) {
	oursByRank := map[string]geo.Resident{}
	for _, r := range ours {
		oursByRank[r.ID] = r
	}
	for _, r := range all {
		requests, kvTokens := r.Requests-oursByRank[r.ID].Requests, r.KVTokens-oursByRank[r.ID].KVTokens
		// It can be below 0, because the numbers are not of the same moment.
		scope.othersLoad[r.ID] = geo.Resident{ID: r.ID, Requests: max(0, requests), KVTokens: max(0, kvTokens)}
	}
	for _, id := range silent {
		if _, isCounted := scope.othersLoad[id]; !isCounted {
			scope.othersLoad[id] = geo.Resident{ID: id}
		}
	}
}
