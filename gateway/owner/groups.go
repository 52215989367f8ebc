package owner

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
)

// siblings are the live proxies of this region. Each decode group has an order of the proxies, computed from their names, and should belong
// to the first live proxy of its order.
type siblings struct {
	set *Set

	mu   sync.Mutex
	live *lease.Members // the live proxies that are not shutting down
}

// updateMembers updates the members: the live proxies that are not shutting down, including this proxy. leaving says whether this proxy is
// shutting down.
func (s *siblings) updateMembers(now time.Time) (leaving bool) {
	_, staying := s.set.peers.Siblings()
	if leaving = s.set.deps.Leaving(); !leaving {
		staying = append(staying, s.set.peers.ID())
	}
	s.mu.Lock()
	s.live.See(staying, now)
	s.mu.Unlock()
	return leaving
}

// liveMembers returns all live proxies that are not shutting down, in any order.
func (s *siblings) liveMembers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live.Order("") // every scope has the same members, so any name will do
}

// ownerOrder returns the proxies in the order in which they should own a group. It leaves out proxies that may not own the group according
// to ha.members of this proxy or to the list in the lease.
func (s *siblings) ownerOrder(scope *Scope) []string {
	leaseMembers := scope.claim.Members()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live.Order(scope.Name, s.set.configMembers, leaseMembers)
}

// updateClaims updates the live proxies, and then the role of this proxy for each group. All proxies compute the same order for a group,
// and the first live one should own it. The order leaves out proxies that may not own the group, by ha.members of this proxy
// (configMembers) or by the list in the lease (leaseMembers). An empty list excludes none.
func (s *siblings) updateClaims(all map[string]*Scope, engines map[string]EngineCounts, now time.Time) {
	isShuttingDown := s.updateMembers(now)
	for name, scope := range all {
		leaseMembers, holder := scope.claim.Members(), lease.Dispatcher(scope.view.Load().Holder) // holder: the id of the proxy
		s.mu.Lock()
		// place is that of this proxy in the order; 0 is the first. isHome: this proxy should own the group now, so its claim asks
		// the holder of the lease for it. If the holder is gone or about to leave, a proxy that has just started becomes the home
		// sooner.
		place, isHome := s.live.TakeoverRank(name, holder, now, s.set.configMembers, leaseMembers)
		s.mu.Unlock()
		canServe := !isShuttingDown && engines[name].halfAnswer() // at least half of the group's engines answer
		scope.claim.SetRole(isHome, place, canServe)
	}
}

// checkHandBack returns nil if a group may go to the proxy that asks for it (sender). The epoch in the question must be the present one,
// the store of leases must answer, and the asking proxy must come before this one in the group's order: the order in which the live
// proxies should own the group. The order leaves out proxies that are not in ha.members (configMembers) or not in the list of the lease
// (leaseMembers).
func (s *siblings) checkHandBack(scope *Scope, sender string, ask geo.HandBack) error {
	v := scope.view.Load()
	if ask.Epoch != v.Epoch { // the asking proxy means an earlier or later ownership
		return fmt.Errorf("group %s: %w", scope.Name, lease.ErrNotHolder)
	}
	if v.StoreAway { // no other proxy could take the lease, so this proxy would stop its requests in vain
		return fmt.Errorf("group %s: %w: the store of its lease does not answer, so no other proxy could take it", scope.Name, lease.ErrNotHolder)
	}
	now, leaseMembers := time.Now(), scope.claim.Members()
	s.updateMembers(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	senderIsBeforeUs := s.live.ShouldHandOver(scope.Name, sender, now, s.set.configMembers, leaseMembers)
	if !senderIsBeforeUs {
		return fmt.Errorf("group %s: %w, and %s is not before us in its order", scope.Name, lease.ErrNotHolder, sender)
	}
	return nil
}

// hasSuccessor updates the members, and says whether there is another live proxy that may own the group.
func (s *siblings) hasSuccessor(scope *Scope) bool {
	s.updateMembers(time.Now())
	return slices.ContainsFunc(s.ownerOrder(scope), func(id string) bool { return id != s.set.peers.ID() })
}

// recordReport records, from a peer's answer to a probe, the epochs of the groups that the peer owns, and that their owner lives now. If
// the peer owns a group with a later epoch than this proxy, the claim of this proxy stops admission until it has renewed its lease.
func (s *siblings) recordReport(all map[string]*Scope, h geo.ProbeReport) {
	now := time.Now()
	for name, epoch := range h.Groups {
		if scope := all[name]; scope != nil { // nil: this proxy does not know engines of the group
			s.set.ownersKnown.Store(true) // one group with an owner is enough for UnreadyReason
			scope.mu.Lock()
			scope.ownerLastSeen = now
			scope.mu.Unlock()
			scope.claim.ObserveRivalEpoch(epoch)
		}
	}
}

// groupLeaseName is the name of a group's Lease object. Characters that a Kubernetes name cannot have become dashes. A hash of the group's
// name at the end then keeps different groups apart.
func groupLeaseName(group string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		}
		return '-'
	}, group)
	hasDashAtEnd := strings.HasPrefix(group, "-") || strings.HasSuffix(group, "-")
	if clean == group && !hasDashAtEnd && len(group) <= mostGroupName { // nothing of the name has to be changed
		return "evenkeel-group-" + group
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(group)) // Write of a hash.Hash never returns an error
	return fmt.Sprintf("evenkeel-group-%s-%08x", strings.Trim(clean[:min(len(clean), mostGroupName)], "-"), h.Sum32())
}

// mostGroupName is how many bytes of a group's name its Lease object takes, so that the object's name stays below the 253 of Kubernetes.
const mostGroupName = 200
