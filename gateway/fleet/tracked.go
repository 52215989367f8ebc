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

// trackedCalls has the calls to engines that are under way.
type trackedCalls struct {
	now     func() *roster.Snapshot
	serving func() context.Context // ends when requests that have no answer yet must end
	mu      sync.Mutex
	all     map[*TrackedCall]struct{}
}

// Reasons why a call must go on elsewhere (Run.reason).
const (
	stays   uint32 = iota // the call need not go on elsewhere
	drained               // its engine was taken out of service, or takes no requests while another engine can do the work
	died                  // its engine was declared down while another engine can do the work
)

// TrackedCall is a call to an engine. The deadline of a drain may end the call. A probe also ends when its engine is declared down.
type TrackedCall struct {
	at        roster.Location
	now       func() *roster.Snapshot
	call      *engine.Call
	probe     bool
	reason    atomic.Uint32 // drained or died: why the call must go on elsewhere; stays: it need not
	abortable atomic.Bool   // the call may be aborted, because no engine is fetching KV for it
}

// Moved says whether the call must go on elsewhere because its engine was taken out of service or paused. A pause ends the calls that run
// on the engine.
func (r *TrackedCall) Moved() bool {
	return r.reason.Load() == drained || r.now != nil && r.now().Paused(r.at.Instance)
}

// Cause returns why the call failed, given its error. A call that was ended because its engine was declared down counts as a broken
// connection: the failure counts against the engine. It also counts as an attempt of the request, because the request may have killed the
// engine.
func (r *TrackedCall) Cause(err error) error {
	var failed *engine.Error
	if r.reason.Load() != died || !errors.As(err, &failed) || !failed.Aborted {
		return err
	}
	broke := *failed
	broke.Aborted, broke.Err = false, errDown
	return &broke
}

var errDown = errors.New("the engine was declared down before it answered")

// move makes the call go on elsewhere. It ends the call at once, or, if that would leak KV, leaves this to Settle.
func (r *TrackedCall) move(why uint32) {
	r.reason.CompareAndSwap(stays, why)
	if r.abortable.Load() {
		r.call.Leave(upstream.Notice)
	}
}

// Settle says that the call may be aborted from now on, because no engine is fetching KV for it any more. If the call must go on elsewhere,
// Settle ends it.
func (r *TrackedCall) Settle() {
	r.abortable.Store(true)
	if r.reason.Load() != stays {
		r.call.Leave(upstream.Notice)
	}
}

// Track registers a call that drains may move elsewhere, until Untrack. If the deadline of a drain of its engine, or of the proxy itself,
// has passed since the engine was chosen, the call is moved at once. abortable says that the call may be aborted at any time.
func (a *trackedCalls) Track(at roster.Location, call *engine.Call, abortable bool) *TrackedCall {
	r := &TrackedCall{at: at, now: a.now, call: call}
	r.abortable.Store(abortable)
	a.track(r)
	return r
}

// TrackProbe is Track for a probe, i.e. a call that makes a prefill engine compute a prompt. A probe may be aborted at any time, because
// its engine then keeps no KV. The call also ends when its engine is down or takes no requests, and another engine could prefill the
// prompt.
func (a *trackedCalls) TrackProbe(c *prefill.Candidate, call *engine.Call) *TrackedCall {
	r := &TrackedCall{at: roster.Location{Instance: c.Instance, Rank: c.Target.Rank}, now: a.now, call: call, probe: true}
	r.abortable.Store(true)
	a.track(r)
	r.moveIfDeserted(a.now()) // the engine may have gone down since it was chosen
	return r
}

// track adds a call to the list, and moves it at once if its time is already over.
func (a *trackedCalls) track(r *TrackedCall) {
	a.mu.Lock()
	a.all[r] = struct{}{}
	a.mu.Unlock()
	if a.serving().Err() != nil || a.now().Overdue(r.at) { // after the call is listed, so that either Move or this check ends it
		r.move(drained)
	}
}

// Untrack forgets a call that has ended.
func (a *trackedCalls) Untrack(r *TrackedCall) {
	a.mu.Lock()
	delete(a.all, r)
	a.mu.Unlock()
}

// Move ends every call whose place is covered, and returns how many. The answers go on elsewhere if they can.
func (a *trackedCalls) Move(covers func(roster.Location) bool) (moved int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for r := range a.all {
		if covers(r.at) {
			r.move(drained)
			moved++
		}
	}
	return moved
}

// moveDesertedProbes ends the probes at engines that are down or take no requests, so that their prompts go to other engines.
func (a *trackedCalls) moveDesertedProbes() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for r := range a.all {
		if r.probe {
			r.moveIfDeserted(a.now())
		}
	}
}

// moveIfDeserted ends a probe if its engine is down or takes no requests, and another engine can do the work.
func (r *TrackedCall) moveIfDeserted(now *roster.Snapshot) {
	switch e := now.Engine(r.at.Instance); {
	case e == nil || !e.Deserted:
	case e.Status.Up:
		r.move(drained)
	default:
		r.move(died)
	}
}
