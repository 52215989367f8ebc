package lease

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// A Claim runs the Machine of one proxy for one scope: Run makes the machine's calls to the Engine, and passes the
// answers back.
type Claim struct {
	engine    Engine
	hooks     Hooks
	log       *zap.Logger
	retry     time.Duration
	callLimit time.Duration // time limit of one call

	mu       sync.Mutex // guards the machine; never held during a call of the engine
	machine  *Machine
	lastView View // the view that OnChange got last; guarded by mu

	logOnce   logOnce                   // suppresses repeated log lines; only Run's goroutine changes it
	admission atomic.Pointer[admission] // for readers without the lock; nil: the proxy does not admit

	origin              time.Time                     // when the claim was made; totalSuspension compares the times since then
	wall                func(now time.Time) time.Time // the wall clock, which also runs while the computer is suspended; tests replace it
	lastTotalSuspension time.Duration                 // totalSuspension at the last detectSuspension
	askedMembers        map[string]bool               // members that are being asked for a promise; used by Run's goroutine only

	wakeUp chan struct{}
	done   chan struct{}
}

// Hooks are the calls of a claim to its proxy.
type Hooks struct {
	// OnChange is called with every view that differs from the view before. When a call with a view that does not
	// admit has returned, the proxy must admit nothing more, because the lease may be released then. OnChange
	// must not call the claim.
	OnChange func(View)
	// AskBack asks the holder, which is a proxy's id, to give the scope back.
	AskBack func(ctx context.Context, holder string, epoch int64) error
	// Vote asks another member for its promise (Machine.GivePromise) not to admit until a lease duration and a start delay
	// are over. An error means that the member gives no promise. Vote is only called if Config.Members is set.
	Vote func(ctx context.Context, member string, ask Vote) error
}

// admission is the time until which a claim admits unless its view changes.
type admission struct {
	until           time.Time
	totalSuspension time.Duration // Claim.lastTotalSuspension when until was set
}

