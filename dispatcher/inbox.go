package dispatcher

import "sync"

// inbox is the queue of functions that other goroutines want the scheduler's goroutine to call. A push never waits, because its callers are
// the goroutines that serve connections. After close, the inbox refuses functions, because no goroutine would call them.
type inbox struct {
	mu     sync.Mutex
	queue  []func(*scheduler)
	closed bool
	wake   chan struct{} // see signal
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// push queues a function, and reports whether it will be called; false: the inbox is closed.
func (b *inbox) push(f func(*scheduler)) bool {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return false
	}
	b.queue = append(b.queue, f)
	b.mu.Unlock()
	signal(b.wake)
	return true
}

// swap returns the queued functions in order, and uses the memory of spare for the next ones. If the caller passes the slice of the last
// call as spare, two slices take turns, and nothing is allocated.
func (b *inbox) swap(spare []func(*scheduler)) []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.queue
	b.queue = spare[:0]
	return queue
}

// close refuses further functions and returns those still queued.
func (b *inbox) close() []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	queue := b.queue
	b.queue = nil
	return queue
}

// signal wakes the one goroutine that receives from a channel, which has room for one value. While there may be work, the channel holds a
// value.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // the goroutine will wake up in any case
	}
}
