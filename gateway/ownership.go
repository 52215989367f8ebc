package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

	judging sync.Mutex // of static orders: the view that is judged last is published last
}

// area is a region with its claim.
type area struct {
	region string
	home   bool
	share  float64       // of slots that a taker uses while it is cautious
	hold   time.Duration // how long that is; 0: always
	view   atomic.Pointer[lease.View]
	claim  *lease.Claim // nil: static

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
	o := &owners{gw: g, areas: map[string]*area{}, leases: newLeases(own.Engine, own.Lease, own.Kubernetes.Namespace, own.Etcd, c.Self.ID, g.log)}
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
			a.view.Store(new(a.static.View(time.Now())))
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

// of is the area of an engine; "" is our own region.
func (o *owners) of(region string) *area {
	if region == "" {
		region = o.gw.conf().Geo.Self.Region
	}
	return o.areas[region]
}

// admits says whether an engine of that region gets new work from here.
func (o *owners) admits(region string) bool {
	if o == nil {
		return true
	}
	a := o.of(region)
	return a != nil && a.view.Load().Admits
}

// room is what a decode rank of that region has for us: of slots and KV tokens,
// as much as a cautious owner uses; 0 slots: all (geo R35).
func (o *owners) room(region, rank string, slots int, kv int64) (int, int64) {
	if o == nil {
		return 0, kv
	}
	a := o.of(region)
	if a == nil {
		return 0, kv
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.cautious(time.Now()) {
		return 0, kv
	}
	limit := slots
	if !a.home {
		limit = int(a.share * float64(slots))
	}
	r := a.residents[rank]
	if kv > 0 {
		kv = max(1, kv-r.KVTokens)
	}
	return max(1, min(limit, slots-r.Requests)), kv
}

// cautious says whether others' requests may still run on the engines. Called
// with a.mu held.
func (a *area) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static: another may believe itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// changed takes a view of the area's claim. Once it returns from one that does
// not admit, nothing is bound to the area's engines any more.
func (o *owners) changed(a *area, v lease.View) {
	was := a.view.Swap(&v)
	if was.Admits == v.Admits {
		if was.Phase != v.Phase {
			o.gw.log.Info("ownership", zap.String("region", a.region), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
		}
		return
	}
	a.mu.Lock()
	a.adopted = time.Time{}
	if v.Admits {
		a.adopted, a.gave = time.Now(), false
	}
	a.mu.Unlock()
	o.gw.log.Warn("ownership of a region's engines changed", zap.String("region", a.region), zap.Bool("admits", v.Admits),
		zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
	o.gw.fleet.publish()
	if !v.Admits { // the dispatcher has taken the news up once it answers
		ctx, cancel := context.WithTimeout(o.gw.ctx, areaEvery)
		defer cancel()
		o.gw.dispatcher.Status(ctx)
	}
}

// follow keeps what claims need to know of peers and engines.
func (o *owners) follow(ctx context.Context) {
	tick := time.NewTicker(areaEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, a := range o.areas {
				o.look(ctx, a, now)
			}
		}
	}
}

func (o *owners) look(ctx context.Context, a *area, now time.Time) {
	if a.claim != nil && !a.home {
		up, all := o.gw.fleet.reach(a.region)
		a.claim.SetFit(all > 0 && 2*up >= all)
		a.claim.SetRank(o.rank(a))
	}
	if a.static != nil {
		o.judge(a, now)
	}
	a.mu.Lock()
	cautious := a.cautious(now)
	ended := !cautious && len(a.residents) > 0
	if ended {
		clear(a.residents)
	}
	a.mu.Unlock()
	if cautious {
		o.scrapeResidents(ctx, a)
	}
	if cautious || ended {
		o.gw.fleet.publish()
	}
}

// judge asks the static order who owns the area now.
func (o *owners) judge(a *area, now time.Time) {
	o.judging.Lock()
	defer o.judging.Unlock()
	a.mu.Lock()
	v := a.static.View(now)
	a.mu.Unlock()
	if v != *a.view.Load() {
		o.changed(a, v)
	}
}

// scrapeResidents reads what runs on the area's ranks and is not ours.
func (o *owners) scrapeResidents(ctx context.Context, a *area) {
	ours := map[string]geo.Resident{}
	for _, r := range o.running(ctx, a.region) {
		ours[r.ID] = r
	}
	found := o.gw.residents(ctx, a.region)
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, r := range found {
		a.residents[id] = geo.Resident{ID: id, Requests: max(0, r.Requests-ours[id].Requests), KVTokens: max(0, r.KVTokens-ours[id].KVTokens)}
	}
}

// running is what our own requests hold of a region's ranks.
func (o *owners) running(ctx context.Context, region string) (list []geo.Resident) {
	for _, m := range o.gw.dispatcher.Status(ctx).Models {
		for _, w := range m.Workers {
			if w.Used > 0 && o.of(o.gw.fleet.regionOf(w.ID)) == o.areas[region] {
				list = append(list, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	return list
}

// tenure is what probes tell of us.
func (o *owners) tenure() geo.Tenure {
	t := geo.Tenure{Epochs: map[string]int64{}, Lent: map[string]int{}}
	for _, a := range o.areas {
		if v := a.view.Load(); v.Epoch > 0 {
			t.Epochs[a.region] = v.Epoch
		}
		a.mu.Lock()
		gave := a.gave
		a.mu.Unlock()
		if !gave {
			continue
		}
		n := 0
		for _, r := range o.running(o.gw.ctx, a.region) {
			n += r.Requests
		}
		if n > 0 {
			t.Lent[a.region] = n
			continue
		}
		a.mu.Lock()
		a.gave = false
		a.mu.Unlock()
	}
	return t
}

// heard takes what a peer's probe told.
func (o *owners) heard(h geo.Heard) {
	for region, epoch := range h.Epochs {
		if a := o.areas[region]; a != nil && a.claim != nil {
			a.claim.Claimed(epoch)
		}
	}
	for _, a := range o.areas {
		a.mu.Lock()
		if h.Region == a.region && len(h.RTTMs) > 0 {
			a.nearest[h.Peer] = h.RTTMs
		}
		if a.static != nil {
			a.static.Saw(h.Peer, time.Now())
		}
		a.mu.Unlock()
		if a.static != nil {
			o.judge(a, time.Now())
		}
	}
}

// errNotHome is a dispatcher that asks for another's region.
var errNotHome = errors.New("only a dispatcher whose home the region is may ask for it")

// handBack stops what we admit to a region's engines, says what of ours still
// runs there, and lets the lease go (geo R36).
func (o *owners) handBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a := o.areas[ask.Region]
	if a == nil || a.claim == nil {
		return h, fmt.Errorf("region %s: %w", ask.Region, lease.ErrNotHolder)
	}
	if !slices.ContainsFunc(o.gw.conf().Geo.Peers, func(p config.GeoPeer) bool {
		return p.Region == ask.Region && (p.ID == sender || p.Discover != "" && strings.HasPrefix(sender, p.ID+"-"))
	}) {
		return h, errNotHome
	}
	h = geo.HandedBack{Region: ask.Region, Epoch: ask.Epoch, Ranks: []geo.Resident{}}
	err = a.claim.GiveBack(ask.Epoch, func() {
		a.mu.Lock()
		a.gave = true
		a.mu.Unlock()
		h.Ranks = append(h.Ranks, o.running(o.gw.ctx, a.region)...)
	})
	return h, err
}

// askBack asks the holder for our region, and keeps what it says runs there.
func (o *owners) askBack(ctx context.Context, a *area, holder string, epoch int64) error {
	h, err := o.gw.regions.node.AskBack(ctx, holder, geo.HandBack{Region: a.region, Epoch: epoch})
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.residents)
	for _, r := range h.Ranks {
		a.residents[r.ID] = r
	}
	return nil
}

// AreaStatus is a region whose engines may be ours.
type AreaStatus struct {
	Region string `json:"region"`
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"`
	Holder string `json:"holder"` // dispatcher's id; empty: nobody
	Epoch  int64  `json:"epoch"`
	Rank   int    `json:"rank"` // among those that may take it
	Up     int    `json:"engines_up"`
	All    int    `json:"engines"`
}

// Owners lists the regions whose engines this proxy may serve; none without
// ownership.
func (g *Gateway) Owners() (list []AreaStatus) {
	o := g.owners
	if o == nil {
		return nil
	}
	for _, name := range o.names {
		a := o.areas[name]
		v := a.view.Load()
		up, all := g.fleet.reach(name)
		list = append(list, AreaStatus{
			Region: name, Home: a.home, Phase: string(v.Phase), Admits: v.Admits, Holder: lease.Dispatcher(v.Holder), Epoch: v.Epoch, Rank: o.rank(a), Up: up, All: all,
		})
	}
	return list
}

var (
	descOwner    = prometheus.NewDesc("evenkeel_geo_owner", "1 while this proxy admits requests to the region's engines.", []string{"region"}, nil)
	descEpoch    = prometheus.NewDesc("evenkeel_geo_epoch", "Epoch of the region's ownership, as known here; 0 with a static order.", []string{"region"}, nil)
	descTakeover = prometheus.NewDesc("evenkeel_geo_takeover_active", "1 while this proxy serves the engines of another's region.", []string{"region"}, nil)
)

// Describe implements prometheus.Collector.
func (o *owners) Describe(ch chan<- *prometheus.Desc) {
	ch <- descOwner
	ch <- descEpoch
	ch <- descTakeover
}

// Collect implements prometheus.Collector.
func (o *owners) Collect(ch chan<- prometheus.Metric) {
	for _, name := range slices.Sorted(maps.Keys(o.areas)) {
		a := o.areas[name]
		v := a.view.Load()
		bit := func(b bool) float64 {
			if b {
				return 1
			}
			return 0
		}
		for desc, value := range map[*prometheus.Desc]float64{descOwner: bit(v.Admits), descEpoch: float64(v.Epoch), descTakeover: bit(v.Admits && !a.home)} {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, name)
		}
	}
}
