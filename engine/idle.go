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
func (p *idlePool) take(k key) *conn {
	for {
		c := p.pop(k)
		if c == nil || c.quiet() {
			return c
		}
		c.close()
	}
}

func (p *idlePool) pop(k key) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stacks[k]
	if len(s) == 0 {
		return nil
	}
	c := s[len(s)-1]
	if time.Since(c.idleAt) >= p.ttl { // the connections below are older still; sweep closes them
		return nil
	}
	s[len(s)-1] = nil
	p.stacks[k] = s[:len(s)-1]
	return c
}

// put takes the connection over: it keeps or closes it.
func (p *idlePool) put(c *conn) {
	c.idleAt, c.reused = time.Now(), true
	p.mu.Lock()
	s := p.stacks[c.key]
	keep := !p.closed && len(s) < p.max
	if keep {
		p.stacks[c.key] = append(s, c)
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
func (p *idlePool) count(k key) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.stacks[k] {
		if time.Since(c.idleAt) < p.ttl {
			n++
		}
	}
	return n
}

// drop closes a host's idle connections. One of them was found stale, so the engine has most likely restarted, and
// all of them are stale.
func (p *idlePool) drop(k key) {
	p.mu.Lock()
	s := p.stacks[k]
	delete(p.stacks, k)
	p.mu.Unlock()
	closeAll(s)
}

// sweep closes the connections that are too old to be used.
func (p *idlePool) sweep() {
	var old []*conn
	p.mu.Lock()
	now := time.Now()
	for k, s := range p.stacks {
		n := 0
		for n < len(s) && now.Sub(s[n].idleAt) >= p.ttl {
			n++
		}
		old = append(old, s[:n]...)
		if n == len(s) {
			delete(p.stacks, k)
		} else if n > 0 {
			p.stacks[k] = append([]*conn(nil), s[n:]...)
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

func (p *idlePool) close() {
	p.mu.Lock()
	p.closed = true
	var all []*conn
	for _, s := range p.stacks {
		all = append(all, s...)
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
