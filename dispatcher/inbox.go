package dispatcher

import "sync"

// inbox is the queue of commands to the one goroutine that owns the boards.
// A push never waits: callers are the goroutines that serve connections. After
// close every push is refused, so no command is ever left unanswered in a
// queue nobody reads.
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

// swap returns everything queued so far, in order, and keeps spare for what
// comes next: two slices go back and forth.
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

// bell wakes the one goroutine that listens to it. It holds one token while there may be work.
type bell chan struct{}

func newBell() bell { return make(bell, 1) }

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default: // it is told already
	}
}
