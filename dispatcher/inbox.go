package dispatcher

import "sync"

// inbox is the queue of commands for the goroutine that owns the boards. A push never waits, because its callers are the goroutines that
// serve connections. After close, the inbox refuses commands, because no goroutine would run them.
type inbox struct {
	mu     sync.Mutex
	queue  []command
	closed bool
	wake   bell
}

func newInbox() *inbox { return &inbox{wake: newBell()} }

// push queues a command, and reports whether it will be run; false: the inbox is closed.
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

// swap returns the queued commands in order, and uses the memory of spare for the next commands. If the caller passes the slice of the last
// call as spare, two slices take turns, and nothing is allocated.
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

// bell wakes the one goroutine that receives from it. While there may be work, the channel holds one value.
type bell chan struct{}

func newBell() bell { return make(bell, 1) }

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default: // the goroutine will wake up in any case
	}
}
