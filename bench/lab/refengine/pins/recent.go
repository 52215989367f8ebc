package pins

import "sync"

// Recent remembers the last values by id: the older half is forgotten at times.
type Recent[V any] struct{ last, older map[string]V }

const remembered = 1 << 16

// Get returns what was put last under id.
func (r *Recent[V]) Get(id string) (v V, ok bool) {
	if v, ok = r.last[id]; !ok {
		v, ok = r.older[id]
	}
	return v, ok
}

// Put remembers v.
func (r *Recent[V]) Put(id string, v V) {
	if r.last == nil || len(r.last) >= remembered {
		r.older, r.last = r.last, map[string]V{}
	}
	r.last[id] = v
}

// Drop forgets what was put under id.
func (r *Recent[V]) Drop(id string) {
	delete(r.last, id)
	delete(r.older, id)
}

// IDs remembers the last request ids. Several goroutines may use it.
type IDs struct {
	mu  sync.Mutex
	ids Recent[struct{}]
}

// Repeated keeps an id and says whether it was there.
func (m *IDs) Repeated(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, there := m.ids.Get(id)
	m.ids.Put(id, struct{}{})
	return there
}

// Forget drops an id.
func (m *IDs) Forget(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ids.Drop(id)
}
