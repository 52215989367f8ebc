package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
)

// ErrNotHome is the answer to a proxy that asks for a region other than its own.
var ErrNotHome = errors.New("only a proxy whose geo.self.region this is may ask for it")

// AllowHandBack decides whether this proxy gives a scope to the proxy that asks for it (sender); err says why it does not. If it does,
// no new request begins for the scope until done is called. The caller calls done after HandBack.
func (s *Set) AllowHandBack(sender string, ask geo.HandBack) (scope *Scope, done func(), err error) {
	if ask.Group == "" { // the proxy asks for a region
		if !s.Has(Regions) {
			return nil, nil, fmt.Errorf("region %s: %w: regions have no owners here; see geo.ownership.engine", ask.Region, lease.ErrNotHolder)
		}
		scope = s.Scope(ask.Region)
	} else if s.Has(Groups) && ask.Region == s.region { // a group of another region may have the same name
		scope = s.Scope(ask.Group)
	}
	if scope == nil || scope.claim == nil { // the scope is not known here, or has a static order and no lease to release
		return nil, nil, fmt.Errorf("%s: %w", ask.Scope(), lease.ErrNotHolder)
	}
	if err := s.checkHandBack(scope, sender, ask); err != nil {
		return nil, nil, err
	}
	scope.handBacksPending.Add(1)
	return scope, func() { scope.handBacksPending.Add(-1) }, nil
}

// HandBack stops admission to a scope, lists which requests of this proxy still run on its ranks, and begins to release the lease. From
// then on, if the scope is a region, answers to probes tell the other proxies how many of these requests still run: Tenure reads
// handedBack. HandBack returns an error, and changes nothing, if this proxy does not own the scope with the epoch in ask, or may not
// release the lease now.
func (s *Set) HandBack(scope *Scope, ask geo.HandBack) (geo.HandedBack, error) {
	h := geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	listRequests := func() { // called when nothing is admitted any more, and the lease is not released yet
		scope.mu.Lock()
		scope.handedBack = true
		scope.mu.Unlock()
		ours, _, _ := s.deps.Load(s.ctx, scope.Name, onlyOurs) // the other results come only with askEngines
		h.Ranks = append(h.Ranks, ours...)
	}
	err := scope.claim.GiveBack(ask.Epoch, listRequests)
	return h, err
}

// HandOver waits until the other proxies have taken over the decode groups of this proxy, which is shutting down. The other proxies ask for
// these scopes by themselves; a proxy that has just started asks only once it may own scopes. Until then this proxy still serves the
// requests that they forward. The wait ends at the latest when a proxy that starts now could own scopes.
func (s *Set) HandOver(ctx context.Context) {
	// A region needs no wait: the first proxy that finds its lease released takes it.
	if !s.Has(Groups) || !s.deps.Leaving() {
		return
	}
	s.handingOver.Store(true)
	defer s.handingOver.Store(false)
	ctx, cancel := context.WithTimeout(ctx, s.times.Duration+s.times.StartDelay+s.times.Step)
	defer cancel()
	check := time.NewTicker(checkEvery)
	defer check.Stop()
	for lost := s.Losses(); s.canHandOver(); lost = s.Losses() {
		select {
		case <-lost:
		case <-check.C: // canHandOver also changes without a loss, such as when the last successor is gone
		case <-ctx.Done():
			return
		}
	}
}

// canHandOver says whether this proxy owns a scope that another proxy could take over. While the store of leases does not answer, none
// could.
func (s *Set) canHandOver() bool {
	for _, scope := range *s.all.Load() {
		if v := scope.view.Load(); v.Admits && !v.StoreAway && s.hasSuccessor(scope) {
			return true
		}
	}
	return false
}

// HandingOver says whether HandOver runs. Meanwhile this proxy still serves requests that other proxies forward.
func (s *Set) HandingOver() bool { return s != nil && s.handingOver.Load() }

