package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine"
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

// decodeGroup is one of them with its claim.
type decodeGroup struct {
	name    string
	claim   *lease.Claim
	end     context.CancelFunc // of the claim
	view    atomic.Pointer[lease.View]
	sending atomic.Int64  // requests that were admitted and are not written yet
	yields  atomic.Bool   // it is about to be another's: nothing more is begun for it
	hold    time.Duration // others' requests may run there for so long after a takeover

	mu      sync.Mutex
	others  map[string]geo.Resident // requests of others, by rank, while we are cautious
	adopted time.Time               // when it last became ours; zero: it is not
	heard   time.Time               // when its last other owner was heard of
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

// changed takes a view of a group's claim. Once it returns from one that does
// not admit, nothing is bound to the group's engines any more, and what was
// bound before is on its way.
func (s *groups) changed(a *decodeGroup, v lease.View) {
	was := a.view.Swap(&v)
	log := s.gw.log.With(zap.String("group", a.name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
	if was.Admits == v.Admits {
		if was.Phase != v.Phase {
			log.Info("ownership")
		}
		return
	}
	now := time.Now()
	a.mu.Lock()
	a.adopted = time.Time{}
	if !v.Admits {
		clear(a.others)
	}
	var since time.Duration
	if v.Admits {
		s.known.Store(true)
		a.adopted = now
		if !a.heard.IsZero() {
			since = now.Sub(a.heard)
			s.after.Observe(since.Seconds())
		}
		s.taken.WithLabelValues(a.name).Inc()
	}
	a.mu.Unlock()
	log.Warn("ownership of a decode group changed", zap.Bool("admits", v.Admits), zap.Duration("after_the_last_owner", since))
	s.gw.fleet.publish()
	if !v.Admits {
		s.mu.Lock()
		close(s.lost)
		s.lost = make(chan struct{})
		s.mu.Unlock()
		a.flush(s.gw.ctx)
	}
	ctx, cancel := context.WithTimeout(s.gw.ctx, areaEvery)
	defer cancel()
	s.gw.regions.look(ctx) // the dispatcher has taken the news up once it answers
	s.gw.tier.Wake()
}

// flush waits until what was admitted is written. What takes longer finds in its
// last look that it is too late.
func (a *decodeGroup) flush(ctx context.Context) {
	for end := time.Now().Add(sendPatience); a.sending.Load() > 0 && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
}

// enter is where a request begins to be sent to the group's engines; leave must
// be called once it is written, or will not be. A nil group is always ours.
func (a *decodeGroup) enter() (leave func(), ok bool) {
	if a == nil {
		return func() {}, true
	}
	a.sending.Add(1)
	leave = sync.OnceFunc(func() { a.sending.Add(-1) })
	if a.ours() == nil {
		return leave, true
	}
	leave()
	return leave, false
}

// ours is the last look, right before a request is written: a process that stood
// still since it admitted finds out here, and so does a request whose connection
// took longer than flush waits. Else it is errNotOwner.
func (a *decodeGroup) ours() error {
	if a == nil || a.view.Load().Admits && a.claim.Admits(time.Now()) {
		return nil
	}
	return errNotOwner
}

// mark adds the epoch of our ownership, for whoever stands before an engine and
// holds requests of an older one off, or counts them.
func (a *decodeGroup) mark(h []engine.Header) []engine.Header {
	if a == nil {
		return h
	}
	return append(h, engine.Header{Name: epochHeader, Value: strconv.FormatInt(a.view.Load().Epoch, 10)})
}

const epochHeader = "X-Evenkeel-Epoch"

// errNotOwner is a request that would have gone to a group that is another's by
// then.
var errNotOwner = errors.New("another proxy admits to the decode group now")

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

// handBack stops what we admit to a group, says what of ours still runs there,
// and lets the lease go (geo R36).
func (s *groups) handBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a := s.of(ask.Group)
	if a == nil || ask.Region != s.gw.conf().Geo.Self.Region || ask.Epoch != a.view.Load().Epoch {
		return h, fmt.Errorf("group %s: %w", ask.Group, lease.ErrNotHolder)
	}
	now := time.Now()
	s.see(now)
	s.mu.Lock()
	yields := s.members.Yields(ask.Group, sender, now)
	s.mu.Unlock()
	if !yields {
		return h, fmt.Errorf("group %s: %w, and %s is not before us in its order", ask.Group, lease.ErrNotHolder, sender)
	}
	a.yields.Store(true)
	defer a.yields.Store(false)
	s.finish(s.gw.ctx, a)
	h = geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	err = a.claim.GiveBack(ask.Epoch, func() { h.Ranks = append(h.Ranks, s.running(s.gw.ctx, a.name)...) })
	return h, err
}

// finish has what was begun here come to a rank before the group goes, where no
// other group of ours could decode it: what does not is prefilled again, and its
// first hand-off stays with the prefiller until the hold timeout.
func (s *groups) finish(ctx context.Context, a *decodeGroup) {
	ctx, cancel := context.WithTimeout(ctx, timesOf(s.leases.duration, 0).RenewDeadline/4) // who asks waits for half of it
	defer cancel()
	s.gw.regions.look(ctx) // from here on what comes waits, or goes elsewhere
	boards := slices.DeleteFunc(s.gw.fleet.boardsOf(a.name), s.gw.fleet.begins)
	for len(boards) > 0 && ctx.Err() == nil && s.underWay(boards) {
		time.Sleep(finishEvery)
	}
}

const finishEvery = 5 * time.Millisecond

// underWay says whether something is prefilled here, or waits for a rank, that
// would be decoded on one of the boards.
func (s *groups) underWay(boards []string) bool {
	return slices.ContainsFunc(s.gw.tier.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, func(m string) bool {
			r, _, _ := s.gw.fleet.lookup(m)
			return slices.Contains(boards, r.board)
		})
	})
}

// askBack asks the holder for a group that should be ours, and keeps what it
// says runs there.
func (s *groups) askBack(ctx context.Context, a *decodeGroup, holder string, epoch int64) error {
	h, err := s.gw.regions.node.AskBack(ctx, holder, geo.HandBack{Region: s.gw.conf().Geo.Self.Region, Group: a.name, Epoch: epoch})
	if err != nil {
		return err
	}
	up := s.gw.fleet.decodes(func(in *instance) bool { return in.conf.Group == a.name })
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.others)
	for _, in := range up { // of those that are not named nothing runs there
		for _, r := range ranksOf(in) {
			a.others[in.target(r).ID] = geo.Resident{}
		}
	}
	note(a.others, h.Ranks, nil)
	return nil
}

// tenure is what probes tell our siblings.
func (s *groups) tenure() geo.Tenure {
	t := geo.Tenure{Groups: map[string]int64{}, Decodes: s.gw.regions.decodes(), Prefill: s.gw.tier.Shares()}
	for name, a := range *s.all.Load() {
		if v := a.view.Load(); v.Admits {
			t.Groups[name] = v.Epoch
		}
	}
	return t
}

// hear takes what a sibling's probe told.
func (s *groups) hear(h geo.Heard) {
	if h.Region != s.gw.conf().Geo.Self.Region {
		return
	}
	s.share(h.Peer, h.Prefill)
	now := time.Now()
	for name, epoch := range h.Groups {
		if a := s.of(name); a != nil {
			s.known.Store(true)
			a.mu.Lock()
			a.heard = now
			a.mu.Unlock()
			a.claim.Claimed(epoch)
		}
	}
}
