package gateway

import (
	"context"
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
	"evenkeel/prefill"
)

// groups says to which decode groups this proxy admits, where several proxies
// serve the same engines: each group has one owner, by a lease. A nil one is
// alone and admits to all.
type groups struct {
	gw     *Gateway
	leases *leases
	known  atomic.Bool                             // somebody admitted to something since the start
	all    atomic.Pointer[map[string]*decodeGroup] // by name; follow replaces it

	barred map[string]string // of follow: groups that cannot be owned, and why

	taken *prometheus.CounterVec
	after prometheus.Histogram

	mu      sync.Mutex // over what follows, never held over anything else
	members *lease.Members
	shares  map[string]map[string]prefill.Share // of siblings, by their names
	lost    chan struct{}                       // closed when a group is, and another put in its place
}

const (
	groupsEvery  = 250 * time.Millisecond // how often members and engines are looked at
	sendPatience = time.Second            // for requests that were admitted to be written, when a group is lost
)

// newGroups wires them; nil if this proxy is alone.
func newGroups(g *Gateway) (*groups, error) {
	c := &g.conf().HA
	if !c.On() {
		return nil, nil
	}
	self := g.conf().Geo.Self.ID
	s := &groups{
		gw: g, lost: make(chan struct{}), barred: map[string]string{}, shares: map[string]map[string]prefill.Share{},
		leases:  newLeases(c.Engine, c.Lease, c.Kubernetes.Namespace, c.Etcd, self, g.log),
		members: lease.NewMembers(self, c.Mode == config.HAShard, c.Lease),
		taken:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "evenkeel_ha_acquired_total", Help: "Times that the decode group became this proxy's."}, []string{"group"}),
		after: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "evenkeel_ha_takeover_seconds", Help: "From when another owner of a decode group was heard of last until this proxy admitted to it.", Buckets: secondsBuckets,
		}),
	}
	s.all.Store(&map[string]*decodeGroup{})
	if _, err := s.leases.open(leaseName(""), c.Kubernetes.Kubeconfig, ""); err != nil { // groups come with engines, and later: what is wrong here is said now
		return nil, fmt.Errorf("ha: %w", err)
	}
	return s, g.reg.Register(s)
}

// start begins to claim.
func (s *groups) start() {
	s.gw.background.Go(func() { s.follow(s.gw.ctx) })
}

// follow keeps what claims need to know of groups, members and engines.
func (s *groups) follow(ctx context.Context) {
	tick := time.NewTicker(groupsEvery)
	defer tick.Stop()
	var scraped time.Time
	for now := time.Now(); ; {
		s.enlist(ctx)
		s.place(now)
		if now.Sub(scraped) >= areaEvery {
			scraped = now
			s.countOthers(ctx, now)
		}
		select {
		case <-ctx.Done():
			return
		case now = <-tick.C:
		}
	}
}

// enlist claims the groups that engines have come with, and leaves those whose
// engines have all gone.
func (s *groups) enlist(ctx context.Context) {
	before, there := *s.all.Load(), s.gw.fleet.groups()
	now := make(map[string]*decodeGroup, len(there))
	changed := false
	for _, name := range there {
		if now[name] = before[name]; now[name] != nil {
			continue
		}
		a, err := s.claim(name)
		if err != nil {
			if s.barred[name] != err.Error() {
				s.barred[name] = err.Error()
				s.gw.log.Error("a decode group cannot be owned, and gets nothing from here; said again when it fails otherwise", zap.String("group", name), zap.Error(err))
			}
			delete(now, name)
			continue
		}
		delete(s.barred, name)
		var run context.Context
		run, a.end = context.WithCancel(ctx)
		s.gw.background.Go(func() { a.claim.Run(run) })
		now[name], changed = a, true
	}
	s.all.Store(&now)
	for name, a := range before {
		if now[name] != nil {
			continue
		}
		changed = true
		s.gw.background.Go(func() {
			until, cancel := context.WithTimeout(ctx, s.leases.duration)
			defer cancel()
			a.claim.Leave(until)
			a.end()
		})
	}
	if changed {
		s.gw.fleet.publish()
	}
}

