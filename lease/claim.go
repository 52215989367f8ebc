package lease

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// A Claim is one dispatcher's standing towards one area: a machine, its engine
// and the goroutine that runs them.
type Claim struct {
	engine Engine
	hooks  Hooks
	log    *zap.Logger
	retry  time.Duration
	cap    time.Duration // of one call

	mu      sync.Mutex // over the machine, never held over a call
	machine *Machine
	told    View // what OnChange was told last; of Run's goroutine and GiveBack's

	failing [AskBack + 1]bool         // calls that failed last, of Run's goroutine
	sure    atomic.Pointer[time.Time] // until then it admits, unless OnChange says otherwise; nil: it does not

	poke chan struct{}
	done chan struct{}
}

// Hooks are what a claim needs of the dispatcher.
type Hooks struct {
	// OnChange is called with every view that differs from the one before. When
	// it returns from one that does not admit, nothing is admitted any more: only
	// then is a lease released. It must not call the claim.
	OnChange func(View)
	// AskBack asks the holder, a dispatcher's id, to give the area back.
	AskBack func(ctx context.Context, holder string, epoch int64) error
}

// NewClaim makes a claim; Run runs it.
func NewClaim(cfg Config, engine Engine, hooks Hooks, log *zap.Logger) *Claim {
	return &Claim{
		engine: engine, hooks: hooks, log: log, retry: cfg.Retry, cap: cfg.RenewDeadline / 2,
		machine: NewMachine(cfg), poke: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

// result is what a call brought.
type result struct {
	call Call
	sent time.Time
	rec  Record
	err  error
}

// Run keeps the claim until ctx ends. A lease that is held then is left to
// expire: Leave releases it.
func (c *Claim) Run(ctx context.Context) {
	defer close(c.done)
	results := make(chan result, 2)
	calling, asking := false, false // a call of the store, and one of the holder
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var call Call
		now := time.Now()
		c.mu.Lock()
		wake := c.machine.until(now, now.Add(c.retry))
		if !calling {
			call, wake = c.machine.Next(now)
		}
		c.tell(now)
		c.mu.Unlock()
		if call != None {
			if call == AskBack {
				asking = true
			} else {
				calling = true
			}
			go func() { results <- c.call(ctx, call) }()
			continue
		}
		timer.Reset(time.Until(wake))
		select {
		case r := <-results:
			if r.call == AskBack {
				asking = false
			} else {
				calling = false
			}
			c.learn(r)
		case <-timer.C:
		case <-c.poke:
		case <-ctx.Done():
			for _, open := range []bool{calling, asking} {
				if open {
					<-results
				}
			}
			return
		}
	}
}

// tell passes a view on that has changed. It is called with c.mu held, so that
// nobody is told of an older one later.
func (c *Claim) tell(now time.Time) {
	v := c.machine.View(now)
	if v.Admits {
		c.sure.Store(new(c.machine.renewed.Add(c.machine.cfg.RenewDeadline)))
	} else {
		c.sure.Store(nil)
	}
	if v == c.told {
		return
	}
	c.told = v
	c.hooks.OnChange(v)
}

func (c *Claim) call(ctx context.Context, call Call) result {
	c.mu.Lock()
	epoch, v := c.machine.epoch, c.machine.View(time.Now())
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, c.cap)
	defer cancel()
	r := result{call: call, sent: time.Now()}
	switch call {
	case Look:
		r.rec, r.err = c.engine.Look(ctx)
	case Acquire:
		r.rec, r.err = c.engine.Acquire(ctx)
	case Renew:
		r.err = c.engine.Renew(ctx, epoch)
	case Release:
		r.err = c.engine.Release(ctx, epoch)
	case AskBack:
		r.err = c.hooks.AskBack(ctx, Dispatcher(v.Holder), v.Epoch)
	}
	return r
}

func (c *Claim) learn(r result) {
	c.say(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	switch r.call {
	case Look:
		c.machine.Looked(r.sent, now, r.rec, r.err)
	case Acquire:
		c.machine.Acquired(r.sent, now, r.rec, r.err)
	case Renew:
		c.machine.Renewed(r.sent, now, r.err)
	case Release:
		c.machine.Released(r.sent, now, r.err)
	case AskBack:
		c.machine.Asked(now, r.err)
	}
}

// say logs a call that fails, once until it succeeds again.
func (c *Claim) say(r result) {
	failed := r.err != nil
	switch was := c.failing[r.call]; {
	case failed && was:
		c.log.Debug("ownership: still", zap.Stringer("call", r.call), zap.Error(r.err))
	case failed:
		c.log.Warn("ownership: a call of the lease's store or holder fails; said again once it succeeds", zap.Stringer("call", r.call), zap.Error(r.err))
	case was:
		c.log.Info("ownership: succeeds again", zap.Stringer("call", r.call))
	}
	c.failing[r.call] = failed
}

// tellMachine changes what the machine knows and has Run look at it.
func (c *Claim) tellMachine(change func(*Machine, time.Time)) {
	c.mu.Lock()
	change(c.machine, time.Now())
	c.mu.Unlock()
	c.wake()
}

func (c *Claim) wake() {
	select {
	case c.poke <- struct{}{}:
	default: // it has yet to look at the one before
	}
}

// GiveBack stops admission, on behalf of who names the epoch, and then lets go
// of the lease: while stopped runs nothing is admitted any more and nothing is
// released yet.
func (c *Claim) GiveBack(epoch int64, stopped func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if err := c.machine.GiveBack(now, epoch); err != nil {
		return err
	}
	c.tell(now)
	stopped()
	c.wake()
	return nil
}

// SetFit says whether this dispatcher could serve the area.
func (c *Claim) SetFit(fit bool) {
	c.tellMachine(func(m *Machine, _ time.Time) { m.SetFit(fit) })
}

// Stand says all that changes where owners are chosen anew: whether the area is
// this dispatcher's, its place among those that may take it, and whether it
// could serve it.
func (c *Claim) Stand(home bool, rank int, fit bool) {
	c.mu.Lock()
	m := c.machine
	changed := m.cfg.Home != home || m.cfg.Rank != rank || m.fit != fit
	m.SetHome(time.Now(), home)
	m.SetRank(rank)
	m.SetFit(fit)
	c.mu.Unlock()
	if changed {
		c.wake()
	}
}

// SetRank changes the place among those that may take the area.
func (c *Claim) SetRank(rank int) {
	c.tellMachine(func(m *Machine, _ time.Time) { m.SetRank(rank) })
}

// Claimed tells of an epoch that a peer named.
func (c *Claim) Claimed(epoch int64) {
	c.tellMachine(func(m *Machine, now time.Time) { m.Claimed(now, epoch) })
}

// View is what holds now.
func (c *Claim) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.machine.View(time.Now())
}

// Admits is View's, for who must know in the moment it acts: a process that
// stood still finds its time over before anybody told it. It takes no lock.
func (c *Claim) Admits(now time.Time) bool {
	until := c.sure.Load()
	return until != nil && now.Before(*until)
}

// Leave gives the area up and waits until the lease is released, or ctx ends.
func (c *Claim) Leave(ctx context.Context) {
	c.tellMachine(func(m *Machine, now time.Time) { m.Leave(now) })
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
