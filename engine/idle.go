package engine

import (
	"sync"
	"time"
)

// idlePool keeps connections between calls. Each host has a stack with the newest connection on
// top, so that old ones expire when there are few calls. A connection that was idle for longer than
// ttl is not used again: uvicorn, the server of many engines, closes idle connections after 5 s.
type idlePool struct {
	ttl time.Duration
	max int // largest number of idle connections per host

	mu sync.Mutex
	// Each stack is sorted by idleSince, the oldest first.
	stacks map[key][]*conn
	timer  *time.Timer // calls closeExpired while any connection is idle; nil: none is
	closed bool
}

// newIdlePool returns an empty pool. Connections are used again for up to ttl, and each host has at
// most size of them.
func newIdlePool(ttl time.Duration, size int) *idlePool {
	return &idlePool{ttl: ttl, max: size, stacks: map[key][]*conn{}}
}

// take returns the newest idle connection to a host that is still open; nil: there is none.
func (p *idlePool) take(host key) *conn {
	for {
		c := p.pop(host)
		if c == nil || c.hasNoInput() {
			return c
		}
		c.close() // the engine has closed it, or has sent bytes that belong to no request
	}
}

// pop takes the newest connection to a host off its stack; nil: there is none, or all have been
// idle for ttl or longer.
func (p *idlePool) pop(host key) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	stack := p.stacks[host]
	if len(stack) == 0 {
		return nil
	}
	c := stack[len(stack)-1]
	if time.Since(c.idleSince) >= p.ttl { // all others are even older, and closeExpired closes them
		return nil
	}
	stack[len(stack)-1] = nil
	p.stacks[host] = stack[:len(stack)-1]
	return c
}

// put stores the connection, or closes it if the pool is full or closed. kept says that it was
// stored.
func (p *idlePool) put(c *conn) (kept bool) {
	c.idleSince, c.reused = time.Now(), true
	p.mu.Lock()
	stack := p.stacks[c.key]
	kept = !p.closed && len(stack) < p.max
	if kept {
		p.stacks[c.key] = append(stack, c)
		if p.timer == nil { // no other connection is idle
			p.timer = time.AfterFunc(p.ttl, p.closeExpired)
		}
	}
	p.mu.Unlock()
	if !kept {
		c.close()
	}
	return kept
}

// count returns how many connections to a host have been idle for less than ttl, so that they may
// be used again.
func (p *idlePool) count(host key) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.stacks[host] {
		if time.Since(c.idleSince) < p.ttl {
			n++
		}
	}
	return n
}

// closeHost closes all idle connections to a host. It is for a host with a stale connection: most
// likely the engine has restarted, so all of them are stale.
func (p *idlePool) closeHost(host key) {
	p.mu.Lock()
	stack := p.stacks[host]
	delete(p.stacks, host)
	p.mu.Unlock()
	closeAll(stack)
}

// closeExpired closes the connections that have been idle for ttl or longer. A timer calls it while
// any connection is idle.
func (p *idlePool) closeExpired() {
	var old []*conn
	p.mu.Lock()
	now := time.Now()
	for host, stack := range p.stacks {
		expired := 0
		for expired < len(stack) && now.Sub(stack[expired].idleSince) >= p.ttl {
			expired++
		}
		old = append(old, stack[:expired]...)
		if expired == len(stack) {
			delete(p.stacks, host)
		} else if expired > 0 {
			// A copy, because the old array would keep the closed connections in memory.
			p.stacks[host] = append([]*conn(nil), stack[expired:]...)
		}
	}
	if len(p.stacks) > 0 && !p.closed {
		p.timer.Reset(p.ttl / 4) // so a connection is closed at most a quarter of ttl after it expired
	} else {
		p.timer = nil
	}
	p.mu.Unlock()
	closeAll(old)
}

// close closes all connections. From then on put closes each connection at once.
func (p *idlePool) close() {
	p.mu.Lock()
	p.closed = true
	var all []*conn
	for _, stack := range p.stacks {
		all = append(all, stack...)
	}
	clear(p.stacks)
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	p.mu.Unlock()
	closeAll(all)
}

// isClosed says whether close was called.
func (p *idlePool) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// closeAll closes connections that were taken off their stacks. The caller does not hold mu, so
// that other calls need not wait.
func closeAll(conns []*conn) {
	for _, c := range conns {
		c.close()
	}
}
