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

// neighbours are the proxies of other regions. A region belongs to its own proxy; if that is gone,
// to the first of the configured order, or else to the nearest.
type neighbours struct {
	set *Set
	// Serialises decideStaticOwner, so that the last view published is the newest one.
	deciding sync.Mutex

	mu         sync.Mutex
	roundTrips roundTrips
}

// roundTrips are in ms: by the proxy's region, by the proxy, by its peer.
type roundTrips map[string]map[string]map[string]float64

func regionLeaseName(region string) string { return "evenkeel-owner-" + strings.ToLower(region) }

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
		if !scope.home { // requests of the region's own proxy may still run
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

// The first live proxy of the order owns the scope. The order begins with the home: the first peer
// in another region, or this proxy in its own region and in one without peers. Without a lease, two
// proxies may consider themselves the owner, so requests of the home may run at any time
// (othersMayRunFor).
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

// takeoverOrder is empty if the round trips decide.
func (n *neighbours) takeoverOrder(region string) (ids []string) {
	c := &n.set.conf.Geo
	for _, id := range c.Ownership.TakeoverOrder {
		itsRegion := c.Self.Region // an id that is no peer's is this proxy's
		if peer := slices.IndexFunc(c.Peers, func(p geo.PeerConfig) bool { return p.ID == id }); peer >= 0 {
			itsRegion = c.Peers[peer].Region
		}
		if itsRegion == region { // at home there
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

// takeoverRank is this proxy's place among those that may take over a region; 0 is the first.
// Without a configured order, it is how many peers are nearer to the region, by the round trips
// that its proxies last measured; if they differ, the largest. To one that has not measured this
// proxy, all peers are nearer.
func (n *neighbours) takeoverRank(scope *Scope) (rank int) {
	self := n.set.conf.Geo.Self.ID
	if scope.home {
		return 0
	}
	if order := n.takeoverOrder(scope.Name); len(order) > 0 {
		if place := slices.Index(order, self); place >= 0 {
			return place
		}
		return len(order) // after all others
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, toPeers := range n.roundTrips[scope.Name] { // that one proxy of the region measured
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

func (n *neighbours) updateClaims(all map[string]*Scope, engines map[string]EngineCounts, now time.Time) {
	for name, scope := range all {
		switch {
		case scope.static != nil:
			n.decideStaticOwner(scope, now)
		case !scope.home: // the claim of the own region keeps its role
			const isHome = false
			// A proxy that reaches less than half of the engines leaves the region to others.
			canServe := engines[name].halfAnswer()
			scope.claim.SetRole(isHome, n.takeoverRank(scope), canServe)
		}
	}
}

// Only a region's own proxies get it back.
func (n *neighbours) checkHandBack(scope *Scope, sender string, _ geo.HandBack) error {
	if !slices.ContainsFunc(n.set.conf.Geo.Peers, func(p geo.PeerConfig) bool {
		return p.Region == scope.Name && p.AnswersTo(sender)
	}) {
		return ErrNotHome
	}
	return nil
}

// A released region goes to the first proxy that finds it released.
func (n *neighbours) hasSuccessor(*Scope) bool { return false }

// For claims, the answer has epochs of leases, and round trips; for static orders, it shows that
// the peer lives.
func (n *neighbours) recordReport(all map[string]*Scope, h geo.ProbeReport) {
	for region, epoch := range h.Epochs {
		if scope := all[region]; scope != nil && scope.claim != nil {
			scope.claim.ObserveRivalEpoch(epoch) // a later epoch stops admission until the lease is renewed
		}
	}
	if all[h.Region] != nil && len(h.RTTMs) > 0 { // takeoverRank needs no others
		n.recordRoundTrips(h)
	}
	for _, scope := range all {
		if scope.static != nil {
			n.recordSignOfLife(scope, h.Peer)
		}
	}
}

func (n *neighbours) recordRoundTrips(h geo.ProbeReport) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.roundTrips[h.Region] == nil {
		n.roundTrips[h.Region] = map[string]map[string]float64{}
	}
	n.roundTrips[h.Region][h.Peer] = h.RTTMs
}

func (n *neighbours) recordSignOfLife(scope *Scope, peer string) {
	scope.mu.Lock()
	scope.static.Saw(peer, time.Now())
	scope.mu.Unlock()
	n.decideStaticOwner(scope, time.Now())
}

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
