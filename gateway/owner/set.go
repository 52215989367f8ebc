// Package owner says to which scopes this proxy admits new requests, where several
// proxies may serve the same engines: to regions, its own and those of a proxy that
// died, or to decode groups of its own region. Each scope has one owner, by a lease
// (package lease), and before its engines stands one fence: a request enters it, is
// looked at a last time in the moment in which it is written, and carries the epoch
// of its owner; who loses a scope waits until what has entered is written.
//
// The package knows nothing of fleet or dispatcher but the functions of a Host.
// run.go has the goroutine; groups.go and regions.go say who should own what.
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

// Kind is what scopes are.
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

// Host is the proxy around a Set.
type Host struct {
	Context    context.Context // of the proxy's life
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Buckets    []float64            // of seconds, for histograms
	Hold       func() time.Duration // the longest time for which a prefill engine keeps KV blocks, by the config in force
	Leaving    func() bool          // this proxy drains

	// Engines are the scopes that engines are in.
	Engines func() map[string]Reach
	// Load is what our own requests hold of the ranks of a scope (ours). With ask, it also asks the engines what runs
	// there (all); silent are the ranks that do not say.
	Load func(ctx context.Context, scope string, ask bool) (ours, all []geo.Resident, silent []string)
	// Publish has fleet and dispatcher take over what Admits and Room say now. When it returns, no request is bound any
	// more to a scope that does not admit.
	Publish func(ctx context.Context)
}

// Reach is how many engines a scope has, and how many answer.
type Reach struct{ Up, All int }

// enough says whether a scope could be served with the engines that answer.
func (r Reach) enough() bool { return r.All > 0 && 2*r.Up >= r.All }

// standing says which proxy should own which scope.
type standing interface {
	// setStandings tells all claims this proxy's place among the owners to be, by the peers and engines of now.
	setStandings(all map[string]*Scope, reach map[string]Reach, now time.Time)
	// mayYield is nil if a scope may go from here to the dispatcher that asks for it.
	mayYield(a *Scope, sender string, ask geo.HandBack) error
	// hasHeirs says whether another proxy lives that should own a scope once this proxy has left.
	hasHeirs(a *Scope) bool
	// takeReport takes what a peer said in the answer to a probe.
	takeReport(all map[string]*Scope, h geo.ProbeReport)
}

// Set is all scopes of a kind. A nil Set is that of a proxy without others, which admits to every scope.
type Set struct {
	host      Host
	kind      Kind
	conf      *config.Config
	log       *zap.Logger
	leases    *leases
	openLease func(name string) (lease.Engine, error) // the lease of a scope
	times     lease.Times
	members   []string // the only proxies that may own anything; empty: any may
	region    string   // ours
	node      *geo.Node
	standing
	metrics *metrics

	handsOver atomic.Bool

	ctx           context.Context
	claims        sync.WaitGroup // that run
	lookNow       chan struct{}  // holds a token if Run is to look at once
	ownersKnown   atomic.Bool    // some proxy has admitted to some scope since the start
	all           atomic.Pointer[map[string]*Scope]
	barred        map[string]bar    // scopes that cannot be owned; only Run uses it
	leavingScopes map[string]*Scope // scopes whose claim is being given up; only Run uses it

	mu   sync.Mutex
	lost chan struct{} // closed when a scope is lost; another channel then takes its place
}

// Join sets the node over which proxies talk to each other. It is called before Run.
func (s *Set) Join(n *geo.Node) {
	if s != nil {
		s.node = n
	}
}

// scope makes a scope without a claim.
func (s *Set) scope(name string) *Scope {
	a := NewScope(name)
	a.hold = s.host.Hold()
	return a
}

// claim opens the lease of a scope and gives the scope its claim. rank is this proxy's place among those that may take
// the scope.
func (s *Set) claim(a *Scope, rank int) error {
	engine, err := s.openLease(a.Name)
	if err != nil {
		return err
	}
	a.Claim(lease.Config{Self: s.leases.identity, Home: a.home, Rank: rank, Times: s.times, Members: s.members}, engine, lease.Hooks{
		OnChange: func(v lease.View) { s.changed(a, v) },
		AskBack:  func(ctx context.Context, holder string, epoch int64) error { return s.askBack(ctx, a, holder, epoch) },
		Vote: func(ctx context.Context, member string, ask lease.Vote) error {
			return s.node.AskVote(ctx, member, geo.Vote{Region: s.region, Group: a.Name, Vote: ask})
		},
	}, s.log.With(zap.String(string(s.kind), a.Name)))
	return nil
}

// Of is the scope with that name; nil: this proxy has no others, or knows no such scope yet.
func (s *Set) Of(name string) *Scope {
	if s == nil {
		return nil
	}
	return (*s.all.Load())[name]
}

// Admits says whether engines of a scope get new work from here.
func (s *Set) Admits(name string) bool {
	if s == nil {
		return true
	}
	a := s.Of(name)
	return a != nil && a.Admits()
}

// AdmitsAny says whether any scope's engines get new work from here.
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

// Losses returns a channel that is closed when a scope is lost next; nil: none ever is.
func (s *Set) Losses() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// Unready says why no request can be served because no proxy owns anything; empty: requests can be served.
func (s *Set) Unready(now time.Time) string {
	switch {
	case !s.Has(Groups):
		return ""
	case !s.ownersKnown.Load(): // what comes could only wait
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
		if v := a.view.Load(); v.Admits || !v.Away || now.Before(heard.Add(s.times.RenewDeadline)) {
			return ""
		}
	}
	return "no proxy owns a decode group, for the store of leases does not answer"
}

// Leave releases all leases of this proxy, as the last act of a shutdown. While the proxy drains, others ask for its
// scopes, so that most leases are gone by then.
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

// Close ends the connections to the lease's store, once no claim runs.
func (s *Set) Close() {
	if s != nil {
		s.leases.close()
	}
}
