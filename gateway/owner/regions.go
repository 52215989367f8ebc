package owner

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/geo"
	"evenkeel/lease"
)

// neighbours are the proxies of other regions. A region belongs to its own proxy. If this proxy is gone, the region goes to the first proxy
// of the configured order, or to the nearest proxy if no order is configured.
type neighbours struct {
	set      *Set
	deciding sync.Mutex // serialises decideStaticOwner, so that the last view published is the newest one

	mu         sync.Mutex
	roundTrips roundTrips
}

// roundTrips are the round trips that proxies measured to their peers, in ms: by the proxy's region, by the proxy, by its peer.
type roundTrips map[string]map[string]map[string]float64

// regionLeaseName is the name of a region's Lease object.
func regionLeaseName(region string) string { return "evenkeel-owner-" + strings.ToLower(region) }

// createScopes makes the scopes: this proxy's region, and the regions of the engines in the config. Each scope gets a claim or, in static
// mode, a static order of owners.
func (n *neighbours) createScopes() error {
	s, c := n.set, &n.set.conf.Geo
	regions := []string{c.Self.Region}
	for _, e := range slices.Concat(s.conf.Engines.Prefill, s.conf.Engines.Decode, s.conf.Engines.Aggregated) {
		if e.Region != "" && !slices.Contains(regions, e.Region) {
			regions = append(regions, e.Region)
		}
	}
	isStatic := c.Ownership.Engine == geo.OwnStatic
	all := map[string]*Scope{}
	for _, region := range regions {
		scope := s.newScope(region)
		scope.home = region == c.Self.Region
		if !scope.home { // after a takeover, requests of the region's own proxy may still run
			scope.maxShare = c.Ownership.MaxShare
		}
		all[region] = scope
		if isStatic {
			n.setStaticOrder(scope)
		} else if err := s.openClaim(scope, n.takeoverRank(scope)); err != nil {
			return fmt.Errorf("geo.ownership: region %s: %w", region, err)
		}
	}
	s.all.Store(&all)
	if isStatic {
		s.log.Warn("ownership is static: if the network between regions breaks, a region can have two owners, because no lease prevents it; a "+
			"proxy that takes over uses only a share of the slots",
			zap.Float64("max_share", c.Ownership.MaxShare))
	}
	return nil
}

// setStaticOrder gives a scope a static order of owners, instead of a lease: the first proxy of the order that is alive owns the scope. The
// order begins with the home, and goes on as configured. The home of another region is the first peer there. The home of this proxy's own
// region, and of a region without peers, is this proxy. Without a lease, two proxies may consider themselves the owner at the same time. So
// requests of the home may run at any time beside those of this proxy (othersMayRunFor).
func (n *neighbours) setStaticOrder(scope *Scope) {
	c := &n.set.conf.Geo
	home := c.Self.ID
	for _, p := range c.Peers {
		if !scope.home && p.Region == scope.Name {
			home = p.ID
			break
		}
	}
	scope.othersMayRunFor = withoutEnd
	scope.static = lease.NewStatic(c.Self.ID, home, n.takeoverOrder(scope.Name), c.Ownership.DeadAfter, time.Now())
	v := scope.static.View(time.Now())
	scope.view.Store(&v)
}

