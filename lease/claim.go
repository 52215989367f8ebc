package lease

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// A Claim runs the Machine of one proxy for one scope: Run makes the machine's calls to the Engine,
// and passes the answers back.
type Claim struct {
	engine    Engine
	hooks     Hooks
	log       *zap.Logger
	retry     time.Duration
	callLimit time.Duration

	mu       sync.Mutex // guards the machine; never held during a call of the engine
	machine  *Machine
	lastView View // guarded by mu

	logOnce   logOnce                   // used by Run's goroutine only
	admission atomic.Pointer[admission] // for readers without the lock; nil: the proxy does not admit

	origin time.Time // when the claim was made
	// also runs while the computer is suspended; tests replace it
	wall                func(now time.Time) time.Time
	lastTotalSuspension time.Duration // at the last detectSuspension
	// that are being asked for a promise; used by Run's goroutine only
	askedMembers map[string]bool

	wakeUp chan struct{}
	done   chan struct{}
}

// Hooks are the calls of a claim to its proxy.
type Hooks struct {
	// OnChange gets every new view. When a call with a view that does not admit has returned, the
	// proxy must admit nothing more, because the lease may be released then. OnChange must not call
	// the claim.
	OnChange func(View)
	// AskBack asks the holder, which is a proxy's id, to give the scope back.
	AskBack func(ctx context.Context, holder string, epoch int64) error
	// Vote asks another member for its promise (Machine.GivePromise); an error: it gives none. It is
	// only called if Config.Members is set.
	Vote func(ctx context.Context, member string, ask Vote) error
}

type admission struct {
	until           time.Time
	totalSuspension time.Duration // Claim.lastTotalSuspension when until was set
}