// NewClaim makes a claim, which does nothing until Run is called.
func NewClaim(cfg Config, engine Engine, hooks Hooks, log *zap.Logger) *Claim {
	cfg.Begun = time.Now()
	return &Claim{
		engine: engine, hooks: hooks, log: log, retry: cfg.Retry,
		callLimit: cfg.RenewDeadline / 2, // after a call without an answer, there is time for another one before an owner must stop
		// From origin on, the wall clock and the monotonic clock are compared. The first runs on while the computer is suspended.
		origin: cfg.Begun, wall: wallClock,
		askedMembers: map[string]bool{}, // no member is being asked for a vote yet
		machine:      NewMachine(cfg), wakeUp: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

// wallClock returns the time now without its monotonic part, so that only the wall clock counts in a difference.
func wallClock(now time.Time) time.Time { return now.Round(0) }

// Run runs the claim until ctx ends. It makes the calls that are due, each in the background: calls of the store, AskBack, which asks the
// holder to give the scope back, and questions to the other members for votes. Then it waits for an answer, a change from outside, or the
// time at which something is due. It does not release a lease that is held at the end: the lease expires. To release it, call Leave before.
func (c *Claim) Run(ctx context.Context) {
	defer close(c.done)
	results := make(chan result)
	storeCallRuns := false // a call of the store is under way
	running := 0           // number of calls under way, calls to proxies included
	begin := func(call func() result) {
		running++
		go func() { results <- call() }()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		call, wake := c.checkMachine(ctx, storeCallRuns, begin) // it begins the questions for votes itself
		if call != None {
			storeCallRuns = storeCallRuns || call != AskBack // AskBack asks a proxy; all other calls go to the store
			begin(func() result { return c.makeCall(ctx, call) })
			continue // find out again what is due and when, now that the call is under way
		}
		timer.Reset(time.Until(wake))
		select {
		case r := <-results:
			running--
			switch {
			case r.member != "": // the answer of a member to a question for its vote
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

// checkMachine looks at the machine once. It returns the call to make now, or None and when to look again. While a call of the store is
// under way (storeCallRuns), it returns None, because the machine makes one such call at a time. If votes of the other members are due, it
// asks for them itself: begin runs each question in the background, and passes the answer to Run. It also notes a suspension of the
// computer, and publishes the machine's view.
func (c *Claim) checkMachine(ctx context.Context, storeCallRuns bool, begin func(func() result)) (call Call, wake time.Time) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.detectSuspension(now)
	if storeCallRuns {
		latest := now.Add(c.retry) // an answer to the call wakes Run earlier
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

// askVotes asks the other members for promises: all but this proxy, the holder in the question, and members to which an earlier question
// is still under way (askedMembers). begin runs each question in the background, and passes the answer to Run.
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
			r.totalSuspension = c.totalSuspension(r.sent) // if it has grown at the answer, the computer was suspended meanwhile
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

// totalSuspension is how long the computer has been suspended since origin: how much more time has passed on the wall clock than on the
// monotonic clock, which stands still during a suspension. A wall clock that is set forward looks like a suspension, too.
func (c *Claim) totalSuspension(now time.Time) time.Duration {
	return c.wall(now).Sub(c.origin.Round(0)) - now.Sub(c.origin)
}

// detectSuspension tells the machine if the computer was suspended since the last call of detectSuspension, and logs it. Renewals from
// before a suspension no longer prove that the lease is held. A suspension of at most c.retry is ignored, because the waits of a lease
// (Times) allow for clocks that differ in speed. detectSuspension is called with c.mu held.
func (c *Claim) detectSuspension(now time.Time) {
	total := c.totalSuspension(now)
	if suspendedFor := total - c.lastTotalSuspension; suspendedFor > c.retry {
		c.log.Warn("the machine stood still, or its clock was set: this proxy admits nothing until it has renewed the lease",
			zap.Duration("for", suspendedFor))
		c.machine.Suspended(now)
	}
	c.lastTotalSuspension = total
}

// publish stores the time until which this proxy admits, for Admits, logs a changed view and passes it to OnChange. It is called with c.mu
// held, so that OnChange gets the views in order.
func (c *Claim) publish(now time.Time) {
	v := c.machine.View(now)
	if v.Admits {
		// If the total has grown by more than c.retry when Admits is called, the computer was suspended meanwhile, and the lease
		// may have expired. Admits then returns false, even before Run notices the suspension.
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

// makeCall makes one call of the engine, or asks the holder for the scope. It does not change the machine: it returns the outcome with the
// function apply, which handleResult calls later to pass the outcome to the machine.
func (c *Claim) makeCall(ctx context.Context, call Call) result {
	m := c.machine
	c.mu.Lock()
	epoch, rec, maxEpochSeen := m.epoch, m.rec, m.maxEpochSeen
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, c.callLimit)
	defer cancel()
	r := result{call: call, sent: time.Now()}
	r.totalSuspension = c.totalSuspension(r.sent) // handleResult compares it: an answer that a suspension delayed does not count
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
		holder := Dispatcher(rec.Holder) // the id of the proxy, without the name of its process
		r.err = c.hooks.AskBack(ctx, holder, rec.Epoch)
		r.apply = m.AskedBack
	}
	return r
}

// handleResult passes the outcome of a call to the machine, and logs it. If the computer was suspended during the call, it passes an error
// instead of the answer, because the lease may have expired since. As in detectSuspension, a suspension of at most c.retry does not count.
func (c *Claim) handleResult(r result) {
	now := time.Now()
	suspendedFor := c.totalSuspension(now) - r.totalSuspension // how long the computer was suspended since the call was sent
	if r.err == nil && suspendedFor > c.retry {
		r.err = errSuspended
	}
	fastLimit := c.callLimit / 2 // an answer that takes longer is logged as slow
	c.logOnce.logResult(c.log, r, now, fastLimit)
	if r.call == Look && r.err == nil {
		c.logOnce.logLook(c.log, &c.machine.cfg, r.rec)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.apply(now, r.err)
}

// errSuspended replaces the answer to a call during which the computer was suspended, because the answer may be old.
var errSuspended = errors.New("the machine stood still while this was under way")

// changeMachine changes the machine's state and wakes Run.
func (c *Claim) changeMachine(change func(*Machine, time.Time)) {
	c.mu.Lock()
	change(c.machine, time.Now())
	c.mu.Unlock()
	c.wake()
}

// wake makes Run look at the machine again at once, without waiting for its timer.
func (c *Claim) wake() {
	select {
	case c.wakeUp <- struct{}{}:
	default: // an earlier wake-up is still pending
	}
}

// GiveBack stops admission, calls stopped, and begins to release the lease, for a proxy that names the lease's
// epoch. While stopped runs, nothing is admitted any more, and the lease is not released yet.
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

// SetRole changes this proxy's role for the scope as Machine.SetRole does, and wakes Run if anything changed. home: the scope
// belongs to this proxy. takeoverRank is its place among the proxies that may take the lease; 0 is the first. canServe: this
// proxy is healthy enough to serve the scope.
func (c *Claim) SetRole(home bool, takeoverRank int, canServe bool) {
	c.mu.Lock()
	changed := c.machine.SetRole(time.Now(), home, takeoverRank, canServe)
	c.mu.Unlock()
	if changed {
		c.wake()
	}
}

// ObserveRivalEpoch records that another proxy says that it owns the scope with this epoch. If the epoch is higher than that of
// this proxy's lease, admission stops until a renewal has succeeded.
func (c *Claim) ObserveRivalEpoch(epoch int64) {
	c.changeMachine(func(m *Machine, now time.Time) { m.ObserveRivalEpoch(now, epoch) })
}

// GivePromise answers an owner that cannot reach the store, and so cannot renew its lease there. If all other members promise not to admit,
// the owner may go on without the store. If GivePromise returns no error, this proxy has given its promise: it has stopped admission, and
// admits nothing for at least the duration of a lease.
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

// ObserveEpoch records an epoch that a peer has seen, so that the next acquisition gets a higher one.
func (c *Claim) ObserveEpoch(epoch int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.machine.ObserveEpoch(epoch)
}

// Seen is the highest epoch that was read from the store, held by this proxy, or named by another proxy or by a
// guard in front of an engine.
func (c *Claim) Seen() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.maxEpochSeen
}

// Members returns the list of proxies that may take the lease, as its holder wrote it; empty: any proxy may.
func (c *Claim) Members() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.rec.Members
}

// Refused tells the machine that a guard in front of an engine refused this proxy's epoch, because the guard has seen
// the higher epoch that is given.
func (c *Claim) Refused(epoch int64) {
	c.changeMachine(func(m *Machine, now time.Time) { m.Refused(now, epoch) })
}

// View returns the machine's state now. It takes the claim's lock; Admits does not.
func (c *Claim) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.View(time.Now())
}

// Admits is View.Admits for a caller that is about to admit a request. If the last renewal ran out while the process was paused, or if the
// computer was suspended since Run last looked, Admits is false even before OnChange is called. It takes no lock.
func (c *Claim) Admits(now time.Time) bool {
	admission := c.admission.Load()
	if admission == nil || !now.Before(admission.until) {
		return false
	}
	suspendedFor := c.totalSuspension(now) - admission.totalSuspension
	// The clock of admission.until stood still during a suspension, so the lease may have expired before that time is reached. As in
	// detectSuspension, a suspension of at most c.retry does not count: the waits of a lease allow for clocks that differ so much.
	if suspendedFor > c.retry {
		c.wake() // Run then reports the change to OnChange
		return false
	}
	return true
}

// Leave gives the scope up and waits until the lease is released, until Run has returned, or until ctx ends.
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

// holds reports whether this proxy holds the lease, as far as the machine knows.
func (c *Claim) holds() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.held
}
