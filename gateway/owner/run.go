package owner

import (
	"context"
	"fmt"
	"maps"
	"time"

	"go.uber.org/zap"

	"evenkeel/lease"
)

const (
	standEvery = 250 * time.Millisecond // how often peers and engines are looked at
	countEvery = time.Second            // and what of others runs on engines
)

// Run claims, and keeps what claims need to know of peers and engines, until ctx
// ends.
func (s *Set) Run(ctx context.Context) {
	for _, a := range *s.all.Load() {
		s.start(a)
	}
	tick := time.NewTicker(standEvery)
	defer tick.Stop()
	var counted time.Time
	for now := time.Now(); ; {
		reach := s.host.Engines()
		if s.kind == Groups {
			s.enlist(reach, now)
		}
		s.stand(*s.all.Load(), reach, now)
		if now.Sub(counted) >= countEvery {
			counted = now
			s.countOthers(ctx, now)
		}
		select {
		case <-ctx.Done():
			s.claims.Wait()
			return
		case now = <-tick.C:
		case <-s.poke:
			now, counted = time.Now(), time.Time{}
		}
	}
}

// start runs the claim of a scope.
func (s *Set) start(a *Scope) {
	if a.claim == nil {
		return
	}
	var run context.Context
	run, a.end = context.WithCancel(s.ctx)
	a.over = make(chan struct{})
	s.claims.Go(func() {
		defer close(a.over)
		a.claim.Run(run)
	})
}

// enlist claims the groups that engines have come with, and leaves those whose
// engines have all gone. One that comes back is claimed once it was left: the store
// cannot tell two claims of one proxy apart.
func (s *Set) enlist(reach map[string]Reach, now time.Time) {
	maps.DeleteFunc(s.left, func(_ string, a *Scope) bool { return !a.claiming() })
	maps.DeleteFunc(s.barred, func(name string, _ bar) bool { _, there := reach[name]; return !there })
	before := *s.all.Load()
	after := make(map[string]*Scope, len(reach))
	changed := false
	for name := range reach {
		if a := before[name]; a != nil {
			after[name] = a
			continue
		}
		if s.left[name] != nil || now.Before(s.barred[name].until) {
			continue
		}
		a := s.scope(name)
		if err := s.claim(a, 0); err != nil {
			s.bar(name, err, now)
			continue
		}
		delete(s.barred, name)
		s.start(a)
		after[name], changed = a, true
	}
	if changed {
		s.unbar()
	}
	s.all.Store(&after)
	for name, a := range before {
		if after[name] != nil {
			continue
		}
		changed = true
		s.left[name] = a
		s.claims.Go(func() {
			until, cancel := context.WithTimeout(s.ctx, s.times.Duration)
			defer cancel()
			a.claim.Leave(until)
			a.end()
		})
	}
	if changed {
		s.host.Publish(s.ctx)
	}
}

// bar notes that a group cannot be claimed. The cause is mostly a file that cannot be
// read, and nothing reports when it can be read again. So the group is tried again, at
// least once in the time of a lease.
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

// unbar makes all groups be tried at once, because another group could be claimed, and
// all groups have the same store and the same files.
func (s *Set) unbar() {
	for name, b := range s.barred {
		s.barred[name] = bar{why: b.why}
	}
}

// claiming says whether the scope's claim has not ended.
func (a *Scope) claiming() bool {
	select {
	case <-a.over:
		return false
	default:
		return true
	}
}

// countOthers reads what runs on the ranks of scopes that were taken over of late, or
// are about to be, and is not ours. It falls with what is read alone; a rank that
// does not tell keeps what it had.
func (s *Set) countOthers(ctx context.Context, now time.Time) {
	changed := false
	for _, a := range *s.all.Load() {
		a.mu.Lock()
		cautious := a.cautious(now)
		ended := !a.adopted.IsZero() && !cautious && len(a.others) > 0 // before, they are what the one before said on giving back
		if ended {
			clear(a.others)
		}
		a.mu.Unlock()
		if cautious || a.view.Load().Phase == lease.Starting {
			ours, all, silent := s.host.Load(ctx, a.Name, true)
			a.mu.Lock()
			a.keepFound(ours, all, silent)
			a.mu.Unlock()
			changed = true
		}
		changed = changed || ended
	}
	if changed {
		s.host.Publish(s.ctx)
	}
}
