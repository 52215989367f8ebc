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
	set     *Set
	judging sync.Mutex // serialises judge, so that the last view published is the newest one

	mu      sync.Mutex
	nearest map[string]map[string]map[string]float64 // round trips in ms: by region, by dispatcher of the region, by peer of this dispatcher
}

// regionObject is the name of a region's Lease object.
func regionObject(region string) string { return "evenkeel-owner-" + strings.ToLower(region) }

// enter makes the scopes: this proxy's region, and the regions of the engines in the config.
func (n *neighbours) enter() error {
	s, c := n.set, &n.set.conf.Geo
	regions := []string{c.Self.Region}
	for _, e := range slices.Concat(s.conf.Engines.Prefill, s.conf.Engines.Decode, s.conf.Engines.Aggregated) {
		if e.Region != "" && !slices.Contains(regions, e.Region) {
			regions = append(regions, e.Region)
		}
	}
	all := map[string]*Scope{}
	for _, region := range regions {
		a := s.scope(region)
		a.home = region == c.Self.Region
		if !a.home {
			a.share = c.Ownership.MaxShare
		}
		all[region] = a
		if c.Ownership.Engine != geo.OwnStatic {
			if err := s.claim(a, n.rank(a)); err != nil {
				return fmt.Errorf("geo.ownership: region %s: %w", region, err)
			}
			continue
		}
		home := c.Self.ID // for another region, the first peer of the region
		for _, p := range c.Peers {
			if !a.home && p.Region == region {
				home = p.ID
				break
			}
		}
		a.hold = 0 // see cautious
		a.static = lease.NewStatic(c.Self.ID, home, n.order(region), c.Ownership.DeadAfter, time.Now())
		v := a.static.View(time.Now())
		a.view.Store(&v)
	}
	s.all.Store(&all)
	if c.Ownership.Engine == geo.OwnStatic {
		s.log.Warn("ownership is static: if the network between regions breaks, a region can have two owners, because no lease prevents it; a "+
			"proxy that takes over uses only a share of the slots",
			zap.Float64("max_share", c.Ownership.MaxShare))
	}
	return nil
}

// order lists the proxies that may take over a region, in the configured order; empty: the round trips decide.
func (n *neighbours) order(region string) (ids []string) {
	c := &n.set.conf.Geo
	for _, id := range c.Ownership.TakeoverOrder {
		itsRegion := c.Self.Region // an id that no peer has is this proxy's
		if peer := slices.IndexFunc(c.Peers, func(p geo.PeerConfig) bool { return p.ID == id }); peer >= 0 {
			itsRegion = c.Peers[peer].Region
		}
		if itsRegion == region { // the region is the proxy's own, so it does not have to take over
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

// rank is this proxy's place among the proxies that may take over a region; 0 is the first. Without a configured order, it is how many
// peers are nearer to the region, by the round trips that the region's dispatchers last measured. If these dispatchers differ, the largest
// number counts. To a dispatcher that has not measured this proxy, all peers are nearer.
func (n *neighbours) rank(a *Scope) (rank int) {
	self := n.set.conf.Geo.Self.ID
	if a.home {
		return 0
	}
	if order := n.order(a.Name); len(order) > 0 {
		if place := slices.Index(order, self); place >= 0 {
			return place
		}
		return len(order)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, roundTrips := range n.nearest[a.Name] { // of one dispatcher in the region, to its peers
		own, known := roundTrips[self]
		nearer := 0
		for id, ms := range roundTrips {
			if id != self && (!known || ms < own) {
				nearer++
			}
		}
		rank = max(rank, nearer)
	}
	return rank
}

// setStandings updates who owns the regions with a static order. To the claims of other regions it gives this proxy's rank, and whether
// enough engines answer.
func (n *neighbours) setStandings(all map[string]*Scope, reach map[string]Reach, now time.Time) {
	for name, a := range all {
		switch {
		case a.static != nil:
			n.judge(a, now)
		case !a.home:
			a.claim.SetRole(false, n.rank(a), reach[name].enough())
		}
	}
}

// mayYield returns nil if the dispatcher that asks for a region is one of the region's own.
func (n *neighbours) mayYield(a *Scope, sender string, _ geo.HandBack) error {
	if !slices.ContainsFunc(n.set.conf.Geo.Peers, func(p geo.PeerConfig) bool {
		return p.Region == a.Name && p.AnswersTo(sender)
	}) {
		return ErrNotHome
	}
	return nil
}

// hasHeirs is always false: there is no heir to wait for, because a released region goes to the first proxy that finds it released.
func (n *neighbours) hasHeirs(*Scope) bool { return false }

// takeReport records, from a peer's answer to a probe, the epochs of the regions that the peer owns and the peer's round trips to its own
// peers. For static orders the answer also shows that the peer lives.
func (n *neighbours) takeReport(all map[string]*Scope, h geo.ProbeReport) {
	for region, epoch := range h.Epochs {
		if a := all[region]; a != nil && a.claim != nil {
			a.claim.ObserveRivalEpoch(epoch)
		}
	}
	if all[h.Region] != nil && len(h.RTTMs) > 0 {
		n.mu.Lock()
		if n.nearest[h.Region] == nil {
			n.nearest[h.Region] = map[string]map[string]float64{}
		}
		n.nearest[h.Region][h.Peer] = h.RTTMs
		n.mu.Unlock()
	}
	for _, a := range all {
		if a.static != nil {
			a.mu.Lock()
			a.static.Saw(h.Peer, time.Now())
			a.mu.Unlock()
			n.judge(a, time.Now())
		}
	}
}

// judge computes who owns a scope with a static order now, and publishes a change.
func (n *neighbours) judge(a *Scope, now time.Time) {
	n.judging.Lock()
	defer n.judging.Unlock()
	a.mu.Lock()
	v := a.static.View(now)
	a.mu.Unlock()
	if v != *a.view.Load() {
		n.set.changed(a, v)
	}
}
