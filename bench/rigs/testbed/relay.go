package testbed

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Relay is a way from one program to another that can be cut. It passes connections on, each byte
// so much later than it came.
type Relay struct {
	ln    net.Listener
	to    string
	delay time.Duration
	wg    sync.WaitGroup

	mu     sync.Mutex
	open   map[net.Conn]struct{} // nil once closed
	passes chan struct{}         // closed while bytes may pass

	withholds chan struct{} // not nil while answers are kept back, and closed then
	withheld  []net.Conn    // of clients whose answers are kept back
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

// Withhold keeps back what is answered to POSTs from now on; the answers are read to
// their end all the same. In the end the connections on which they would have come
// are cut.
func (r *Relay) Withhold(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if on == (r.withholds != nil) {
		return
	}
	if on {
		r.withholds = make(chan struct{})
		return
	}
	for _, c := range r.withheld {
		_ = c.Close()
	}
	close(r.withholds)
	r.withholds, r.withheld = nil, nil
}

// Withheld is how many answers are kept back.
func (r *Relay) Withheld() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.withheld)
}

// withhold keeps a client's answer back if answers are; done is closed in the end.
func (r *Relay) withhold(client net.Conn) (done chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.withholds != nil {
		r.withheld = append(r.withheld, client)
	}
	return r.withholds
}

// Close ends it and all that is on it.
func (r *Relay) Close() {
	r.Hold(false)
	r.Withhold(false)
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
	var posted atomic.Bool
	var both sync.WaitGroup
	both.Go(func() {
		r.carry(far, near, func(piece []byte) (wait chan struct{}) {
			if bytes.HasPrefix(piece, []byte("POST")) {
				posted.Store(true)
			}
			return nil
		})
	})
	r.carry(near, far, func([]byte) (wait chan struct{}) {
		if posted.Load() {
			return r.withhold(near)
		}
		return nil
	})
	both.Wait()
}

// carry copies one direction. Its end closes both: nobody here half-closes. look sees
// each piece; if what it returns is not nil, nothing is copied any more, and the end
// comes once that is closed.
func (r *Relay) carry(to, from net.Conn, look func(piece []byte) (wait chan struct{})) {
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
			if wait := look(buf[:n]); wait != nil {
				_, _ = io.Copy(io.Discard, from)
				<-wait
				err = net.ErrClosed
			} else {
				way <- piece{time.Now().Add(r.delay), append([]byte(nil), buf[:n]...)}
			}
		}
		if err != nil {
			way <- piece{time.Now().Add(r.delay), nil} // the end takes its time, too
			close(way)
			break
		}
	}
	writer.Wait()
}
