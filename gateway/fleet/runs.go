package fleet

import (
	"errors"
	"slices"

	"evenkeel/engine"
	"evenkeel/gateway/upstream"
	"evenkeel/prefill"
)

// Why a call has to go on elsewhere.
const (
	stays   uint32 = iota
	drained        // its engine was taken out of service, or is halted beside one that is up
	died           // its engine was declared down, beside one that is up
)

// Moved says whether the call has to go on elsewhere because its engine was taken out of service.
func (r *Run) Moved() bool { return r.leaves.Load() == drained }

// Cause is why the call failed with err. A call that was ended because its engine was declared down broke with that
// engine: it is charged to the engine, and counts as an attempt of the request, which may be what the engine died of.
func (r *Run) Cause(err error) error {
	var failed *engine.Error
	if r.leaves.Load() != died || !errors.As(err, &failed) || !failed.Aborted {
		return err
	}
	broke := *failed
	broke.Aborted, broke.Err = false, errDown
	return &broke
}

var errDown = errors.New("the engine was declared down before it answered")

// move ends the call, at once or as soon as that leaks nothing.
func (r *Run) move(why uint32) {
	r.leaves.CompareAndSwap(stays, why)
	if r.safe.Load() {
		r.call.Leave(upstream.Notice)
	}
}

// Settle says that the call may be aborted from now on.
func (r *Run) Settle() {
	r.safe.Store(true)
	if r.leaves.Load() != stays {
		r.call.Leave(upstream.Notice)
	}
}

// Track keeps a call among those that may be moved, until Untrack. The deadline of its
// place, or the proxy's own, may have passed since the place was chosen.
func (f *Fleet) Track(at Place, call *engine.Call, safe bool) *Run {
	r := &Run{at: at, call: call}
	r.safe.Store(safe)
	f.keep(r)
	return r
}

// TrackProbe is Track for a probe. A probe may always be aborted, because its engine then keeps nothing. It also ends when
// its engine is declared down and another engine could prefill the prompt.
func (f *Fleet) TrackProbe(c *prefill.Candidate, call *engine.Call) *Run {
	r := &Run{at: Place{Instance: c.Instance, Rank: c.Target.Rank}, call: call, probe: true}
	r.safe.Store(true)
	f.keep(r)
	if why := f.deserted(c.Instance); why != stays {
		r.move(why)
	}
	return r
}

func (f *Fleet) keep(r *Run) {
	f.runs.mu.Lock()
	f.runs.all[r] = struct{}{}
	f.runs.mu.Unlock()
	if f.host.Serving().Err() != nil || f.overdue(r.at) { // after it was kept, so that either side sees the other
		r.move(drained)
	}
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
			r.move(drained)
			n++
		}
	}
	return n
}

// desert finds the prefill engines that are down, or halted, while another one serves one of their models. It is called with f.mu held.
func (f *Fleet) desert(candidates []prefill.Candidate) {
	live := map[string]bool{}
	for i := range candidates {
		for _, m := range candidates[i].Models {
			live[m] = live[m] || candidates[i].Live
		}
	}
	for _, in := range f.instances {
		in.deserted = stays
		if in.role != Prefill || !slices.ContainsFunc(in.status.Models, func(m engine.Model) bool { return live[m.ID] }) {
			continue
		}
		switch {
		case !in.status.Up:
			in.deserted = died
		case in.status.Halted():
			in.deserted = drained
		}
	}
}

// deserted is why a probe has to leave an engine.
func (f *Fleet) deserted(instance string) uint32 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[instance]; in != nil {
		return in.deserted
	}
	return stays
}

// rescue ends the probes at engines that are down or halted, so that other engines are asked.
func (f *Fleet) rescue() {
	f.runs.mu.Lock()
	defer f.runs.mu.Unlock()
	for r := range f.runs.all {
		if !r.probe {
			continue
		}
		if why := f.deserted(r.at.Instance); why != stays {
			r.move(why)
		}
	}
}
