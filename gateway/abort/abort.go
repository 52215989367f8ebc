// Package abort keeps the running requests to which clients gave names, so that clients can end them by name.
package abort

import "sync"

// Running is the set of running requests that have names. The zero value is empty.
type Running struct {
	mu  sync.Mutex
	all map[string]map[*entry]bool // sets of entries, by caller
}

type entry struct {
	name   string
	cancel func()
}

// Enter registers a running request of a caller under a name. When the caller ends the requests of that name, cancel is called. leave
// must be called when the request is over. Several requests may have the same name.
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

// End ends the caller's requests whose names match. It cancels them concurrently, returns when all calls of cancel have returned, and says
// how many requests matched. No caller can end the request of another caller.
func (r *Running) End(caller string, matches func(name string) bool) int {
	var cancels []func()
	r.mu.Lock()
	for e := range r.all[caller] {
		if matches(e.name) {
			cancels = append(cancels, e.cancel)
		}
	}
	r.mu.Unlock()
	var running sync.WaitGroup
	for _, cancel := range cancels {
		running.Go(cancel)
	}
	running.Wait()
	return len(cancels)
}
