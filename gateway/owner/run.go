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
	countEvery = time.Second            // interval at which other proxies' requests on engines are counted
)

// Run runs the claims until ctx ends. At an interval it updates them by the state of peers and engines, and counts the requests of other
// proxies. It returns when no claim runs any more.
func (s *Set) Run(ctx context.Context) {
	for _, scope := range *s.all.Load() {
		s.startClaim(scope)
	}
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	var counted time.Time // when the requests of other proxies were last counted; zero: they must be counted at once
	for now := time.Now(); ; {
		engines := s.deps.Engines()
		if s.kind == Groups { // groups come and go with their engines; the regions are those of the config
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
		now = time.Now() // not the time of the tick, which may have waited while engines were asked
	}
}

// startClaim runs the claim of a scope on a goroutine of its own. A scope with a static order has no claim.
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

// updateGroups claims new groups, and gives up groups whose engines have all left (engines has the others).
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
	if changed { // a claim has succeeded, so the store and its files may work for other groups, too
		s.retryFailedClaims()
	}
	s.all.Store(&after) // from now on, Admits is false for the groups without engines; only then are their leases released
	for name, scope := range before {
		if after[name] == nil {
			s.giveUp(name, scope)
			changed = true
		}
	}
	if changed { // dispatcher and fleet must know the new set of groups
		s.deps.Publish(s.ctx)
	}
}

// claimGroup claims a new group, and returns its scope; nil: it cannot be claimed now, and a later call tries again. A group that comes
// back is claimed only after its old claim has ended, because the store cannot distinguish two claims of the same proxy. A group whose
// claim has failed is tried again after a pause.
func (s *Set) claimGroup(name string, now time.Time) *Scope {
	oldClaimRuns := s.leavingScopes[name] != nil
	mustWait := now.Before(s.claimFailures[name].until) // the last claim has failed, and its pause is not over
	if oldClaimRuns || mustWait {
		return nil
	}
	scope := s.newScope(name)
	const rankUntilUpdate = 0 // without effect, because the claim takes no lease before updateClaims has set its role
	if err := s.openClaim(scope, rankUntilUpdate); err != nil {
		s.recordClaimFailure(name, err, now)
		return nil
	}
	delete(s.claimFailures, name)
	s.startClaim(scope)
	return scope
}

// giveUp releases the lease of a group and ends its claim, without waiting for either. A lease that is not released in time expires.
func (s *Set) giveUp(name string, scope *Scope) {
	s.leavingScopes[name] = scope
	s.claims.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, s.times.Duration)
		defer cancel()
		scope.claim.Leave(ctx)
		scope.stopClaim()
	})
}

// recordClaimFailure records that a group cannot be claimed, usually because a file cannot be read. The proxy does not notice when the
// cause is gone, so the claim is tried again after pauses that double up to the duration of a lease.
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

// retryFailedClaims lets all claims that have failed be tried again at once. It is called when a claim for another group has succeeded,
// because all groups have the same store and the same files.
func (s *Set) retryFailedClaims() {
	for name, failure := range s.claimFailures {
		s.claimFailures[name] = claimFailure{why: failure.why} // without until, the next try is due at once; why prevents a second log line
	}
}

// claimRuns says whether the scope's claim still runs.
func (scope *Scope) claimRuns() bool {
	select {
	case <-scope.claimEnded:
		return false
	default:
		return true
	}
}

// countOthersRequests counts the requests of other proxies on the ranks of scopes that this proxy took over lately, or is about to take
// over, because they take room on these ranks. It drops the counts of scopes where such requests have ended by now. The engines of all
// scopes are asked at the same time, so that Run soon looks at peers again even if many engines hang. Once all have answered, fleet and
// dispatcher are told if any count may have changed.
func (s *Set) countOthersRequests(ctx context.Context, now time.Time) {
	changed := false
	var asked sync.WaitGroup
	for _, scope := range *s.all.Load() {
		othersMayRun, dropped := scope.dropEndedOthers(now)
		willOwnSoon := scope.view.Load().Phase == lease.Starting // this proxy holds the lease, and waits until the owner before has stopped
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

// countOthersOf asks the scope's engines for the requests on their ranks, and stores those that are not of this proxy. The count of a rank
// changes only when its engine reports a new one.
func (s *Set) countOthersOf(ctx context.Context, scope *Scope) {
	ours, all, silent := s.deps.Load(ctx, scope.Name, askEngines)
	scope.mu.Lock()
	scope.setOthersLoad(ours, all, silent)
	scope.mu.Unlock()
}

// dropEndedOthers drops the counts of other proxies' requests (othersLoad) if this proxy owns the scope, and these requests have ended by
// now. othersMayRun says that they may still run, and dropped that there were counts. If this proxy does not own the scope, the counts
// stay: the owner that hands the scope over has listed its requests, and the list counts after the takeover.
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
