package engine

import (
	"sync"
	"time"
)

// idlePool keeps connections between calls, by host, the newest on top: after a quiet hour few of them are left, and
// these are the freshest. uvicorn closes idle connections after 5 s, so take returns none that was idle for longer
// than ttl.
type idlePool struct {
	ttl time.Duration
	max int // connections for each host

	mu     sync.Mutex
	stacks map[key][]*conn // idleAt ascends
	timer  *time.Timer     // runs while any connection is idle
	closed bool
}

func newIdlePool(ttl time.Duration, size int) *idlePool {
	return &idlePool{ttl: ttl, max: size, stacks: map[key][]*conn{}}
}

// take returns the newest live connection, or nil.
func (p *idlePool) take(host key) *conn {
	for {
		c := p.pop(host)
		if c == nil || c.quiet() {
			return c
		}
		c.close()
	}
}

// pop takes the newest connection to a host off its stack; nil: there is none that is young enough.
func (p *idlePool) pop(host key) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	stack := p.stacks[host]
	if len(stack) == 0 {
		return nil
	}
	c := stack[len(stack)-1]
	if time.Since(c.idleAt) >= p.ttl { // the connections below are older still; sweep closes them
		return nil
	}
	stack[len(stack)-1] = nil
	p.stacks[host] = stack[:len(stack)-1]
	return c
}

// put takes the connection over: it keeps or closes it.
func (p *idlePool) put(c *conn) {
	c.idleAt, c.reused = time.Now(), true
	p.mu.Lock()
	stack := p.stacks[c.key]
	keep := !p.closed && len(stack) < p.max
	if keep {
		p.stacks[c.key] = append(stack, c)
		if p.timer == nil {
			p.timer = time.AfterFunc(p.ttl, p.sweep)
		}
	}
	p.mu.Unlock()
	if !keep {
		c.close()
	}
}

// count is how many connections of a host may still be used.
func (p *idlePool) count(host key) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.stacks[host] {
		if time.Since(c.idleAt) < p.ttl {
			n++
		}
	}
	return n
}

// drop closes a host's idle connections. One of them was found stale, so the engine has most likely restarted, and
// all of them are stale.
func (p *idlePool) drop(host key) {
	p.mu.Lock()
	stack := p.stacks[host]
	delete(p.stacks, host)
	p.mu.Unlock()
	closeAll(stack)
}

// sweep closes the connections that are too old to be used.
func (p *idlePool) sweep() {
	var old []*conn
	p.mu.Lock()
	now := time.Now()
	for host, stack := range p.stacks {
		expired := 0
		for expired < len(stack) && now.Sub(stack[expired].idleAt) >= p.ttl {
			expired++
		}
		old = append(old, stack[:expired]...)
		if expired == len(stack) {
			delete(p.stacks, host)
		} else if expired > 0 {
			p.stacks[host] = append([]*conn(nil), stack[expired:]...)
		}
	}
	if len(p.stacks) > 0 && !p.closed {
		p.timer.Reset(p.ttl / 4)
	} else {
		p.timer = nil
	}
	p.mu.Unlock()
	closeAll(old)
}

// close closes all connections, and has put close every later one.
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

func (p *idlePool) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

func closeAll(conns []*conn) {
	for _, c := range conns {
		c.close()
	}
}
