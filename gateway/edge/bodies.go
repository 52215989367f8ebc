package edge

import (
	"net/netip"
	"sync"
)

// Bodies bounds the bytes of all request bodies that are in memory, of those
// that are being read and of those that a handler keeps. A body is charged as
// it arrives, to the caller that sends it.
//
// One caller may hold as much as is free beside it: half of the limit if it is
// alone, a third if there are two. So there is always room for one caller more.
type Bodies struct {
	limit int64

	mu      sync.Mutex
	held    int64
	callers map[caller]int64
}

// caller is charged for a body. It is a name, or an address if there is no name.
type caller struct {
	name string
	addr netip.Addr
}

// NewBodies returns an empty account of so many bytes; 0: no limit.
func NewBodies(limit int64) *Bodies { return &Bodies{limit: limit, callers: map[caller]int64{}} }

// Held is how many bytes are taken now.
func (b *Bodies) Held() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held
}

// Charge is what one body takes of an account, until Give.
type Charge struct {
	bodies *Bodies
	who    caller
	n      int64 // under the account's lock
}

// For is an empty charge to the caller of another one, on this account.
func (b *Bodies) For(other *Charge) *Charge {
	c := &Charge{bodies: b}
	if other != nil {
		c.who = other.who
	}
	return c
}

// fits says whether n bytes more would be granted now.
func (c *Charge) fits(n int) bool {
	c.bodies.mu.Lock()
	defer c.bodies.mu.Unlock()
	return c.allowed(int64(n))
}

// Take takes n bytes more, if it may.
func (c *Charge) Take(n int) bool {
	b := c.bodies
	b.mu.Lock()
	defer b.mu.Unlock()
	if !c.allowed(int64(n)) {
		return false
	}
	c.n += int64(n)
	b.held += int64(n)
	b.callers[c.who] += int64(n)
	return true
}

// allowed is the rule. A body up to 4 KiB is always allowed, because it is no larger
// than a connection's own buffers. A caller's only body may take all that is free,
// because otherwise a body as large as the limit could never be read.
func (c *Charge) allowed(n int64) bool {
	b := c.bodies
	mine, free := b.callers[c.who]+n, b.limit-b.held-n
	return b.limit <= 0 || c.n+n <= smallBody || free >= 0 && (mine <= free || mine == c.n+n)
}

// Give gives everything back. It may be called more than once.
func (c *Charge) Give() {
	if c == nil {
		return
	}
	b := c.bodies
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= c.n
	if b.callers[c.who] -= c.n; b.callers[c.who] == 0 {
		delete(b.callers, c.who)
	}
	c.n = 0
}
