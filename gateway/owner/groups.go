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

// siblings are the live proxies of this region. Each decode group has an order of them, computed
// from their names, and should belong to the first. The order leaves out proxies that are not in
// ha.members of this proxy (configMembers) or in the list of the lease (leaseMembers). An empty
// list excludes none.
type siblings struct {
	set *Set

	mu   sync.Mutex
	live *lease.Members // the live proxies that are not shutting down
}

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

func (s *siblings) liveMembers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live.Order("") // every scope has the same members
}

// ownerOrder is the order in which the proxies should own a group.
func (s *siblings) ownerOrder(scope *Scope) []string {
	leaseMembers := scope.claim.Members()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live.Order(scope.Name, s.set.configMembers, leaseMembers)
}

func (s *siblings) updateClaims(all map[string]*Scope, engines map[string]EngineCounts, now time.Time) {
	isShuttingDown := s.updateMembers(now)
	for name, scope := range all {
		// The holder is the id of a proxy.
		leaseMembers, holder := scope.claim.Members(), lease.Dispatcher(scope.view.Load().Holder)
		s.mu.Lock()
		// isHome: the claim asks the holder of the lease for the group. If the holder is gone or about to
		// leave, a proxy that has just started becomes the home sooner.
		place, isHome := s.live.TakeoverRank(name, holder, now, s.set.configMembers, leaseMembers)
		s.mu.Unlock()
		canServe := !isShuttingDown && engines[name].halfAnswer()
		scope.claim.SetRole(isHome, place, canServe)
	}
}

// checkHandBack returns nil if the group may go to sender, which must come before this proxy in the
// group's order.
func (s *siblings) checkHandBack(scope *Scope, sender string, ask geo.HandBack) error {
	v := scope.view.Load()
	if ask.Epoch != v.Epoch { // another ownership is meant
		return fmt.Errorf("group %s: %w", scope.Name, lease.ErrNotHolder)
	}
	if v.StoreAway {
		// No other proxy could take the lease, so this proxy would stop its requests in vain.
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

func (s *siblings) hasSuccessor(scope *Scope) bool {
	s.updateMembers(time.Now())
	return slices.ContainsFunc(s.ownerOrder(scope), func(id string) bool { return id != s.set.peers.ID() })
}

// If the peer owns a group with a later epoch, the claim here stops admission until it has renewed
// its lease.
func (s *siblings) recordReport(all map[string]*Scope, h geo.ProbeReport) {
	now := time.Now()
	for name, epoch := range h.Groups {
		if scope := all[name]; scope != nil { // nil: no engines of the group are known here
			s.set.ownersKnown.Store(true) // for UnreadyReason
			scope.mu.Lock()
			scope.ownerLastSeen = now
			scope.mu.Unlock()
			scope.claim.ObserveRivalEpoch(epoch)
		}
	}
}

// Characters that a Kubernetes name cannot have become dashes, and a hash of the group's name then
// keeps different groups apart.
func groupLeaseName(group string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		}
		return '-'
	}, group)
	hasDashAtEnd := strings.HasPrefix(group, "-") || strings.HasSuffix(group, "-")
	if clean == group && !hasDashAtEnd && len(group) <= mostGroupName {
		return "evenkeel-group-" + group
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(group)) // never fails
	return fmt.Sprintf("evenkeel-group-%s-%08x", strings.Trim(clean[:min(len(clean), mostGroupName)], "-"), h.Sum32())
}

// mostGroupName, in bytes, keeps the object's name below the 253 of Kubernetes.
const mostGroupName = 200
