package fleet

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"evenkeel/engine"
	"evenkeel/gateway/upstream"
	"evenkeel/prefill"
)

// runs are the calls under way.
type runs struct {
	now     func() *Published
	serving func() context.Context // ends when requests without an answer must end
	mu      sync.Mutex
	all     map[*Run]struct{}
}

// Reasons why a call must go on elsewhere.
const (
	stays   uint32 = iota
	drained        // its engine was taken out of service, or is halted while another one can stand in
	died           // its engine was declared down while another one can stand in
)

// Run is a call to an engine. The deadline of a drain may end it. A probe also ends when its engine is declared down.
type Run struct {
	at        Place
	now       func() *Published
	call      *engine.Call
	probe     bool
	reason    atomic.Uint32 // why it must go on elsewhere; stays: it need not
	abortable atomic.Bool   // it may be aborted: no pull of KV is under way
}

// Moved says whether the call must go on elsewhere because its engine was taken out of service, or was paused: a
// pause ends what runs there.
func (r *Run) Moved() bool {
	return r.reason.Load() == drained || r.now != nil && r.now().Paused(r.at.Instance)
}

// Cause is why the call failed with err. If the call was ended because its engine was declared down, it counts as a
// connection that broke: the failure counts against the engine, and as an attempt of the request, because the request
// may be what the engine died of.
func (r *Run) Cause(err error) error {
	var failed *engine.Error
	if r.reason.Load() != died || !errors.As(err, &failed) || !failed.Aborted {
		return err
	}
	broke := *failed
	broke.Aborted, broke.Err = false, errDown
	return &broke
}

var errDown = errors.New("the engine was declared down before it answered")

// move ends the call because it must go on elsewhere: at once, or as soon as that leaks no KV (see Settle).
func (r *Run) move(why uint32) {
	r.reason.CompareAndSwap(stays, why)
	if r.abortable.Load() {
		r.call.Leave(upstream.Notice)
	}
}

// Settle says that the call may be aborted from now on, because no pull of KV is under way any more. A call that must go on elsewhere is
// ended.
func (r *Run) Settle() {
	r.abortable.Store(true)
	if r.reason.Load() != stays {
		r.call.Leave(upstream.Notice)
	}
}

// Track keeps a call among those that may be moved, until Untrack. If the deadline of its place, or the proxy's own,
// has passed since the place was chosen, the call is moved at once. abortable says that the call may be aborted at any time.
func (a *runs) Track(at Place, call *engine.Call, abortable bool) *Run {
	r := &Run{at: at, now: a.now, call: call}
	r.abortable.Store(abortable)
	a.track(r)
	return r
}

// TrackProbe is Track for a probe: a call that has a prefill engine compute a prompt. A probe may be aborted at any time, because its
// engine then keeps no KV. It also ends when its engine is down or halted and another engine could prefill the prompt.
func (a *runs) TrackProbe(c *prefill.Candidate, call *engine.Call) *Run {
	r := &Run{at: Place{Instance: c.Instance, Rank: c.Target.Rank}, now: a.now, call: call, probe: true}
	r.abortable.Store(true)
	a.track(r)
	r.moveIfDeserted(a.now()) // the engine may have gone down since it was chosen
	return r
}

// track adds a call to those that may be moved.
func (a *runs) track(r *Run) {
	a.mu.Lock()
	a.all[r] = struct{}{}
	a.mu.Unlock()
	if a.serving().Err() != nil || a.now().Overdue(r.at) { // after keeping it, so that Move sees the call or this sees the deadline
		r.move(drained)
	}
}

// Untrack forgets a call that has ended.
func (a *runs) Untrack(r *Run) {
	a.mu.Lock()
	delete(a.all, r)
	a.mu.Unlock()
}

// Move ends every call at a place for which meant is true, and returns how many. Their answers go on elsewhere if
// they can.
func (a *runs) Move(meant func(Place) bool) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for r := range a.all {
		if meant(r.at) {
			r.move(drained)
			n++
		}
	}
	return n
}

// moveDesertedProbes ends the probes at engines that are down or halted, so that their prompts go to other engines.
func (a *runs) moveDesertedProbes() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for r := range a.all {
		if r.probe {
			r.moveIfDeserted(a.now())
		}
	}
}

// moveIfDeserted ends a probe if its engine is down or halted and another engine can stand in.
func (r *Run) moveIfDeserted(now *Published) {
	switch e := now.Engine(r.at.Instance); {
	case e == nil || !e.Deserted:
	case e.Status.Up:
		r.move(drained)
	default:
		r.move(died)
	}
}
