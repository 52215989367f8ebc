package dispatcher

import "sync"

// inbox is the queue of commands for the goroutine that owns the boards.
// A push never waits, because its callers are the goroutines that serve connections. After
// close, every push is refused, so that no command stays in a queue that is no longer
// read.
type inbox struct {
	mu     sync.Mutex
	queue  []command
	closed bool
	wake   bell
}

func newInbox() *inbox { return &inbox{wake: newBell()} }

// push reports whether the owner will run c.
func (b *inbox) push(c command) bool {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return false
	}
	b.queue = append(b.queue, c)
	b.mu.Unlock()
	b.wake.ring()
	return true
}

// swap returns the queued commands in order, and uses the memory of spare for the next
// ones. So two slices take turns and nothing is allocated.
func (b *inbox) swap(spare []command) []command {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.queue
	b.queue = spare[:0]
	return queue
}

// close refuses further commands and returns those still queued.
func (b *inbox) close() []command {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	queue := b.queue
	b.queue = nil
	return queue
}

// bell wakes the one goroutine that receives from it. It holds one token while there may be work.
type bell chan struct{}

func newBell() bell { return make(bell, 1) }

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default: // a token is there already
	}
}
