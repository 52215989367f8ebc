package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// owners says which regions' engines this proxy serves: its own, and those of a
// dispatcher that died. A nil one has a single region and owns it.
type owners struct {
	gw     *Gateway
	areas  map[string]*area // by region
	names  []string
	leases *leases
	poke   chan struct{} // looks at once

	judging sync.Mutex // of static orders: the view that is judged last is published last
}

// area is a region with its claim.
type area struct {
	region string
	home   bool
	share  float64       // of slots that a taker uses while it is cautious
	hold   time.Duration // how long that is; 0: always
	view   atomic.Pointer[lease.View]
	gone   atomic.Pointer[chan struct{}] // closed while we do not admit
	claim  *lease.Claim                  // nil: static

	mu        sync.Mutex
	static    *lease.Static                 // nil: claim
	nearest   map[string]map[string]float64 // ms from a dispatcher of the region to each of its peers
	adopted   time.Time                     // when it last became ours; zero: it is not
	residents map[string]geo.Resident       // others' requests, by rank, while it is cautious
	gave      bool                          // handed back, and requests of ours may still run there
}

// areaEvery is how often peers, engines and residents are looked at.
const areaEvery = time.Second

// newOwners wires the claims; nil if regions have no owners.
func newOwners(g *Gateway) (*owners, error) {
	c := &g.conf().Geo
	if !c.On() || !c.Ownership.On() {
		return nil, nil
	}
	own := &c.Ownership
	o := &owners{gw: g, areas: map[string]*area{}, poke: make(chan struct{}, 1), leases: newLeases(own.Engine, own.Lease, own.Kubernetes.Namespace, own.Etcd, c.Self.ID, g.log)}
	regions := []string{c.Self.Region}
	for _, e := range slices.Concat(g.conf().Engines.Prefill, g.conf().Engines.Decode) {
		if e.Region != "" && !slices.Contains(regions, e.Region) {
			regions = append(regions, e.Region)
		}
	}
	for _, region := range regions {
		a := &area{
			region: region, home: region == c.Self.Region, share: c.Ownership.MaxShare,
			nearest: map[string]map[string]float64{}, residents: map[string]geo.Resident{},
		}
		a.view.Store(&lease.View{Phase: lease.Watching})
		a.gone.Store(new(closed()))
		if c.Ownership.Engine != config.OwnStatic {
			engine, err := o.leases.open("evenkeel-owner-"+strings.ToLower(region), own.Kubernetes.Kubeconfig[region], region)
			if err != nil {
				return nil, fmt.Errorf("geo.ownership: region %s: %w", region, err)
			}
			a.claim = lease.NewClaim(lease.Config{Self: o.leases.identity, Home: a.home, Rank: o.rank(a), Times: timesOf(own.Lease, own.StartDelay)}, engine, lease.Hooks{
				OnChange: func(v lease.View) { o.changed(a, v) },
				AskBack:  func(ctx context.Context, holder string, epoch int64) error { return o.askBack(ctx, a, holder, epoch) },
			}, g.log.With(zap.String("region", region)))
			a.hold = g.holdTimeout()
		} else {
			home := c.Self.ID
			for _, p := range c.Peers {
				if !a.home && p.Region == region {
					home = p.ID
					break
				}
			}
			a.static = lease.NewStatic(c.Self.ID, home, o.order(region), c.Ownership.DeadAfter, time.Now())
			v := a.static.View(time.Now())
			if a.view.Store(&v); v.Admits {
				a.gone.Store(new(make(chan struct{})))
			}
		}
		o.areas[region] = a
		o.names = append(o.names, region)
	}
	if c.Ownership.Engine == config.OwnStatic {
		g.log.Warn("ownership is static: a partition between regions makes two owners of one; each taker uses a share of the slots, and no lease prevents it",
			zap.Float64("max_share", c.Ownership.MaxShare))
	}
	return o, g.reg.Register(o)
}

// holdTimeout is the longest that a prefiller keeps KV blocks for somebody.
func (g *Gateway) holdTimeout() (longest time.Duration) {
	for _, p := range g.conf().profiles {
		longest = max(longest, p.KVHoldTimeout)
	}
	return longest
}

// order is who may take a region, first to last; empty: by round trip.
func (o *owners) order(region string) (ids []string) {
	c := &o.gw.conf().Geo
	for _, id := range c.Ownership.TakeoverOrder {
		at := slices.IndexFunc(c.Peers, func(p config.GeoPeer) bool { return p.ID == id })
		if at < 0 && region == c.Self.Region || at >= 0 && c.Peers[at].Region == region {
			continue // it is at home there
		}
		ids = append(ids, id)
	}
	return ids
}

// rank is this proxy's place among those that may take a region.
func (o *owners) rank(a *area) (rank int) {
	c := &o.gw.conf().Geo
	if a.home {
		return 0
	}
	if order := o.order(a.region); len(order) > 0 {
		if at := slices.Index(order, c.Self.ID); at >= 0 {
			return at
		}
		return len(order)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, from := range a.nearest { // as measured last from there
		nearer := 0
		for id, ms := range from {
			if own, ok := from[c.Self.ID]; id != c.Self.ID && (!ok || ms < own) {
				nearer++
			}
		}
		rank = max(rank, nearer)
	}
	return rank
}

// start begins to claim.
func (o *owners) start() {
	for _, a := range o.areas {
		if a.claim != nil {
			o.gw.background.Go(func() { a.claim.Run(o.gw.ctx) })
		}
	}
	o.gw.background.Go(func() { o.follow(o.gw.ctx) })
}

// leave releases what is owned, the last act of a drain (geo R38).
func (o *owners) leave(ctx context.Context) {
	if o == nil {
		return
	}
	var all sync.WaitGroup
	for _, a := range o.areas {
		if a.claim != nil {
			all.Go(func() { a.claim.Leave(ctx) })
		}
	}
	all.Wait()
}

// close ends the connections to the lease's store, once no claim runs.
func (o *owners) close() {
	if o != nil {
		o.leases.close()
	}
}