// NewClaim makes a claim, which does nothing until Run is called.
func NewClaim(cfg Config, engine Engine, hooks Hooks, log *zap.Logger) *Claim {
	cfg.Begun = time.Now()
	return &Claim{
		engine: engine, hooks: hooks, log: log, retry: cfg.Retry,
		// so that an owner has time for another call before it must stop
		callLimit: cfg.RenewDeadline / 2,
		origin:    cfg.Begun, wall: wallClock,
		askedMembers: map[string]bool{},
		machine:      NewMachine(cfg), wakeUp: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

// wallClock drops the monotonic part, so that only the wall clock counts in a difference.
func wallClock(now time.Time) time.Time { return now.Round(0) }

// Run runs the claim until ctx ends. It makes each call in the background. A lease that is held at
// the end is not released, but expires: to release it, call Leave before.
func (c *Claim) Run(ctx context.Context) {
	defer close(c.done)
	results := make(chan result)
	storeCallRuns := false
	running := 0 // calls under way, those to proxies included
	begin := func(call func() result) {
		running++
		go func() { results <- call() }()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		call, wake := c.checkMachine(ctx, storeCallRuns, begin)
		if call != None {
			storeCallRuns = storeCallRuns || call != AskBack
			begin(func() result { return c.makeCall(ctx, call) })
			continue
		}
		timer.Reset(time.Until(wake))
		select {
		case r := <-results:
			running--
			switch {
			case r.member != "":
				delete(c.askedMembers, r.member)
			case r.call != AskBack:
				storeCallRuns = false
			}
			c.handleResult(r)
		case <-timer.C:
		case <-c.wakeUp:
		case <-ctx.Done():
			for range running { // otherwise the goroutines of begin would wait for ever
				<-results
			}
			return
		}
	}
}

// checkMachine looks at the machine once. It returns None while a call of the store is under way,
// because the machine makes one at a time. It begins questions for votes itself.
func (c *Claim) checkMachine(ctx context.Context, storeCallRuns bool, begin func(func() result)) (call Call, wake time.Time) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.detectSuspension(now)
	if storeCallRuns {
		latest := now.Add(c.retry) // an answer wakes Run earlier
		wake = c.machine.nextTimer(now, latest)
	} else {
		call, wake = c.machine.Next(now)
	}
	if ask, ok := c.machine.AskVotes(now); ok {
		c.askVotes(ctx, ask, begin)
	}
	c.publish(now)
	return call, wake
}

func (c *Claim) askVotes(ctx context.Context, ask Vote, begin func(func() result)) {
	for _, member := range ask.Members {
		if member == Dispatcher(ask.Holder) || c.askedMembers[member] {
			continue
		}
		c.askedMembers[member] = true
		begin(func() result {
			ctx, cancel := context.WithTimeout(ctx, c.retry)
			defer cancel()
			r := result{sent: time.Now(), member: member}
			r.totalSuspension = c.totalSuspension(r.sent)
			r.err = c.hooks.Vote(ctx, member, ask)
			r.apply = func(now time.Time, err error) {
				if err == nil {
					c.machine.RecordVote(r.sent, now, member, ask.Epoch)
				}
			}
			return r
		})
	}
}

// totalSuspension is how long the computer has been suspended since origin: by how much the wall
// clock is ahead of the monotonic clock, which stands still meanwhile. A wall clock that is set
// forward looks the same.
func (c *Claim) totalSuspension(now time.Time) time.Duration {
	return c.wall(now).Sub(c.origin.Round(0)) - now.Sub(c.origin)
}

// detectSuspension: renewals from before a suspension no longer prove that the lease is held. At
// most c.retry is ignored, because the waits of a lease (Times) allow for clocks that differ in
// speed. c.mu is held.
func (c *Claim) detectSuspension(now time.Time) {
	total := c.totalSuspension(now)
	if suspendedFor := total - c.lastTotalSuspension; suspendedFor > c.retry {
		c.log.Warn("the machine stood still, or its clock was set: this proxy admits nothing until it has renewed the lease",
			zap.Duration("for", suspendedFor))
		c.machine.Suspended(now)
	}
	c.lastTotalSuspension = total
}

// publish is called with c.mu held, so that OnChange gets the views in order.
func (c *Claim) publish(now time.Time) {
	v := c.machine.View(now)
	if v.Admits {
		// If the total has grown by more than c.retry when Admits is called, the lease may have expired,
		// and Admits returns false even before Run notices the suspension.
		c.admission.Store(&admission{until: c.machine.admitsUntil, totalSuspension: c.lastTotalSuspension})
	} else {
		c.admission.Store(nil)
	}
	if v == c.lastView {
		return
	}
	c.logOnce.logChange(c.log, c.lastView, v)
	c.lastView = v
	c.hooks.OnChange(v)
}

// makeCall does not change the machine; handleResult does so later, by apply.
func (c *Claim) makeCall(ctx context.Context, call Call) result {
	m := c.machine
	c.mu.Lock()
	epoch, rec, maxEpochSeen := m.epoch, m.rec, m.maxEpochSeen
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, c.callLimit)
	defer cancel()
	r := result{call: call, sent: time.Now()}
	r.totalSuspension = c.totalSuspension(r.sent)
	switch call {
	case Look:
		r.rec, r.err = c.engine.Look(ctx)
		r.apply = func(now time.Time, err error) { m.Looked(r.sent, now, r.rec, err) }
	case Acquire:
		r.rec, r.err = c.engine.Acquire(ctx, maxEpochSeen)
		r.apply = func(now time.Time, err error) { m.Acquired(r.sent, now, r.rec, err) }
	case Renew:
		r.err = c.engine.Renew(ctx, epoch)
		r.apply = func(now time.Time, err error) { m.Renewed(r.sent, now, err) }
	case Release:
		r.err = c.engine.Release(ctx, epoch)
		r.apply = func(now time.Time, err error) { m.Released(r.sent, now, err) }
	case AskBack:
		holder := Dispatcher(rec.Holder)
		r.err = c.hooks.AskBack(ctx, holder, rec.Epoch)
		r.apply = m.AskedBack
	}
	return r
}

