package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
)

// ErrNotHome is the answer to a dispatcher that asks for a region other than its own.
var ErrNotHome = errors.New("only a proxy whose geo.self.region this is may ask for it")

// Yield says whether this proxy gives a scope to the dispatcher that asks for it; the error says why not. If it does, no new request begins
// for the scope until done is called.
func (s *Set) Yield(sender string, ask geo.HandBack) (a *Scope, done func(), err error) {
	if ask.Group == "" {
		if !s.Has(Regions) {
			return nil, nil, fmt.Errorf("region %s: %w: regions have no owners here; see geo.ownership.engine", ask.Region, lease.ErrNotHolder)
		}
		a = s.Of(ask.Region)
	} else if s.Has(Groups) && ask.Region == s.region {
		a = s.Of(ask.Group)
	}
	if a == nil || a.claim == nil {
		return nil, nil, fmt.Errorf("%s: %w", ask.Scope(), lease.ErrNotHolder)
	}
	if err := s.mayYield(a, sender, ask); err != nil {
		return nil, nil, err
	}
	a.yielding.Add(1)
	return a, func() { a.yielding.Add(-1) }, nil
}

// HandBack stops admission to a scope, lists which requests of this proxy still run on its ranks, and releases the lease.
func (s *Set) HandBack(a *Scope, ask geo.HandBack) (geo.HandedBack, error) {
	h := geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	err := a.claim.GiveBack(ask.Epoch, func() {
		a.mu.Lock()
		a.handedBack = true
		a.mu.Unlock()
		ours, _, _ := s.deps.Load(s.ctx, a.Name, false)
		h.Ranks = append(h.Ranks, ours...)
	})
	return h, err
}

// HandOver waits until the other proxies have taken over the scopes of this proxy, which is shutting down. The other proxies ask for the
// scopes by themselves; a proxy that has just started asks only once it may own scopes. Until then this proxy still serves the requests
// that they forward. The wait ends at the latest when a proxy that starts now could own scopes.
func (s *Set) HandOver(ctx context.Context) {
	if !s.Has(Groups) || !s.deps.Leaving() {
		return
	}
	s.handsOver.Store(true)
	defer s.handsOver.Store(false)
	ctx, cancel := context.WithTimeout(ctx, s.times.Duration+s.times.StartDelay+s.times.Step)
	defer cancel()
	look := time.NewTicker(standEvery)
	defer look.Stop()
	for lost := s.Losses(); s.wanted(); lost = s.Losses() {
		select {
		case <-lost:
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// wanted says whether another proxy could take over a scope that this proxy owns.
func (s *Set) wanted() bool {
	for _, a := range *s.all.Load() {
		if v := a.view.Load(); v.Admits && !v.StoreAway && s.hasHeirs(a) {
			return true
		}
	}
	return false
}

// HandsOver says whether this proxy is in HandOver, and still serves requests that other proxies forward.
func (s *Set) HandsOver() bool { return s != nil && s.handsOver.Load() }

// askBack asks the holder of a scope to give it to this proxy. The holder lists its requests that still run on the scope's ranks. It has no
// requests on ranks that it does not list.
func (s *Set) askBack(ctx context.Context, a *Scope, holder string, epoch int64) error {
	ask := geo.HandBack{Region: a.Name, Epoch: epoch}
	if s.kind == Groups {
		ask.Region, ask.Group = s.region, a.Name
	}
	h, err := s.peers.AskBack(ctx, holder, ask)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.others)
	a.othersNamed = true
	a.keepFound(nil, h.Ranks, nil)
	return nil
}

// Promise promises an owner that this proxy does not take over its group for a while. The owner asks for this when it cannot reach the
// store of leases. If Promise returns an error, there is no promise. sender is the peer that asks.
func (s *Set) Promise(sender string, ask geo.Vote) error {
	group := s.Of(ask.Group)
	switch {
	case !s.Has(Groups) || group == nil || ask.Region != s.region:
		return fmt.Errorf("%w: group %q is not known here", lease.ErrNoVote, ask.Group)
	case lease.Dispatcher(ask.Holder) != sender: // a peer may ask only for itself
		return fmt.Errorf("%w: %s asks for %s", lease.ErrNoVote, sender, ask.Holder)
	}
	return group.claim.GivePromise(ask.Vote)
}

// Tenure is the part of answers to probes about ownership: the scopes that this proxy owns, and the epochs that it has seen.
func (s *Set) Tenure() geo.Tenure {
	t := geo.Tenure{Seen: map[string]int64{}}
	for name, a := range *s.all.Load() {
		v := a.view.Load()
		if a.claim != nil {
			if seen := a.claim.Seen(); seen > 0 {
				t.Seen[name] = seen
			}
		}
		switch {
		case s.kind == Groups && v.Admits:
			t.Groups = put(t.Groups, name, v.Epoch)
		case s.kind == Regions && v.Epoch > 0:
			t.Epochs = put(t.Epochs, name, v.Epoch)
		}
		if n := s.lent(a); n > 0 {
			t.Lent = put(t.Lent, name, n)
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

// lent is how many requests of this proxy still run in a region that it has handed back. Once there are none, lent ends this state
// (handedBack).
func (s *Set) lent(a *Scope) (n int) {
	a.mu.Lock()
	handedBack := a.handedBack && s.kind == Regions
	a.mu.Unlock()
	if !handedBack {
		return 0
	}
	ours, _, _ := s.deps.Load(s.ctx, a.Name, false)
	for _, r := range ours {
		n += r.Requests
	}
	if n == 0 {
		a.mu.Lock()
		a.handedBack = false
		a.mu.Unlock()
	}
	return n
}

// OnProbe records what a peer's answer to a probe says about ownership.
func (s *Set) OnProbe(h geo.ProbeReport) {
	all := *s.all.Load()
	if s.kind == Groups && h.Region != s.region {
		return
	}
	for name, epoch := range h.Seen {
		if a := all[name]; a != nil && a.claim != nil {
			a.claim.ObserveEpoch(epoch)
		}
	}
	s.takeReport(all, h)
}
