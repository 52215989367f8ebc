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

// Enter registers a running request of a caller under a name. Until leave is called, cancel is called when the caller ends the
// requests of that name. Several requests may have the same name.
func (r *Running) Enter(caller, name string, cancel func()) (leave func()) {
	e := &entry{name, cancel}
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
		delete(r.all[caller], e)
		if len(r.all[caller]) == 0 {
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
