package owner

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/lease"
)

const (
	standEvery = 250 * time.Millisecond // interval of looks at peers and engines
	countEvery = time.Second            // interval of counts of other proxies' requests on engines
)

// Run runs the claims, and gives them news of peers and engines, until ctx ends. It returns when no claim runs any more.
func (s *Set) Run(ctx context.Context) {
	for _, a := range *s.all.Load() {
		s.start(a)
	}
	tick := time.NewTicker(standEvery)
	defer tick.Stop()
	var counted time.Time
	for now := time.Now(); ; {
		reach := s.deps.Engines()
		if s.kind == Groups {
			s.enlist(reach, now)
		}
		s.setStandings(*s.all.Load(), reach, now)
		if now.Sub(counted) >= countEvery {
			counted = now
			s.countOthers(ctx, now)
		}
		select {
		case <-ctx.Done():
			s.claims.Wait()
			return
		case <-tick.C:
		case <-s.lookNow:
			counted = time.Time{}
		}
		now = time.Now() // not the time of the tick, which may have waited while engines were asked
	}
}

// start runs the claim of a scope. A scope of a static order has none.
func (s *Set) start(a *Scope) {
	if a.claim == nil {
		return
	}
	var run context.Context
	run, a.stopClaim = context.WithCancel(s.ctx)
	a.claimEnded = make(chan struct{})
	s.claims.Go(func() {
		defer close(a.claimEnded)
		a.claim.Run(run)
	})
}

// enlist claims new groups, and gives up groups whose engines have all gone. A group that comes back is claimed again only after its old
// claim has ended, because the store cannot distinguish two claims of the same proxy.
func (s *Set) enlist(reach map[string]Reach, now time.Time) {
	maps.DeleteFunc(s.leavingScopes, func(_ string, a *Scope) bool { return !a.claiming() })
	maps.DeleteFunc(s.barred, func(name string, _ bar) bool { _, hasEngines := reach[name]; return !hasEngines })
	before := *s.all.Load()
	after := make(map[string]*Scope, len(reach))
	changed := false
	for name := range reach {
		if a := before[name]; a != nil {
			after[name] = a
			continue
		}
		if s.leavingScopes[name] != nil || now.Before(s.barred[name].until) {
			continue
		}
		a := s.scope(name)
		if err := s.claim(a, 0); err != nil {
			s.bar(name, err, now)
			continue
		}
		delete(s.barred, name)
		s.start(a)
		after[name] = a
		changed = true
	}
	if changed {
		s.retryBarred()
	}
	s.all.Store(&after)
	for name, a := range before {
		if after[name] == nil {
			s.giveUp(name, a)
			changed = true
		}
	}
	if changed {
		s.deps.Publish(s.ctx)
	}
}

// giveUp releases the lease of a group and ends its claim, without waiting for either.
func (s *Set) giveUp(name string, a *Scope) {
	s.leavingScopes[name] = a
	s.claims.Go(func() {
		until, cancel := context.WithTimeout(s.ctx, s.times.Duration)
		defer cancel()
		a.claim.Leave(until)
		a.stopClaim()
	})
}

// bar notes that a group cannot be claimed, usually because a file cannot be read. Nothing reports when this changes, so the claim is tried
// again after pauses that double up to the duration of a lease.
func (s *Set) bar(name string, err error, now time.Time) {
	b := s.barred[name]
	if why := fmt.Sprintf("ha: %v", err); b.why != why {
		b.why = why
		s.log.Error("this proxy cannot own a decode group, and admits nothing to it; the next line about it comes when the error is another one",
			zap.String("group", name), zap.String("error", why))
	}
	b.pause = min(max(2*b.pause, standEvery), s.times.Duration)
	b.until = now.Add(b.pause)
	s.barred[name] = b
}

// retryBarred lets all barred groups be tried again at once. A claim for another group has succeeded, and all groups have the same store
// and the same files.
func (s *Set) retryBarred() {
	for name, b := range s.barred {
		s.barred[name] = bar{why: b.why}
	}
}

// claiming says whether the scope's claim still runs.
func (a *Scope) claiming() bool {
	select {
	case <-a.claimEnded:
		return false
	default:
		return true
	}
}

// countOthers counts the requests of other proxies on the ranks of scopes that this proxy took over lately, or is about to take over. The
// number for a rank changes only when its engine reports a new one. The engines of all scopes are asked at the same time, so that Run soon
// looks at peers again even if many engines hang.
func (s *Set) countOthers(ctx context.Context, now time.Time) {
	changed := false
	var asked sync.WaitGroup
	for _, a := range *s.all.Load() {
		a.mu.Lock()
		cautious := a.cautious(now)
		// while this proxy does not own the scope, others has the list of the owner that is handing the scope over, and must stay
		ended := !a.adopted.IsZero() && !cautious && len(a.others) > 0
		if ended {
			clear(a.others)
		}
		a.mu.Unlock()
		if cautious || a.view.Load().Phase == lease.Starting {
			asked.Go(func() {
				ours, all, silent := s.deps.Load(ctx, a.Name, true)
				a.mu.Lock()
				a.keepFound(ours, all, silent)
				a.mu.Unlock()
			})
			changed = true
		}
		changed = changed || ended
	}
	asked.Wait()
	if changed {
		s.deps.Publish(s.ctx)
	}
}
