package request

import (
	"errors"
	"sync"
	"sync/atomic"

	"evenkeel/engine"
	"evenkeel/gateway/fleet"
)

// run is a call that a drain's deadline may end.
type run struct {
	at    fleet.Place
	call  *engine.Call
	moved atomic.Bool // it has to go on elsewhere
	safe  atomic.Bool // it may be aborted: no pull of KV is under way
}

// move ends the call, at once or as soon as that leaks nothing.
func (r *run) move() {
	r.moved.Store(true)
	if r.safe.Load() {
		r.call.Leave(notice)
	}
}

// settle says that the call may be aborted from now on.
func (r *run) settle() {
	r.safe.Store(true)
	if r.moved.Load() {
		r.call.Leave(notice)
	}
}

// runs are the calls under way.
type runs struct {
	mu  sync.Mutex
	all map[*run]struct{}
}

// track keeps a call among those that may be moved, until untrack. The deadline of its
// place, or the proxy's own, may have passed since the place was chosen.
func (srv *Server) track(at fleet.Place, call *engine.Call, safe bool) *run {
	r := &run{at: at, call: call}
	r.safe.Store(safe)
	srv.runs.mu.Lock()
	srv.runs.all[r] = struct{}{}
	srv.runs.mu.Unlock()
	if srv.over() || srv.Fleet.Overdue(at) { // after it was kept, so that either side sees the other
		r.move()
	}
	return r
}

func (srv *Server) untrack(r *run) {
	srv.runs.mu.Lock()
	delete(srv.runs.all, r)
	srv.runs.mu.Unlock()
}

// move ends every call at a place that is meant, and returns how many.
func (r *runs) move(meant func(fleet.Place) bool) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for one := range r.all {
		if meant(one.at) {
			one.move()
			n++
		}
	}
	return n
}

// errDrained ends an answer whose rank was drained and that no other can take up.
var errDrained = errors.New("the engine was taken out of service")
