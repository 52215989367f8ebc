package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
)

// ErrNotHome is for a proxy that asks for a region other than its own.
var ErrNotHome = errors.New("only a proxy whose geo.self.region this is may ask for it")

// AllowHandBack decides whether this proxy gives a scope to sender; err says why it does not. If it
// does, no new request begins for the scope until done is called, after HandBack.
func (s *Set) AllowHandBack(sender string, ask geo.HandBack) (scope *Scope, done func(), err error) {
	if ask.Group == "" {
		if !s.Has(Regions) {
			return nil, nil, fmt.Errorf("region %s: %w: regions have no owners here; see geo.ownership.engine", ask.Region, lease.ErrNotHolder)
		}
		scope = s.Scope(ask.Region)
	} else if s.Has(Groups) && ask.Region == s.region { // groups of other regions may share names
		scope = s.Scope(ask.Group)
	}
	if scope == nil || scope.claim == nil { // unknown here, or a static order without a lease
		return nil, nil, fmt.Errorf("%s: %w", ask.Scope(), lease.ErrNotHolder)
	}
	if err := s.checkHandBack(scope, sender, ask); err != nil {
		return nil, nil, err
	}
	scope.handBacksPending.Add(1)
	return scope, func() { scope.handBacksPending.Add(-1) }, nil
}

// HandBack stops admission to a scope, lists which requests of this proxy still run on its ranks,
// and begins to release the lease. From then on, Tenure counts these requests if the scope is a
// region. After an error (not the owner with this epoch, or the lease may not be released now),
// nothing has changed.
func (s *Set) HandBack(scope *Scope, ask geo.HandBack) (geo.HandedBack, error) {
	h := geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	listRequests := func() {
		scope.mu.Lock()
		scope.handedBack = true
		scope.mu.Unlock()
		// The other results come only with askEngines.
		ours, _, _ := s.deps.Load(s.ctx, scope.Name, onlyOurs)
		h.Ranks = append(h.Ranks, ours...)
	}
	err := scope.claim.GiveBack(ask.Epoch, listRequests)
	return h, err
}

// HandOver waits until the other proxies have taken over the decode groups of this proxy, which is
// shutting down and still serves the requests that they forward. They ask by themselves, a proxy
// that has just started only once it may own scopes: the wait ends when one that starts now could.
func (s *Set) HandOver(ctx context.Context) {
	// The first proxy that finds a region's lease released takes it.
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
		case <-check.C:
			// canHandOver also changes without a loss, such as when the last successor is gone.
		case <-ctx.Done():
			return
		}
	}
}

// While the store of leases does not answer, no other proxy could take over.
func (s *Set) canHandOver() bool {
	for _, scope := range *s.all.Load() {
		if v := scope.view.Load(); v.Admits && !v.StoreAway && s.hasSuccessor(scope) {
			return true
		}
	}
	return false
}

// HandingOver says whether HandOver runs. Meanwhile this proxy still serves requests that other
// proxies forward.
func (s *Set) HandingOver() bool { return s != nil && s.handingOver.Load() }

// askBack asks the holder of a scope for it, and stores the requests of the holder that still run
// as othersLoad. Without this list, RankQuota would allow only one slot per rank.
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
	scope.othersReported = true
	// The list has none of this proxy's requests.
	scope.setOthersLoad(nil, h.Ranks, nil)
	return nil
}

// Promise promises an owner that this proxy does not take over its group for a while. An owner that
// cannot reach the store of leases asks all other members for this vote. sender is the peer that
// asks.
func (s *Set) Promise(sender string, ask geo.Vote) error {
	// ask.Holder also names the proxy's process.
	group, askingProxy := s.Scope(ask.Group), lease.Dispatcher(ask.Holder)
	switch {
	case !s.Has(Groups) || group == nil || ask.Region != s.region:
		return fmt.Errorf("%w: group %q is not known here", lease.ErrNoVote, ask.Group)
	case askingProxy != sender: // a peer may ask only for itself
		return fmt.Errorf("%w: %s asks for %s", lease.ErrNoVote, sender, ask.Holder)
	}
	return group.claim.GivePromise(ask.Vote)
}

// Tenure is what answers to probes say about ownership. Seen is the highest epoch of each scope
// that this proxy has heard of. Groups are the epochs of its own decode groups only, because it
// also says that these have a live owner. Epochs are those of the regions whose lease this proxy
// holds or has read. Lent is how many of its requests still run in each region that it has handed
// back.
func (s *Set) Tenure() geo.Tenure {
	t := geo.Tenure{Seen: map[string]int64{}}
	for name, scope := range *s.all.Load() {
		v := scope.view.Load()
		if scope.claim != nil {
			if seen := scope.claim.Seen(); seen > 0 {
				t.Seen[name] = seen
			}
		}
		switch {
		case s.kind == Groups && v.Admits:
			t.Groups = put(t.Groups, name, v.Epoch)
		case s.kind == Regions && v.Epoch > 0: // 0: no proxy has held the lease yet
			t.Epochs = put(t.Epochs, name, v.Epoch)
		}
		if stillRunning := s.countInHandedBack(scope); stillRunning > 0 {
			t.Lent = put(t.Lent, name, stillRunning)
		}
	}
	return t
}

func put[V any](m map[string]V, key string, v V) map[string]V {
	if m == nil {
		m = map[string]V{}
	}
	m[key] = v
	return m
}

// Once none of this proxy's requests run in a region that it handed back, it clears handedBack.
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

// OnProbe records who owns what, and the highest epochs that the peer has seen, so that the next
// acquisition here gets a higher one.
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
