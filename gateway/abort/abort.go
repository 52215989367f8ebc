// Package abort knows which requests run, by the names by which their clients call them, so that clients can end them by these names.
package abort

import "sync"

// Running are the requests that run. The zero value has none.
type Running struct {
	mu  sync.Mutex
	all map[string]map[*entry]bool // by caller
}

type entry struct {
	name string
	end  func()
}

// Enter has end called when the caller ends its request, until leave. Several may have one name.
func (r *Running) Enter(caller, name string, end func()) (leave func()) {
	e := &entry{name, end}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[string]map[*entry]bool{}
	}
	if r.all[caller] == nil {
		r.all[caller] = map[*entry]bool{}
	}
	r.all[caller][e] = true
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if delete(r.all[caller], e); len(r.all[caller]) == 0 {
			delete(r.all, caller)
		}
	}
}

// End ends those of the caller's requests whose names are taken, side by side, and returns when all were told. It says how many there
// were. No caller can end the request of another one.
func (r *Running) End(caller string, takes func(name string) bool) int {
	var ends []func()
	r.mu.Lock()
	for e := range r.all[caller] {
		if takes(e.name) {
			ends = append(ends, e.end)
		}
	}
	r.mu.Unlock()
	var all sync.WaitGroup
	for _, end := range ends {
		all.Go(end)
	}
	all.Wait()
	return len(ends)
}
