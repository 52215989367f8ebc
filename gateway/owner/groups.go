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

	mu      sync.Mutex
	members *lease.Members
}

// see updates the members: the live proxies that are not shutting down, including this proxy. It reports whether this proxy is shutting
// down.
func (s *siblings) see(now time.Time) (leaving bool) {
	_, stay := s.set.peers.Siblings()
	if leaving = s.set.deps.Leaving(); !leaving {
		stay = append(stay, s.set.peers.ID())
	}
	s.mu.Lock()
	s.members.See(stay, now)
	s.mu.Unlock()
	return leaving
}

// live returns all live proxies that are not shutting down.
func (s *siblings) live() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.members.Order("")
}

// order returns the proxies in the order in which they should own a group. It leaves out proxies that may not own the group according to
// ha.members of this proxy or to the list in the lease.
func (s *siblings) order(a *Scope) []string {
	listed := a.claim.Members()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.members.Order(a.Name, s.set.members, listed)
}

// setStandings gives the claim of each group this proxy's rank in the group's order, and says whether enough engines of the group answer.
func (s *siblings) setStandings(all map[string]*Scope, reach map[string]Reach, now time.Time) {
	leaving := s.see(now)
	for name, a := range all {
		listed := a.claim.Members()
		s.mu.Lock()
		rank, home := s.members.TakeoverRank(name, lease.Dispatcher(a.view.Load().Holder), now, s.set.members, listed)
		s.mu.Unlock()
		a.claim.SetRole(home, rank, !leaving && reach[name].enough())
	}
}

// mayYield returns nil if a group may go to the proxy that asks for it. The epoch in the question must be the present one, the store of
// leases must answer, and the asking proxy must come before this one in the group's order.
func (s *siblings) mayYield(a *Scope, sender string, ask geo.HandBack) error {
	v := a.view.Load()
	if ask.Epoch != v.Epoch {
		return fmt.Errorf("group %s: %w", a.Name, lease.ErrNotHolder)
	}
	if v.StoreAway { // checked first, so that this proxy does not stop requests in vain
		return fmt.Errorf("group %s: %w: the store of its lease does not answer, so no other proxy could take it", a.Name, lease.ErrNotHolder)
	}
	now, listed := time.Now(), a.claim.Members()
	s.see(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.members.ShouldHandOver(a.Name, sender, now, s.set.members, listed) {
		return fmt.Errorf("group %s: %w, and %s is not before us in its order", a.Name, lease.ErrNotHolder, sender)
	}
	return nil
}

// hasHeirs says whether there is another live proxy that may own the group.
func (s *siblings) hasHeirs(a *Scope) bool {
	s.see(time.Now())
	return slices.ContainsFunc(s.order(a), func(id string) bool { return id != s.set.peers.ID() })
}

// takeReport records the epochs of the groups that a peer owns, from the peer's answer to a probe.
func (s *siblings) takeReport(all map[string]*Scope, h geo.ProbeReport) {
	now := time.Now()
	for name, epoch := range h.Groups {
		if a := all[name]; a != nil {
			s.set.ownersKnown.Store(true)
			a.mu.Lock()
			a.ownerHeard = now
			a.mu.Unlock()
			a.claim.ObserveRivalEpoch(epoch)
		}
	}
}

// groupObject is the name of a group's Lease object. Characters that a Kubernetes name cannot have become dashes. A hash of the group's
// name at the end then keeps different groups apart.
func groupObject(group string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		}
		return '-'
	}, group)
	hasDashAtEnd := strings.HasPrefix(group, "-") || strings.HasSuffix(group, "-")
	if clean == group && !hasDashAtEnd && len(group) <= longestName {
		return "evenkeel-group-" + group
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(group)) // never fails, by its documentation
	return fmt.Sprintf("evenkeel-group-%s-%08x", strings.Trim(clean[:min(len(clean), longestName)], "-"), h.Sum32())
}

// longestName is how many bytes of a group's name its Lease object takes, so that the object's name stays below the 253 of Kubernetes.
const longestName = 200
