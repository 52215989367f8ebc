// Package abort lists the running requests by the names that their clients gave them, so that a client can end a request by its name.
package abort

import "sync"

// Running is the list of running requests. Its zero value is empty.
type Running struct {
	mu  sync.Mutex
	all map[string]map[*entry]bool // by caller
}

type entry struct {
	name string
	end  func()
}

// Enter registers a running request of a caller under a name, until leave is called. If the caller ends the requests of this name
// meanwhile, cancel is called. Several requests may have the same name.
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

// End cancels, concurrently, all requests of the caller whose names takes accepts. It returns their number, once every cancel has returned.
// A caller cannot end the requests of another caller.
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
