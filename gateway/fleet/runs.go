package fleet

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/engine"
)

// Run is a call to an engine that a drain's deadline may end.
type Run struct {
	at     Place
	call   *engine.Call
	notice time.Duration // the engine has so long to close its side
	moved  atomic.Bool   // it has to go on elsewhere
	safe   atomic.Bool   // it may be aborted: no pull of KV is under way
}

// Moved says whether the call has to go on elsewhere.
func (r *Run) Moved() bool { return r.moved.Load() }

// move ends the call, at once or as soon as that leaks nothing.
func (r *Run) move() {
	r.moved.Store(true)
	if r.safe.Load() {
		r.call.Leave(r.notice)
	}
}

// Settle says that the call may be aborted from now on.
func (r *Run) Settle() {
	r.safe.Store(true)
	if r.moved.Load() {
		r.call.Leave(r.notice)
	}
}

// runs are the calls under way.
type runs struct {
	mu  sync.Mutex
	all map[*Run]struct{}
}

// Track keeps a call among those that may be moved, until Untrack. The deadline of its
// place, or the proxy's own, may have passed since the place was chosen.
func (f *Fleet) Track(at Place, call *engine.Call, notice time.Duration, safe bool) *Run {
	r := &Run{at: at, call: call, notice: notice}
	r.safe.Store(safe)
	f.runs.mu.Lock()
	f.runs.all[r] = struct{}{}
	f.runs.mu.Unlock()
	if f.host.Serving().Err() != nil || f.overdue(at) { // after it was kept, so that either side sees the other
		r.move()
	}
	return r
}

// Untrack forgets a call that has ended.
func (f *Fleet) Untrack(r *Run) {
	f.runs.mu.Lock()
	delete(f.runs.all, r)
	f.runs.mu.Unlock()
}

// Move ends every call at a place that is meant, and returns how many. Their answers go
// on elsewhere where they can.
func (f *Fleet) Move(meant func(Place) bool) (n int) {
	f.runs.mu.Lock()
	defer f.runs.mu.Unlock()
	for r := range f.runs.all {
		if meant(r.at) {
			r.move()
			n++
		}
	}
	return n
}
