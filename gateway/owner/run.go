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
	checkEvery = 250 * time.Millisecond // interval at which peers and engines are checked
	countEvery = time.Second            // of other proxies' requests on engines
)

// Run runs the claims until ctx ends, and returns when none runs any more.
func (s *Set) Run(ctx context.Context) {
	for _, scope := range *s.all.Load() {
		s.startClaim(scope)
	}
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	var counted time.Time // zero: at once
	for now := time.Now(); ; {
		engines := s.deps.Engines()
		if s.kind == Groups {
			// Groups come and go with their engines; the regions are those of the config.
			s.updateGroups(engines, now)
		}
		s.updateClaims(*s.all.Load(), engines, now)
		if now.Sub(counted) >= countEvery {
			counted = now
			s.countOthersRequests(ctx, now)
		}
		select {
		case <-ctx.Done():
			s.claims.Wait()
			return
		case <-tick.C:
		case <-s.checkNow: // a scope was won or lost
			counted = time.Time{}
		}
		now = time.Now() // the tick may have waited while engines were asked
	}
}

func (s *Set) startClaim(scope *Scope) {
	if scope.claim == nil {
		return
	}
	var run context.Context
	run, scope.stopClaim = context.WithCancel(s.ctx)
	scope.claimEnded = make(chan struct{})
	s.claims.Go(func() {
		defer close(scope.claimEnded)
		scope.claim.Run(run)
	})
}

// updateGroups claims new groups, and gives up those whose engines have all left.
func (s *Set) updateGroups(engines map[string]EngineCounts, now time.Time) {
	// A group that was given up may be claimed again once its old claim has ended.
	maps.DeleteFunc(s.leavingScopes, func(_ string, scope *Scope) bool { return !scope.claimRuns() })
	maps.DeleteFunc(s.claimFailures, func(name string, _ claimFailure) bool { _, hasEngines := engines[name]; return !hasEngines })
	before := *s.all.Load()
	after := make(map[string]*Scope, len(engines))
	changed := false
	for name := range engines {
		if scope := before[name]; scope != nil {
			after[name] = scope
		} else if scope := s.claimGroup(name, now); scope != nil {
			after[name] = scope
			changed = true
		}
	}
	if changed { // the store and its files may work for other groups, too
		s.retryFailedClaims()
	}
	// Admits is false for the groups without engines; only then are their leases released.
	s.all.Store(&after)
	for name, scope := range before {
		if after[name] == nil {
			s.giveUp(name, scope)
			changed = true
		}
	}
	if changed {
		s.deps.Publish(s.ctx)
	}
}

// claimGroup returns nil if a later call must try again. A group that comes back is claimed only
// after its old claim has ended, because the store cannot distinguish two claims of the same proxy.
func (s *Set) claimGroup(name string, now time.Time) *Scope {
	oldClaimRuns := s.leavingScopes[name] != nil
	mustWait := now.Before(s.claimFailures[name].until)
	if oldClaimRuns || mustWait {
		return nil
	}
	scope := s.newScope(name)
	const rankUntilUpdate = 0 // without effect: the claim takes no lease before updateClaims
	if err := s.openClaim(scope, rankUntilUpdate); err != nil {
		s.recordClaimFailure(name, err, now)
		return nil
	}
	delete(s.claimFailures, name)
	s.startClaim(scope)
	return scope
}

// giveUp does not wait. A lease that is not released in time expires.
func (s *Set) giveUp(name string, scope *Scope) {
	s.leavingScopes[name] = scope
	s.claims.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, s.times.Duration)
		defer cancel()
		scope.claim.Leave(ctx)
		scope.stopClaim()
	})
}

// Usually a file cannot be read. The proxy does not notice when the cause is gone, so the claim is
// tried again after pauses that double up to the duration of a lease.
func (s *Set) recordClaimFailure(name string, err error, now time.Time) {
	failure := s.claimFailures[name]
	if why := fmt.Sprintf("ha: %v", err); failure.why != why { // the same error is logged only once
		failure.why = why
		s.log.Error("this proxy cannot own a decode group, and admits nothing to it; the next line about it comes when the error is another one",
			zap.String("group", name), zap.String("error", why))
	}
	failure.pause = min(max(2*failure.pause, checkEvery), s.times.Duration)
	failure.until = now.Add(failure.pause)
	s.claimFailures[name] = failure
}

// A claim has succeeded, and all groups have the same store and the same files.
func (s *Set) retryFailedClaims() {
	for name, failure := range s.claimFailures {
		// The next try is due at once; why prevents a second log line.
		s.claimFailures[name] = claimFailure{why: failure.why}
	}
}

func (scope *Scope) claimRuns() bool {
	select {
	case <-scope.claimEnded:
		return false
	default:
		return true
	}
}

// countOthersRequests is for scopes that this proxy took over lately or soon owns: others' requests
// take room there. All engines are asked at the same time, so that Run soon looks at peers again
// even if many hang.
func (s *Set) countOthersRequests(ctx context.Context, now time.Time) {
	changed := false
	var asked sync.WaitGroup
	for _, scope := range *s.all.Load() {
		othersMayRun, dropped := scope.dropEndedOthers(now)
		// In this phase, this proxy holds the lease, and waits until the owner before has stopped.
		willOwnSoon := scope.view.Load().Phase == lease.Starting
		mustCount := othersMayRun || willOwnSoon
		if mustCount {
			asked.Go(func() { s.countOthersOf(ctx, scope) })
		}
		changed = changed || mustCount || dropped
	}
	asked.Wait()
	if changed {
		s.deps.Publish(s.ctx)
	}
}

func (s *Set) countOthersOf(ctx context.Context, scope *Scope) {
	ours, all, silent := s.deps.Load(ctx, scope.Name, askEngines)
	scope.mu.Lock()
	scope.setOthersLoad(ours, all, silent)
	scope.mu.Unlock()
}

// If this proxy does not own the scope, the counts stay: the owner that hands it over has listed
// its requests, for after the takeover.
func (scope *Scope) dropEndedOthers(now time.Time) (othersMayRun, dropped bool) {
	scope.mu.Lock()
	defer scope.mu.Unlock()
	othersMayRun = scope.othersMayRun(now)
	ownsScope := !scope.ownedSince.IsZero()
	dropped = ownsScope && !othersMayRun && len(scope.othersLoad) > 0
	if dropped {
		clear(scope.othersLoad)
	}
	return othersMayRun, dropped
}