// askBack asks the holder of a scope to give the scope to this proxy. The holder lists its requests that still run on the scope's ranks,
// and askBack stores them as the load of others (othersLoad). This list is complete, so a rank that is not in it has nothing of others.
// Without the list, it would not be known what others run on a rank, and RankQuota would allow only one slot there.
func (s *Set) askBack(ctx context.Context, scope *Scope, holder string, epoch int64) error {
	ask := geo.HandBack{Region: scope.Name, Epoch: epoch}
	if s.kind == Groups {
		ask.Region, ask.Group = s.region, scope.Name
	}
	h, err := s.peers.AskBack(ctx, holder, ask)
	if err != nil {
		return err
	}
	scope.mu.Lock()
	defer scope.mu.Unlock()
	clear(scope.othersLoad)
	scope.othersReported = true // othersLoad is complete
	// nil: the list has none of this proxy's requests, which would have to be subtracted, and no rank is silent.
	scope.setOthersLoad(nil, h.Ranks, nil)
	return nil
}

// Promise promises an owner that this proxy does not take over its group for a while. The owner asks for this when it cannot reach the
// store of leases: it asks all other members for their vote, and a promise is a vote for the owner. If Promise returns an error, there is
// no promise. sender is the peer that asks.
func (s *Set) Promise(sender string, ask geo.Vote) error {
	group, askingProxy := s.Scope(ask.Group), lease.Dispatcher(ask.Holder) // ask.Holder also names the proxy's process
	switch {
	case !s.Has(Groups) || group == nil || ask.Region != s.region:
		return fmt.Errorf("%w: group %q is not known here", lease.ErrNoVote, ask.Group)
	case askingProxy != sender: // a peer may ask only for itself
		return fmt.Errorf("%w: %s asks for %s", lease.ErrNoVote, sender, ask.Holder)
	}
	return group.claim.GivePromise(ask.Vote)
}

// Tenure is the part of answers to probes about ownership. Each acquisition of a scope's lease has a higher number, its epoch.
//   - Seen has the highest epoch of each scope that this proxy has heard of in any way.
//   - Groups has the epochs of the decode groups that this proxy owns, and no other groups, because it also tells other proxies that these
//     have a live owner.
//   - Epochs has the epochs of the regions whose lease this proxy holds or has read.
//   - Lent has, for each region that this proxy has handed back, how many of its requests still run there. Regions with none are left out.
func (s *Set) Tenure() geo.Tenure {
	t := geo.Tenure{Seen: map[string]int64{}}
	for name, scope := range *s.all.Load() {
		v := scope.view.Load()
		if scope.claim != nil { // nil: the scope has a static order, and no lease
			if seen := scope.claim.Seen(); seen > 0 {
				t.Seen[name] = seen
			}
		}
		switch {
		case s.kind == Groups && v.Admits: // this proxy owns the group
			t.Groups = put(t.Groups, name, v.Epoch)
		case s.kind == Regions && v.Epoch > 0: // 0: no proxy has held the lease of the region yet, as far as this proxy knows
			t.Epochs = put(t.Epochs, name, v.Epoch)
		}
		if stillRunning := s.countInHandedBack(scope); stillRunning > 0 {
			t.Lent = put(t.Lent, name, stillRunning)
		}
	}
	return t
}

// put sets a value in a map, and creates the map if it is nil.
func put[V any](m map[string]V, key string, v V) map[string]V {
	if m == nil {
		m = map[string]V{}
	}
	m[key] = v
	return m
}

// countInHandedBack returns how many requests of this proxy still run in a region that it has handed back. Once there are none, it clears
// handedBack, so that they are counted no more. It returns 0 for other regions, and for decode groups, of which this is not reported.
func (s *Set) countInHandedBack(scope *Scope) (running int) {
	scope.mu.Lock()
	handedBack := scope.handedBack && s.kind == Regions
	scope.mu.Unlock()
	if !handedBack {
		return 0
	}
	ours, _, _ := s.deps.Load(s.ctx, scope.Name, onlyOurs)
	for _, r := range ours {
		running += r.Requests
	}
	if running == 0 {
		scope.mu.Lock()
		scope.handedBack = false
		scope.mu.Unlock()
	}
	return running
}

// OnProbe records what a peer's answer to a probe says about ownership: who owns what, and the highest epochs that the peer has seen, so
// that the next acquisition here gets a higher one.
func (s *Set) OnProbe(h geo.ProbeReport) {
	all := *s.all.Load()
	if s.kind == Groups && h.Region != s.region { // groups of another region may have the same names
		return
	}
	for name, epoch := range h.Seen {
		if scope := all[name]; scope != nil && scope.claim != nil {
			scope.claim.ObserveEpoch(epoch)
		}
	}
	s.recordReport(all, h)
}
