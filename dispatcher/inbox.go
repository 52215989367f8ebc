package dispatcher

import "sync"

// inbox is the queue of functions for the scheduler's goroutine. A push never waits, because the
// callers serve connections. After close, the inbox refuses functions.
type inbox struct {
	mu     sync.Mutex
	queue  []func(*scheduler)
	closed bool
	wake   chan struct{} // wakes the scheduler's goroutine; has room for one value
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// push returns false if the inbox is closed, so that the function will never be called. An accepted
// function is always called, at the end by shutDown, so its caller may wait for it.
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

// swap returns the queued functions in order. The queue then uses the memory of spare, so that two
// slices take turns and nothing is allocated.
func (b *inbox) swap(spare []func(*scheduler)) []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.queue
	b.queue = spare[:0]
	return queue
}

// close returns the functions that are still queued.
func (b *inbox) close() []func(*scheduler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	queue := b.queue
	b.queue = nil
	return queue
}

// signal wakes the goroutine that receives from wake. A value that is there already is enough.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