// handleResult: an answer that a suspension of more than c.retry has delayed counts as an error,
// because the lease may have expired since.
func (c *Claim) handleResult(r result) {
	now := time.Now()
	suspendedFor := c.totalSuspension(now) - r.totalSuspension
	if r.err == nil && suspendedFor > c.retry {
		r.err = errSuspended
	}
	fastLimit := c.callLimit / 2
	c.logOnce.logResult(c.log, r, now, fastLimit)
	if r.call == Look && r.err == nil {
		c.logOnce.logLook(c.log, &c.machine.cfg, r.rec)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.apply(now, r.err)
}

var errSuspended = errors.New("the machine stood still while this was under way")

func (c *Claim) changeMachine(change func(*Machine, time.Time)) {
	c.mu.Lock()
	change(c.machine, time.Now())
	c.mu.Unlock()
	c.wake()
}

func (c *Claim) wake() {
	select {
	case c.wakeUp <- struct{}{}:
	default:
	}
}

// GiveBack stops admission, calls stopped, and begins to release the lease with this epoch. While
// stopped runs, nothing is admitted any more, and the lease is not released yet.
func (c *Claim) GiveBack(epoch int64, stopped func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if err := c.machine.GiveBack(now, epoch); err != nil {
		return err
	}
	c.publish(now)
	stopped()
	c.wake()
	return nil
}

// SetRole is Machine.SetRole.
func (c *Claim) SetRole(home bool, takeoverRank int, canServe bool) {
	c.mu.Lock()
	changed := c.machine.SetRole(time.Now(), home, takeoverRank, canServe)
	c.mu.Unlock()
	if changed {
		c.wake()
	}
}

// ObserveRivalEpoch is Machine.ObserveRivalEpoch.
func (c *Claim) ObserveRivalEpoch(epoch int64) {
	c.changeMachine(func(m *Machine, now time.Time) { m.ObserveRivalEpoch(now, epoch) })
}

// GivePromise is Machine.GivePromise: without an error, this proxy has stopped admission.
func (c *Claim) GivePromise(ask Vote) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if err := c.machine.GivePromise(now, ask); err != nil {
		return err
	}
	c.publish(now)
	c.wake()
	return nil
}

// ObserveEpoch is Machine.ObserveEpoch.
func (c *Claim) ObserveEpoch(epoch int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.machine.ObserveEpoch(epoch)
}

// Seen is the highest epoch that was read, held, or named by another proxy or a guard.
func (c *Claim) Seen() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.maxEpochSeen
}

// Members are those that the holder wrote into the lease; empty: any proxy may take it.
func (c *Claim) Members() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.rec.Members
}

// Refused is Machine.Refused.
func (c *Claim) Refused(epoch int64) {
	c.changeMachine(func(m *Machine, now time.Time) { m.Refused(now, epoch) })
}

// View returns the machine's state now.
func (c *Claim) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.View(time.Now())
}

// Admits is View.Admits for a caller that is about to admit a request. It also notices a pause of
// the process or a suspension before OnChange is called. It takes no lock.
func (c *Claim) Admits(now time.Time) bool {
	admission := c.admission.Load()
	if admission == nil || !now.Before(admission.until) {
		return false
	}
	suspendedFor := c.totalSuspension(now) - admission.totalSuspension
	// The clock of admission.until stood still during a suspension. At most c.retry is ignored, as in
	// detectSuspension.
	if suspendedFor > c.retry {
		c.wake()
		return false
	}
	return true
}

// Leave gives the scope up and waits until the lease is released, until Run has returned, or until
// ctx ends.
func (c *Claim) Leave(ctx context.Context) {
	c.changeMachine(func(m *Machine, now time.Time) { m.Leave(now) })
	every := time.NewTicker(c.retry / 20)
	defer every.Stop()
	for c.holds() {
		select {
		case <-every.C:
		case <-c.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (c *Claim) holds() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.held
}
