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

// siblings are the proxies of our region that live. Each decode group belongs to the first of them in an order by their
// names.
type siblings struct {
	set *Set

	mu      sync.Mutex
	members *lease.Members
}

// see notes which proxies live and do not leave, this one included. It reports whether this proxy leaves.
func (o *siblings) see(now time.Time) (leaving bool) {
	_, stay := o.set.node.Siblings()
	if leaving = o.set.host.Leaving(); !leaving {
		stay = append(stay, o.set.node.ID())
	}
	o.mu.Lock()
	o.members.See(stay, now)
	o.mu.Unlock()
	return leaving
}

// live returns all proxies that live and stay.
func (o *siblings) live() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.members.Order("")
}

// order returns the proxies that should own a group, first to last. It leaves out those
// that may not own it, by our list of members or by that of the lease.
func (o *siblings) order(a *Scope) []string {
	listed := a.claim.Members()
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.members.Order(a.Name, o.set.members, listed)
}

// setStandings tells the claim of each group this proxy's place in the order of the group, and whether enough engines
// of the group answer.
func (o *siblings) setStandings(all map[string]*Scope, reach map[string]Reach, now time.Time) {
	leaving := o.see(now)
	for name, a := range all {
		listed := a.claim.Members()
		o.mu.Lock()
		rank, home := o.members.Place(name, lease.Dispatcher(a.view.Load().Holder), now, o.set.members, listed)
		o.mu.Unlock()
		a.claim.SetStanding(home, rank, !leaving && reach[name].enough())
	}
}

// mayYield is nil if a group may go to the proxy that asks for it: the epoch in its question is the present one, the
// store of leases answers, and the proxy comes before this one in the group's order.
func (o *siblings) mayYield(a *Scope, sender string, ask geo.HandBack) error {
	v := a.view.Load()
	if ask.Epoch != v.Epoch {
		return fmt.Errorf("group %s: %w", a.Name, lease.ErrNotHolder)
	}
	if v.Away { // before anything here stops for it
		return fmt.Errorf("group %s: %w: the store of its lease does not answer, so no other proxy could take it", a.Name, lease.ErrNotHolder)
	}
	now, listed := time.Now(), a.claim.Members()
	o.see(now)
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.members.Yields(a.Name, sender, now, o.set.members, listed) {
		return fmt.Errorf("group %s: %w, and %s is not before us in its order", a.Name, lease.ErrNotHolder, sender)
	}
	return nil
}

// hasHeirs says whether another proxy lives that may own the group.
func (o *siblings) hasHeirs(a *Scope) bool {
	o.see(time.Now())
	return slices.ContainsFunc(o.order(a), func(id string) bool { return id != o.set.node.ID() })
}

// takeReport takes the epochs of the groups that a peer admits to, from the answer to a probe.
func (o *siblings) takeReport(all map[string]*Scope, h geo.ProbeReport) {
	now := time.Now()
	for name, epoch := range h.Groups {
		if a := all[name]; a != nil {
			o.set.ownersKnown.Store(true)
			a.mu.Lock()
			a.ownerHeard = now
			a.mu.Unlock()
			a.claim.Claimed(epoch)
		}
	}
}

// groupObject is the name of a group's Lease object. Characters that a Kubernetes name cannot have become dashes; a
// hash of the group's name behind it then tells such names apart.
func groupObject(group string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		}
		return '-'
	}, group)
	if clean == group && !strings.HasPrefix(group, "-") && !strings.HasSuffix(group, "-") && len(group) <= 200 {
		return "evenkeel-group-" + group
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(group)) // never fails, by its documentation
	return fmt.Sprintf("evenkeel-group-%s-%08x", strings.Trim(clean[:min(len(clean), 200)], "-"), h.Sum32())
}
