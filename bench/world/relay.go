package world

import (
	"net"
	"sync"
	"time"
)

// Relay is a way from one program to another that can be cut. It passes connections on, each byte so much later than it came.
type Relay struct {
	ln    net.Listener
	to    string
	delay time.Duration
	wg    sync.WaitGroup

	mu     sync.Mutex
	open   map[net.Conn]struct{} // nil once closed
	passes chan struct{}         // closed while bytes may pass
}

// NewRelay opens a way to an address, on which every byte takes so long.
func NewRelay(to string, delay time.Duration) (*Relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &Relay{ln: ln, to: to, delay: delay, open: map[net.Conn]struct{}{}, passes: make(chan struct{})}
	close(r.passes)
	r.wg.Go(r.accept)
	return r, nil
}

// Address is where the way begins.
func (r *Relay) Address() string { return r.ln.Addr().String() }

// Hold keeps what comes, or lets it go on.
func (r *Relay) Hold(hold bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.passes:
		if hold {
			r.passes = make(chan struct{})
		}
	default:
		if !hold {
			close(r.passes)
		}
	}
}

// pass waits until bytes may pass.
func (r *Relay) pass() {
	r.mu.Lock()
	gate := r.passes
	r.mu.Unlock()
	<-gate
}

// Close ends it and all that is on it.
func (r *Relay) Close() {
	r.Hold(false)
	_ = r.ln.Close()
	r.mu.Lock()
	for c := range r.open {
		_ = c.Close()
	}
	r.open = nil
	r.mu.Unlock()
	r.wg.Wait()
}

// keep notes a connection, for close; false: it came too late and was closed.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		_ = c.Close()
		return false
	}
	r.open[c] = struct{}{}
	return true
}

func (r *Relay) drop(c net.Conn) {
	_ = c.Close()
	r.mu.Lock()
	delete(r.open, c)
	r.mu.Unlock()
}

func (r *Relay) accept() {
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return
		}
		if r.keep(c) {
			r.wg.Go(func() { r.join(c) })
		}
	}
}

func (r *Relay) join(near net.Conn) {
	defer r.drop(near)
	r.pass()
	far, err := net.Dial("tcp", r.to)
	if err != nil || !r.keep(far) {
		return
	}
	defer r.drop(far)
	var both sync.WaitGroup
	both.Go(func() { r.carry(far, near) })
	r.carry(near, far)
	both.Wait()
}

// carry copies one direction. Its end closes both: nobody here half-closes.
func (r *Relay) carry(to, from net.Conn) {
	type piece struct {
		due   time.Time
		bytes []byte
	}
	way := make(chan piece, 1024)
	var writer sync.WaitGroup
	writer.Go(func() {
		defer func() { _, _ = to.Close(), from.Close() }()
		for p := range way {
			time.Sleep(time.Until(p.due))
			r.pass()
			if _, err := to.Write(p.bytes); err != nil {
				break
			}
		}
		_ = from.Close() // the reader ends
		for range way {  //nolint:revive // what still comes has nowhere to go
		}
	})
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			way <- piece{time.Now().Add(r.delay), append([]byte(nil), buf[:n]...)}
		}
		if err != nil {
			way <- piece{time.Now().Add(r.delay), nil} // the end takes its time, too
			close(way)
			break
		}
	}
	writer.Wait()
}
