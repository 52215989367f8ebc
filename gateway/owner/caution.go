package owner

import (
	"time"

	"evenkeel/geo"
)

// RankQuota returns how much of a decode rank with that many slots this proxy may use. name is the name of the rank's scope. slotLimit is
// the number of slots that this proxy may use; 0: all of them. While requests of other proxies may still run on the rank, slotLimit is at
// least 1, and othersKV is how many KV tokens those requests hold. If it is not known yet what runs on the rank, slotLimit is 1.
func (s *Set) RankQuota(name, rank string, slots int) (slotLimit int, othersKV int64) {
	scope := s.Scope(name)
	if scope == nil { // this proxy shares no engines, so it may use all slots
		return 0, 0
	}
	scope.mu.Lock()
	defer scope.mu.Unlock()
	if !scope.othersMayRun(time.Now()) {
		return 0, 0
	}
	others, isCounted := scope.othersLoad[rank]
	if !isCounted && !scope.othersReported { // after a complete report, other proxies have nothing on a rank without a count
		return 1, 0
	}
	free := slots - others.Requests // 0 or below if requests of other proxies fill the rank
	share := int(scope.maxShare * float64(slots))
	return max(1, min(free, share)), others.KVTokens // not 0, which would mean all slots
}

// othersMayRun says whether this proxy owns the scope, but requests of other proxies may still run on the scope's engines. With a lease,
// this is so for a while after a takeover. With a static order of owners (withoutEnd), it is so as long as this proxy owns a foreign
// region: it owns the region only while it does not reach the region's own proxy, which may still send requests. The caller holds the
// scope's mu.
func (scope *Scope) othersMayRun(now time.Time) bool {
	switch {
	case scope.ownedSince.IsZero(): // this proxy does not own the scope
		return false
	case scope.othersMayRunFor == withoutEnd:
		return !scope.home // in its own region, this proxy comes first in the order, so it need not hold back
	}
	return now.Before(scope.ownedSince.Add(scope.othersMayRunFor))
}

// setOthersLoad stores, for each rank, how many requests and KV tokens of other proxies are on it: the numbers that its engine reports
// (all), less this proxy's own (ours). For the ranks in silent, whose engines report nothing, the last numbers stay. If there are none,
// they become 0, because RankQuota would otherwise allow such a rank only one slot. The caller holds the scope's mu.
func (scope *Scope) setOthersLoad(ours, all []geo.Resident, silent []string) {
	oursByRank := map[string]geo.Resident{}
	for _, r := range ours {
		oursByRank[r.ID] = r
	}
	for _, r := range all {
		requests, kvTokens := r.Requests-oursByRank[r.ID].Requests, r.KVTokens-oursByRank[r.ID].KVTokens
		// The difference can be below 0, because the two numbers are not of exactly the same moment.
		scope.othersLoad[r.ID] = geo.Resident{ID: r.ID, Requests: max(0, requests), KVTokens: max(0, kvTokens)}
	}
	for _, id := range silent {
		if _, isCounted := scope.othersLoad[id]; !isCounted {
			scope.othersLoad[id] = geo.Resident{ID: id}
		}
	}
}
