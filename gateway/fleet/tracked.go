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

// trackedCalls has the calls under way, so that a drain or a failure of an engine can end them.
type trackedCalls struct {
	presentFleet func() *roster.Snapshot
	serving      func() context.Context // ends when requests that have no answer yet must end
	mu           sync.Mutex
	all          map[*TrackedCall]struct{}
}

const (
	stays   uint32 = iota
	drained        // its engine takes no requests while another can do the work
	died           // its engine is down while another can do the work
)

// Until is from when on a call may be ended so that its request goes on elsewhere.
type Until uint8

// When a call may be ended.
const (
	// not before its first event: until then its engine may pull KV, which would leak
	FirstEvent Until = iota
	Always           // at any time, but only by a drain
	// At any time: its engine computes the prompt, so only time is lost. Before its first event, the
	// call also ends if its engine takes no requests and another can do the work.
	Elsewhere
)

// TrackedCall is a call that the deadline of a drain may end. A probe also ends when its engine is
// down.
type TrackedCall struct {
	location     roster.Location
	presentFleet func() *roster.Snapshot // nil only in tests
	call         *engine.Call
	probe        bool
	awaitsEvent  atomic.Bool   // no event yet, and it may move (Elsewhere)
	reason       atomic.Uint32 // drained, died or stays
	abortable    atomic.Bool   // no engine is fetching KV for it
}

// MustMove says whether the call's engine was taken out of service, paused or halted. A pause ends
// the calls that run, and a halted engine is silent.
func (c *TrackedCall) MustMove() bool {
	if c.reason.Load() == drained {
		return true
	}
	return c.presentFleet != nil && c.presentFleet().Leaves(c.location.Instance)
}

// Cause returns why the call failed. A call that was ended because its engine is down counts as a
// broken connection, so against the engine, and as an attempt of the request, which may have killed
// the engine.
func (c *TrackedCall) Cause(err error) error {
	if c.reason.Load() != died {
		return err
	}
	var failed *engine.Error
	wasAborted := errors.As(err, &failed) && failed.Aborted // any other error has a cause of its own
	if !wasAborted {
		return err
	}
	broke := *failed
	broke.Aborted, broke.Err = false, errDown
	return &broke
}

var errDown = errors.New("the engine was declared down before it answered")

// leaveEngine ends the call at once or, if that would leak KV, leaves this to AllowAbort.
func (c *TrackedCall) leaveEngine(why uint32) {
	c.reason.CompareAndSwap(stays, why)
	if c.abortable.Load() {
		c.call.Disconnect(upstream.NoticeTimeout)
	}
}

// AllowAbort says that the first event has come, so no engine is fetching KV for the call.
func (c *TrackedCall) AllowAbort() {
	c.awaitsEvent.Store(false)
	c.abortable.Store(true)
	if c.reason.Load() != stays {
		c.call.Disconnect(upstream.NoticeTimeout)
	}
}

// Track registers a call that drains may move, until Untrack.
func (t *trackedCalls) Track(at roster.Location, call *engine.Call, ends Until) *TrackedCall {
	c := &TrackedCall{location: at, presentFleet: t.presentFleet, call: call}
	c.abortable.Store(ends != FirstEvent)
	c.awaitsEvent.Store(ends == Elsewhere)
	t.register(c)
	c.moveIfDeserted(t.presentFleet()) // it may have been halted since the engine was chosen
	return c
}

// TrackProbe is Track for a call that makes a prefill engine compute a prompt. It may be aborted at
// any time, because its engine then keeps no KV.
func (t *trackedCalls) TrackProbe(c *prefill.Candidate, call *engine.Call) *TrackedCall {
	at := roster.Location{Instance: c.Instance, Rank: c.Target.Rank}
	tracked := &TrackedCall{location: at, presentFleet: t.presentFleet, call: call, probe: true}
	tracked.abortable.Store(true)
	t.register(tracked)
	tracked.moveIfDeserted(t.presentFleet()) // it may have gone down since the engine was chosen
	return tracked
}

func (t *trackedCalls) register(c *TrackedCall) {
	t.mu.Lock()
	t.all[c] = struct{}{}
	t.mu.Unlock()
	// After the call is listed, so that either MoveCalls or this check ends it.
	deadlinePassed := t.serving().Err() != nil || t.presentFleet().Overdue(c.location)
	if deadlinePassed {
		c.leaveEngine(drained)
	}
}

func (t *trackedCalls) Untrack(c *TrackedCall) {
	t.mu.Lock()
	delete(t.all, c)
	t.mu.Unlock()
}

// MoveCalls ends every call at a location that covers accepts.
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

func (t *trackedCalls) moveDeserted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.all {
		c.moveIfDeserted(t.presentFleet())
	}
}

// moveIfDeserted only moves probes, and calls that await their first event.
func (c *TrackedCall) moveIfDeserted(now *roster.Snapshot) {
	if !c.probe && !c.awaitsEvent.Load() {
		return
	}
	switch e := now.Engine(c.location.Instance); {
	case e == nil || !e.Deserted: // nothing is known of an engine that has left
	case c.probe && !e.Status.Up:
		c.leaveEngine(died)
	default: // a halt is no failure, and the monitor knows of an engine that is down
		c.leaveEngine(drained)
	}
}