// takeoverOrder lists the proxies that may take over a region, in the configured order; empty: the round trips decide.
func (n *neighbours) takeoverOrder(region string) (ids []string) {
	c := &n.set.conf.Geo
	for _, id := range c.Ownership.TakeoverOrder {
		itsRegion := c.Self.Region // an id that is no peer's is that of this proxy
		if peer := slices.IndexFunc(c.Peers, func(p geo.PeerConfig) bool { return p.ID == id }); peer >= 0 {
			itsRegion = c.Peers[peer].Region
		}
		if itsRegion == region { // the listed proxy is at home in this region, so it need not take the region over
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

// takeoverRank is this proxy's place among the proxies that may take over a region; 0 is the first. Without a configured order, it is how
// many peers are nearer to the region, by the round trips that the region's proxies last measured. If these proxies differ, the
// largest number counts. To a proxy that has not measured this proxy, all peers are nearer.
func (n *neighbours) takeoverRank(scope *Scope) (rank int) {
	self := n.set.conf.Geo.Self.ID
	if scope.home {
		return 0
	}
	if order := n.takeoverOrder(scope.Name); len(order) > 0 {
		if place := slices.Index(order, self); place >= 0 {
			return place
		}
		return len(order) // a proxy that is not in the order comes after all others
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, toPeers := range n.roundTrips[scope.Name] { // the round trips that one proxy of the region measured
		own, measured := toPeers[self]
		nearer := 0
		for id, ms := range toPeers {
			if id != self && (!measured || ms < own) {
				nearer++
			}
		}
		rank = max(rank, nearer)
	}
	return rank
}

// updateClaims updates who owns the regions with a static order. To the claims of other regions it gives this proxy's rank, and whether
// enough engines answer.
func (n *neighbours) updateClaims(all map[string]*Scope, engines map[string]EngineCounts, now time.Time) {
	for name, scope := range all {
		switch {
		case scope.static != nil:
			n.decideStaticOwner(scope, now)
		case !scope.home: // the claim of this proxy's own region keeps the role with which it was made
			const isHome = false
			canServe := engines[name].halfAnswer() // a proxy that reaches less than half of the engines leaves the region to others
			scope.claim.SetRole(isHome, n.takeoverRank(scope), canServe)
		}
	}
}

// checkHandBack returns nil if the proxy that asks for a region is one of the region's own.
func (n *neighbours) checkHandBack(scope *Scope, sender string, _ geo.HandBack) error {
	if !slices.ContainsFunc(n.set.conf.Geo.Peers, func(p geo.PeerConfig) bool {
		return p.Region == scope.Name && p.AnswersTo(sender)
	}) {
		return ErrNotHome
	}
	return nil
}

// hasSuccessor is always false: there is no successor to wait for, because a released region goes to the first proxy that finds it
// released.
func (n *neighbours) hasSuccessor(*Scope) bool { return false }

// recordReport records what a peer's answer to a probe says. A scope has either a claim on its lease or a static order of owners. For
// claims, the answer has epochs of leases, and round trips. For static orders, it shows that the peer lives.
func (n *neighbours) recordReport(all map[string]*Scope, h geo.ProbeReport) {
	for region, epoch := range h.Epochs {
		if scope := all[region]; scope != nil && scope.claim != nil {
			scope.claim.ObserveRivalEpoch(epoch) // a later epoch than this proxy's stops admission until the lease is renewed
		}
	}
	if all[h.Region] != nil && len(h.RTTMs) > 0 { // takeoverRank needs round trips only from regions that have owners here
		n.recordRoundTrips(h)
	}
	for _, scope := range all {
		if scope.static != nil {
			n.recordSignOfLife(scope, h.Peer)
		}
	}
}

// recordRoundTrips records the round trips that a peer has measured to its own peers. They show which proxies are near to its region.
func (n *neighbours) recordRoundTrips(h geo.ProbeReport) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.roundTrips[h.Region] == nil {
		n.roundTrips[h.Region] = map[string]map[string]float64{}
	}
	n.roundTrips[h.Region][h.Peer] = h.RTTMs
}

// recordSignOfLife records that a peer lives. This may change the owner of a scope with a static order: the first live proxy of the order.
func (n *neighbours) recordSignOfLife(scope *Scope, peer string) {
	scope.mu.Lock()
	scope.static.Saw(peer, time.Now())
	scope.mu.Unlock()
	n.decideStaticOwner(scope, time.Now())
}

// decideStaticOwner computes who owns a scope with a static order now, and publishes a change.
func (n *neighbours) decideStaticOwner(scope *Scope, now time.Time) {
	n.deciding.Lock()
	defer n.deciding.Unlock()
	scope.mu.Lock()
	v := scope.static.View(now)
	scope.mu.Unlock()
	if v != *scope.view.Load() {
		n.set.applyView(scope, v)
	}
}