// claim makes a group and its claim.
func (s *groups) claim(name string) (*decodeGroup, error) {
	c := &s.gw.conf().HA
	engine, err := s.leases.open(leaseName(name), c.Kubernetes.Kubeconfig, name)
	if err != nil {
		return nil, fmt.Errorf("ha: %w", err)
	}
	a := &decodeGroup{name: name, hold: s.gw.holdTimeout(), others: map[string]geo.Resident{}}
	a.view.Store(&lease.View{Phase: lease.Watching})
	a.claim = lease.NewClaim(lease.Config{Self: s.leases.identity, Times: timesOf(c.Lease, c.StartDelay)}, engine, lease.Hooks{
		OnChange: func(v lease.View) { s.changed(a, v) },
		AskBack:  func(ctx context.Context, holder string, epoch int64) error { return s.askBack(ctx, a, holder, epoch) },
	}, s.gw.log.With(zap.String("group", name)))
	return a, nil
}

// leaseName is the object's: what a Kubernetes name may not have becomes a dash,
// and then a sum tells such names apart.
func leaseName(group string) string {
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
	return fmt.Sprintf("evenkeel-group-%s-%08x", strings.Trim(clean[:min(len(clean), 200)], "-"), sumOf(group))
}

// see looks who lives and does not leave.
func (s *groups) see(now time.Time) (leaving bool) {
	live, stay := s.gw.regions.node.Siblings()
	if leaving, _ = s.gw.service.leaving(); !leaving {
		stay = append(stay, s.gw.regions.node.ID())
	}
	var gone []string
	s.mu.Lock()
	s.members.See(stay, now)
	for id := range s.shares {
		if !slices.Contains(live, id) {
			gone = append(gone, id)
		}
	}
	s.mu.Unlock()
	for _, id := range gone {
		s.share(id, nil)
	}
	return leaving
}

// share takes what a sibling has on the prefill engines; nil: it is gone.
func (s *groups) share(id string, has map[string]prefill.Share) {
	s.mu.Lock()
	if has == nil {
		delete(s.shares, id)
	} else {
		s.shares[id] = has
	}
	all := slices.Collect(maps.Values(s.shares))
	s.mu.Unlock()
	s.gw.tier.SetShares(all...)
}

// place tells every claim whose turn it is by the members of now.
func (s *groups) place(now time.Time) {
	leaving := s.see(now)
	for name, a := range *s.all.Load() {
		s.mu.Lock()
		rank, home := s.members.Place(name, lease.Dispatcher(a.view.Load().Holder), now)
		s.mu.Unlock()
		up, all := s.gw.fleet.groupUp(name)
		a.claim.Stand(home, rank, !leaving && all > 0 && 2*up >= all)
	}
}

// of is the group with that name; nil: this proxy is alone, or knows none yet.
func (s *groups) of(name string) *decodeGroup {
	if s == nil {
		return nil
	}
	return (*s.all.Load())[name]
}

// admits says whether a decode group gets new work from here.
func (s *groups) admits(name string) bool {
	if s == nil {
		return true
	}
	a := s.of(name)
	return a != nil && a.view.Load().Admits
}

// settled says that somebody admitted to something since the start: before, what
// comes could only wait.
func (s *groups) settled() bool { return s == nil || s.known.Load() }

// losses is closed when the next group is lost; nil: none ever is.
func (s *groups) losses() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// leave releases what is owned, the last act of a shutdown; while it drains, the
// others ask for it (geo R36, R38).
func (s *groups) leave(ctx context.Context) {
	if s == nil {
		return
	}
	var all sync.WaitGroup
	for _, a := range *s.all.Load() {
		all.Go(func() { a.claim.Leave(ctx) })
	}
	all.Wait()
}

// close ends the connections to the lease's store, once no claim runs.
func (s *groups) close() {
	if s != nil {
		s.leases.close()
	}
}
