package dispatcher

import "sync"

// inbox is the queue of functions that other goroutines want the scheduler's goroutine to call. A push never waits, because the callers are
// goroutines that serve connections. After close, the inbox refuses functions, because the scheduler would never call them.
type inbox struct {
	mu     sync.Mutex
	queue  []func(*scheduler)
	closed bool
	wake   chan struct{} // wakes the scheduler's goroutine after a push; has room for one value
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// push queues a function for the scheduler's goroutine. It returns false if the inbox is closed, so that the function will never be called.
func (b *inbox) push(f func(*scheduler)) (accepted bool) {
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

// swap returns the queued functions in order, and empties the queue. The queue then uses the memory of spare. If the caller passes the
// slice that the last call returned, two slices take turns, and nothing is allocated.
func (b *inbox) swap(spare []func(*scheduler)) []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.queue
	b.queue = spare[:0]
	return queue
}

// close makes the inbox refuse all further functions, and returns those that are still queued.
func (b *inbox) close() []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	queue := b.queue
	b.queue = nil
	return queue
}

// signal wakes the goroutine that receives from wake, a channel with room for one value. If the channel already holds a value, signal does
// nothing: the goroutine will receive that value and then see all work that is queued by now.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // a value is there already, so the goroutine will wake up
	}
}
