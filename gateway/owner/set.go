// Package owner says for which scopes this proxy admits new requests, if several proxies may serve the same engines. Scopes are either
// regions (its own, and those of a proxy that died) or decode groups of its own region. Each scope has one owner, by a lease (package
// lease). A request enters the scope before it is sent, is checked once more right before it is written, and carries the epoch of its
// owner. A proxy that loses a scope waits until the requests that have entered are written.
//
// The package knows fleet and dispatcher only through the functions of a Host. run.go has the goroutine; groups.go and regions.go decide
// which proxy should own which scope.
package owner

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// Kind says what the scopes are.
type Kind string

// Kinds.
const (
	Regions Kind = "region"
	Groups  Kind = "group"
)

func (k Kind) words() string {
	if k == Groups {
		return "decode group"
	}
	return "region's engines"
}

// Deps is what a Set needs of the proxy.
type Deps struct {
	Context    context.Context // ends with the proxy
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Buckets    []float64            // bounds of histogram buckets, in seconds
	KVHoldTimeout       func() time.Duration // longest time for which a prefill engine keeps KV blocks, by the current config
	Leaving    func() bool          // this proxy is shutting down

	// Engines returns the scopes that have engines.
	Engines func() map[string]Reach
	// Load returns what this proxy's own requests hold on the ranks of a scope (ours). If ask is true, it also asks the engines what all
	// requests hold there (all); silent lists the ranks that do not report it.
	Load func(ctx context.Context, scope string, ask bool) (ours, all []geo.Resident, silent []string)
	// Publish makes fleet and dispatcher act on the present answers of Admits and Room. Once it has returned, no new request is bound to a
	// scope that does not admit.
	Publish func(ctx context.Context)
}

// Reach is how many engines a scope has, and how many answer.
type Reach struct{ Up, All int }

// enough says whether at least half of the engines answer, so that a proxy could serve the scope.
func (r Reach) enough() bool { return r.All > 0 && 2*r.Up >= r.All }

// standing says which proxy should own which scope.
type standing interface {
	// setStandings gives each claim this proxy's rank among the proxies that should own the scope, from the present peers and engines.
	setStandings(all map[string]*Scope, reach map[string]Reach, now time.Time)
	// mayYield returns nil if this proxy may give a scope to the dispatcher that asks for it.
	mayYield(a *Scope, sender string, ask geo.HandBack) error
	// hasHeirs says whether there is another live proxy that should own a scope once this proxy has left.
	hasHeirs(a *Scope) bool
	// takeReport records what a peer's answer to a probe says about ownership.
	takeReport(all map[string]*Scope, h geo.ProbeReport)
}

// Set holds all scopes of a kind. A nil Set belongs to a proxy that shares no engines, and admits to every scope.
type Set struct {
	deps      Deps
	kind      Kind
	conf      *config.Config
	log       *zap.Logger
	leases    *leases
	openLease func(name string) (lease.Engine, error) // opens the lease of a scope
	times     lease.Times
	members   []string // the only proxies that may own scopes; empty: every proxy may
	region    string   // the proxy's own region
	peers     *geo.Peers
	standing
	metrics *metrics

	handsOver atomic.Bool

	ctx           context.Context
	claims        sync.WaitGroup // the claims that run
	lookNow       chan struct{}  // holds a token if Run must look at peers and engines at once
	ownersKnown   atomic.Bool    // some scope has had an owner since this proxy started
	all           atomic.Pointer[map[string]*Scope]
	barred        map[string]bar    // scopes that cannot be claimed; only Run uses it
	leavingScopes map[string]*Scope // scopes without engines, whose claims are still ending; only Run uses it

	mu   sync.Mutex
	lost chan struct{} // closed when a scope is lost, and then replaced by a new channel
}

// Join sets the node through which proxies talk to each other. It must be called before Run.
func (s *Set) Join(peers *geo.Peers) {
	if s != nil {
		s.peers = peers
	}
}

// scope returns a new scope without a claim.
func (s *Set) scope(name string) *Scope {
	a := NewScope(name)
	a.hold = s.deps.KVHoldTimeout()
	return a
}

// claim opens the lease of a scope and gives the scope a claim. rank is this proxy's place among the proxies that may take the scope.
func (s *Set) claim(a *Scope, rank int) error {
	engine, err := s.openLease(a.Name)
	if err != nil {
		return err
	}
	cfg := lease.Config{Self: s.leases.identity, Home: a.home, TakeoverRank: rank, Times: s.times, Members: s.members}
	cfg.MaxEpoch = s.leases.maxEpoch()
	a.Claim(cfg, engine, lease.Hooks{
		OnChange: func(v lease.View) { s.changed(a, v) },
		AskBack:  func(ctx context.Context, holder string, epoch int64) error { return s.askBack(ctx, a, holder, epoch) },
		Vote: func(ctx context.Context, member string, ask lease.Vote) error {
			return s.peers.AskVote(ctx, member, geo.Vote{Region: s.region, Group: a.Name, Vote: ask})
		},
	}, s.log.With(zap.String(string(s.kind), a.Name)))
	return nil
}

// Of returns the scope with that name; nil: this proxy shares no engines, or does not know the scope yet.
func (s *Set) Of(name string) *Scope {
	if s == nil {
		return nil
	}
	return (*s.all.Load())[name]
}

// Admits says whether this proxy may send new work to the engines of a scope.
func (s *Set) Admits(name string) bool {
	if s == nil {
		return true
	}
	a := s.Of(name)
	return a != nil && a.Admits()
}

// AdmitsAny says whether this proxy may send new work to the engines of any scope.
func (s *Set) AdmitsAny() bool {
	if s == nil {
		return true
	}
	for _, a := range *s.all.Load() {
		if a.Admits() {
			return true
		}
	}
	return false
}

// Has says whether the scopes are of that kind.
func (s *Set) Has(k Kind) bool { return s != nil && s.kind == k }

// Losses returns a channel that is closed at the next loss of a scope; nil: this proxy shares no engines, so it cannot lose any.
func (s *Set) Losses() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// Unready says why no decode group has an owner, so that no request can be served; empty: requests can be served.
func (s *Set) Unready(now time.Time) string {
	switch {
	case !s.Has(Groups):
		return ""
	case !s.ownersKnown.Load(): // a new request could only wait
		return "no proxy owns a decode group yet"
	}
	all := *s.all.Load()
	if len(all) == 0 {
		return ""
	}
	for _, a := range all {
		a.mu.Lock()
		heard := a.ownerHeard
		a.mu.Unlock()
		mayHaveOwner := now.Before(heard.Add(s.times.RenewDeadline))
		if v := a.view.Load(); v.Admits || !v.StoreAway || mayHaveOwner { // while the store answers, a group without an owner soon gets one
			return ""
		}
	}
	return "no proxy owns a decode group, for the store of leases does not answer"
}

// Leave releases all leases of this proxy, as the last step of a shutdown. Most leases are gone by then, because the other proxies have
// asked for the scopes before (HandOver).
func (s *Set) Leave(ctx context.Context) {
	if s == nil {
		return
	}
	var all sync.WaitGroup
	for _, a := range *s.all.Load() {
		if a.claim != nil {
			all.Go(func() { a.claim.Leave(ctx) })
		}
	}
	all.Wait()
}

// Close ends the connections to the store of leases. No claim may run any more.
func (s *Set) Close() {
	if s != nil {
		s.leases.close()
	}
}
