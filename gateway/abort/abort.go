// Package abort keeps the running requests to which clients gave names, so that clients can end
// them by name.
package abort

import "sync"

// Running is the set of running requests that have names. The zero value is empty.
type Running struct {
	mu       sync.Mutex
	byCaller map[string]map[*entry]bool // sets of entries, by caller
}

// entry is one running request.
type entry struct {
	name      string
	cancel    func()
	cancelled chan struct{} // closed when cancel has returned; nil: cancel was not called
}

// Register registers a running request of a caller under a name. When the caller ends the requests
// of that name, cancel is called, but only the first time. unregister must be called when the
// request is over. Several requests may have the same name.
func (r *Running) Register(caller, name string, cancel func()) (unregister func()) {
	e := &entry{name: name, cancel: cancel}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byCaller == nil {
		r.byCaller = map[string]map[*entry]bool{}
	}
	if r.byCaller[caller] == nil {
		r.byCaller[caller] = map[*entry]bool{}
	}
	r.byCaller[caller][e] = true
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.byCaller[caller], e)
		if len(r.byCaller[caller]) == 0 {
			delete(r.byCaller, caller)
		}
	}
}

// End ends the caller's requests whose names match. It cancels them concurrently, returns when all
// calls of cancel have returned, and says how many requests matched. No caller can end the request
// of another caller.
func (r *Running) End(caller string, matches func(name string) bool) int {
	var matching []*entry
	r.mu.Lock()
	for e := range r.byCaller[caller] {
		if !matches(e.name) {
			continue
		}
		matching = append(matching, e)
		if e.cancelled == nil {
			e.cancelled = make(chan struct{})
			go func() {
				defer close(e.cancelled)
				e.cancel()
			}()
		}
	}
	r.mu.Unlock()
	for _, e := range matching {
		<-e.cancelled
	}
	return len(matching)
}
