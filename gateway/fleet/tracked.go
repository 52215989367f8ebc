package fleet

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/upstream"
	"evenkeel/prefill"
)

// trackedCalls has the calls to engines that are under way, so that a drain or a failure of an engine can end them.
type trackedCalls struct {
	presentFleet func() *roster.Snapshot // the engines as they are now
	serving      func() context.Context  // ends when requests that have no answer yet must end
	mu           sync.Mutex
	all          map[*TrackedCall]struct{}
}

// Reasons why a call must go on elsewhere (TrackedCall.reason).
const (
	stays   uint32 = iota // the call need not go on elsewhere
	drained               // the engine was taken out of service, or takes no requests while another one can do the work
	died                  // the engine was declared down while another one can do the work
)

// Until is from when on a call may be ended so that its request goes on elsewhere.
type Until uint8

// When a call may be ended.
const (
	FirstEvent Until = iota // not before its first event: until then its engine may pull KV, which would leak
	Always                  // at any time, but only a drain does so
	// At any time. Its engine computes the prompt, so nothing is lost but time. So the call also
	// ends before its first event if its engine takes no requests, and another one can do the work.
	Elsewhere
)

// TrackedCall is a call to an engine. The deadline of a drain may end the call. A probe also ends when its engine is declared down.
type TrackedCall struct {
	location     roster.Location
	presentFleet func() *roster.Snapshot // returns the present fleet; nil: only in tests
	call         *engine.Call
	probe        bool
	awaitsEvent  atomic.Bool   // the call has no event yet, and may move (Elsewhere)
	reason       atomic.Uint32 // why the call must go on elsewhere: drained or died; stays: it need not go
	abortable    atomic.Bool   // the call may be aborted, because no engine is fetching KV for it
}

// MustMove says whether the call must go on elsewhere because its engine was taken out of service,
// paused or halted. A pause ends the calls that run on the engine, and a halted engine is silent.
func (c *TrackedCall) MustMove() bool {
	if c.reason.Load() == drained {
		return true
	}
	return c.presentFleet != nil && c.presentFleet().Leaves(c.location.Instance)
}

// Cause returns why the call failed, given its error. A call that was ended because its engine was declared down counts as a broken
// connection: the failure counts against the engine. It also counts as an attempt of the request, because the request may have killed the
// engine.
func (c *TrackedCall) Cause(err error) error {
	if c.reason.Load() != died {
		return err
	}
	var failed *engine.Error
	wasAborted := errors.As(err, &failed) && failed.Aborted // leaveEngine aborts the call; any other error has a cause of its own
	if !wasAborted {
		return err
	}
	broke := *failed
	broke.Aborted, broke.Err = false, errDown
	return &broke
}

var errDown = errors.New("the engine was declared down before it answered")

// leaveEngine records that the call must go on elsewhere, and why. It ends the call at once, or, if that would leak KV, leaves this to
// AllowAbort.
func (c *TrackedCall) leaveEngine(why uint32) {
	c.reason.CompareAndSwap(stays, why)
	if c.abortable.Load() {
		c.call.Disconnect(upstream.NoticeTimeout)
	}
}

// AllowAbort says that the first event of the call has come. It may be aborted from now on, because
// no engine is fetching KV for it. If the call must go on elsewhere, AllowAbort ends it.
func (c *TrackedCall) AllowAbort() {
	c.awaitsEvent.Store(false)
	c.abortable.Store(true)
	if c.reason.Load() != stays {
		c.call.Disconnect(upstream.NoticeTimeout)
	}
}

// Track registers a call that drains may move elsewhere, until Untrack. If the deadline of a drain of its engine, or of the proxy itself,
// has passed since the engine was chosen, the call is moved at once.
func (t *trackedCalls) Track(at roster.Location, call *engine.Call, ends Until) *TrackedCall {
	c := &TrackedCall{location: at, presentFleet: t.presentFleet, call: call}
	c.abortable.Store(ends != FirstEvent)
	c.awaitsEvent.Store(ends == Elsewhere)
	t.register(c)
	c.moveIfDeserted(t.presentFleet()) // the engine may have been halted since it was chosen
	return c
}

// TrackProbe is Track for a probe, i.e. a call that makes a prefill engine compute a prompt. A probe may be aborted at any time, because
// its engine then keeps no KV. The call also ends when its engine is down or takes no requests, and another engine could prefill the
// prompt.
func (t *trackedCalls) TrackProbe(c *prefill.Candidate, call *engine.Call) *TrackedCall {
	at := roster.Location{Instance: c.Instance, Rank: c.Target.Rank}
	tracked := &TrackedCall{location: at, presentFleet: t.presentFleet, call: call, probe: true}
	tracked.abortable.Store(true)
	t.register(tracked)
	tracked.moveIfDeserted(t.presentFleet()) // the engine may have gone down since it was chosen
	return tracked
}

// register adds a call to the list of calls that a drain can end. If the deadline of the drain of its engine, or of the whole proxy, has
// passed already, the call must leave the engine at once, and go on elsewhere.
func (t *trackedCalls) register(c *TrackedCall) {
	t.mu.Lock()
	t.all[c] = struct{}{}
	t.mu.Unlock()
	// The deadline is checked after the call is listed, so that either MoveCalls or this check ends the call.
	deadlinePassed := t.serving().Err() != nil || t.presentFleet().Overdue(c.location)
	if deadlinePassed {
		c.leaveEngine(drained)
	}
}

// Untrack forgets a call that has ended, so that no drain tries to end it.
func (t *trackedCalls) Untrack(c *TrackedCall) {
	t.mu.Lock()
	delete(t.all, c)
	t.mu.Unlock()
}

// MoveCalls ends every call at a location for which covers is true, and returns how many it has ended. The answers go on elsewhere if they
// can.
func (t *trackedCalls) MoveCalls(covers func(roster.Location) bool) (moved int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.all {
		if covers(c.location) {
			c.leaveEngine(drained)
			moved++
		}
	}
	return moved
}

// moveDeserted ends calls at engines that are down or take no requests, so that their requests go
// to other engines.
func (t *trackedCalls) moveDeserted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.all {
		c.moveIfDeserted(t.presentFleet())
	}
}

// moveIfDeserted ends a probe, or a call that awaits its first event, if its engine is down or
// takes no requests, and another engine can do the work.
func (c *TrackedCall) moveIfDeserted(now *roster.Snapshot) {
	if !c.probe && !c.awaitsEvent.Load() {
		return
	}
	switch e := now.Engine(c.location.Instance); {
	case e == nil || !e.Deserted: // the engine has left, so nothing is known of it, or the probe may stay
	case c.probe && !e.Status.Up:
		c.leaveEngine(died)
	default: // that the engine is halted is no failure, and the monitor knows of one that is down
		c.leaveEngine(drained)
	}
}
