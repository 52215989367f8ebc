// Package owner says for which scopes this proxy admits new requests, if several proxies may serve
// the same engines. Scopes are either regions (its own, and those of a proxy that died) or decode
// groups of its own region. Each has one owner, by a lease (package lease). A request enters the
// scope before it is sent, is checked once more right before it is written, and carries the epoch
// of its owner. A proxy that loses a scope waits until the requests that have entered are written.
//
// run.go has the goroutine; groups.go and regions.go decide which proxy should own which scope.
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

// Kind says whether the scopes of a Set are regions or decode groups.
type Kind string

// Values of Kind, as metrics name their label.
const (
	Regions Kind = "region"
	Groups  Kind = "group"
)

func (k Kind) text() string {
	if k == Groups {
		return "decode group"
	}
	return "region's engines"
}

// Deps is what a Set needs of the proxy.
type Deps struct {
	Context       context.Context // ends with the proxy
	Log           *zap.Logger
	Registerer    prometheus.Registerer
	Buckets       []float64            // bounds of histogram buckets, in seconds
	KVHoldTimeout func() time.Duration // the longest time that a prefill engine keeps KV
	Leaving       func() bool          // this proxy is shutting down

	// Engines returns the scopes that have engines, by name.
	Engines func() map[string]EngineCounts
	// Load returns what this proxy's own requests hold on the ranks of a scope and, if askEngines,
	// what all requests hold there by the engines' reports; silent ranks report nothing.
	Load func(ctx context.Context, scope string, askEngines bool) (ours, all []geo.Resident, silent []string)
	// Publish makes fleet and dispatcher act on Admits and RankQuota. Once it has returned, no new
	// request is bound to a scope that does not admit.
	Publish func(ctx context.Context)
}

const (
	onlyOurs   = false
	askEngines = true
)

// EngineCounts is how many engines a scope has, and how many answer.
type EngineCounts struct{ Up, All int }

func (r EngineCounts) halfAnswer() bool { return r.All > 0 && 2*r.Up >= r.All }

type succession interface {
	// updateClaims tells each claim this proxy's place among those that should own the scope, and
	// whether enough engines answer.
	updateClaims(all map[string]*Scope, engines map[string]EngineCounts, now time.Time)
	// checkHandBack returns nil if this proxy may give a scope to sender.
	checkHandBack(scope *Scope, sender string, ask geo.HandBack) error
	// hasSuccessor says whether another live proxy should own a scope once this proxy has left.
	hasSuccessor(scope *Scope) bool
	recordReport(all map[string]*Scope, h geo.ProbeReport)
}

// Set holds all scopes of a kind. A nil Set is that of a proxy that shares no engines, and admits
// to every scope.
type Set struct {
	deps          Deps
	kind          Kind
	conf          *config.Config
	log           *zap.Logger
	leases        *leases
	openLease     func(name string) (lease.Engine, error)
	times         lease.Times
	configMembers []string // ha.members, the only proxies that may own scopes; empty: every proxy may
	region        string
	peers         *geo.Peers
	succession
	metrics *metrics

	handingOver atomic.Bool

	ctx           context.Context
	claims        sync.WaitGroup
	checkNow      chan struct{} // holds a token if Run must look at peers and engines at once
	ownersKnown   atomic.Bool   // some scope has had an owner since this proxy started
	all           atomic.Pointer[map[string]*Scope]
	claimFailures map[string]claimFailure // scopes that cannot be claimed; only Run uses it
	leavingScopes map[string]*Scope       // only for Run

	mu   sync.Mutex
	lost chan struct{} // closed when a scope is lost, and then replaced by a new channel
}

// SetPeers must be called before Run.
func (s *Set) SetPeers(peers *geo.Peers) {
	if s != nil {
		s.peers = peers
	}
}

// After a takeover, requests of the owner before may still run for KVHoldTimeout: until then
// engines may fetch KV by its hand-offs, or run its prefills.
func (s *Set) newScope(name string) *Scope {
	scope := NewScope(name)
	scope.othersMayRunFor = s.deps.KVHoldTimeout()
	return scope
}

// takeoverRank is this proxy's place among those that may take the scope. MaxEpoch keeps a wrong
// epoch of another proxy from using up the numbers that the store can hold.
func (s *Set) openClaim(scope *Scope, takeoverRank int) error {
	store, err := s.openLease(scope.Name)
	if err != nil {
		return err
	}
	cfg := lease.Config{Self: s.leases.identity, Home: scope.home, TakeoverRank: takeoverRank, Times: s.times, Members: s.configMembers}
	cfg.MaxEpoch = s.leases.maxEpoch()
	scope.Claim(cfg, store, lease.Hooks{
		OnChange: func(v lease.View) { s.applyView(scope, v) },
		// This proxy should own the scope.
		AskBack: func(ctx context.Context, holder string, epoch int64) error {
			return s.askBack(ctx, scope, holder, epoch)
		},
		// This proxy cannot renew the lease in the store.
		Vote: func(ctx context.Context, member string, ask lease.Vote) error {
			return s.peers.AskVote(ctx, member, geo.Vote{Region: s.region, Group: scope.Name, Vote: ask})
		},
	}, s.log.With(zap.String(string(s.kind), scope.Name)))
	return nil
}

// Scope returns nil if this proxy shares no engines, or does not know the scope yet.
func (s *Set) Scope(name string) *Scope {
	if s == nil {
		return nil
	}
	return (*s.all.Load())[name]
}

// Admits says whether this proxy may send new work to the scope's engines.
func (s *Set) Admits(name string) bool {
	if s == nil { // no engines are shared
		return true
	}
	scope := s.Scope(name)
	return scope != nil && scope.Admits()
}

// AdmitsAny is Admits for any scope.
func (s *Set) AdmitsAny() bool {
	if s == nil { // no engines are shared
		return true
	}
	for _, scope := range *s.all.Load() {
		if scope.Admits() {
			return true
		}
	}
	return false
}

// Has says whether the scopes are of that kind.
func (s *Set) Has(k Kind) bool { return s != nil && s.kind == k }

// Losses returns a channel that is closed at the next loss of a scope; nil: none can be lost.
func (s *Set) Losses() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// UnreadyReason is empty if requests can be served: one group that has an owner, or soon gets one,
// is enough.
func (s *Set) UnreadyReason(now time.Time) string {
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
	for _, scope := range all {
		scope.mu.Lock()
		lastSeen := scope.ownerLastSeen
		scope.mu.Unlock()
		v := scope.view.Load()
		storeAnswers := !v.StoreAway // so a group soon gets an owner
		// A lease admits for RenewDeadline after its last renewal, so a group whose owner was seen in
		// this time may still have it.
		mayHaveOwner := now.Before(lastSeen.Add(s.times.RenewDeadline))
		if v.Admits || storeAnswers || mayHaveOwner {
			return ""
		}
	}
	return "no proxy owns a decode group, for the store of leases does not answer"
}

// ReleaseAll is the last step of a shutdown. Most leases are gone by then (HandOver).
func (s *Set) ReleaseAll(ctx context.Context) {
	if s == nil {
		return
	}
	var all sync.WaitGroup
	for _, scope := range *s.all.Load() {
		if scope.claim != nil {
			all.Go(func() { scope.claim.Leave(ctx) })
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
