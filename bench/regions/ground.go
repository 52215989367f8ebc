package main

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"sync"
	"time"
)

// The regions. A link is named by its two ends, the lower index first.
const (
	us = iota
	eu
	as
	regions
)

var names = [regions]string{"us", "eu", "as"}

// link numbers the pairs: us-eu, us-as, eu-as.
func link(a, b int) int { return a + b - 1 }

var ends = [3][2]int{{us, eu}, {us, as}, {eu, as}}

// ground is what regions stand on: where their processes run and listen, and
// the links between them.
type ground interface {
	words() string
	place(region int) place
	// command is to run in a region.
	command(region int, binary string, args ...string) *exec.Cmd
	// peer is where one region reaches the listener of another for peers.
	peer(from, to int) string
	// packets says that links carry packets, which can be lost, and that what
	// they delay is told from what this process does.
	packets() bool
	// lose makes every link lose a share of them.
	lose(share float64) error
	// cut lets nothing pass between two regions, until it is healed.
	cut(a, b int, cut bool) error
	close() error
}

// place is where a region's processes listen, host and port each, as its own
// processes and this one reach them.
type place struct{ clients, admin, peers, prefill, decode string }

// loopback has all regions on one address, and a TCP relay for each direction
// in which one asks another.
type loopback struct {
	places [regions]place
	relays [regions][regions]*relay
}

func newLoopback(o options) (_ *loopback, err error) {
	l := &loopback{}
	var held []net.Listener // until all ports are drawn: none twice
	port := func() string {
		ln, e := net.Listen("tcp", "127.0.0.1:0")
		if e != nil {
			err = e
			return ""
		}
		held = append(held, ln)
		return ln.Addr().String()
	}
	for i := range l.places {
		l.places[i] = place{port(), port(), port(), port(), port()}
	}
	for _, ln := range held {
		_ = ln.Close()
	}
	for a := range regions {
		for b := range regions {
			if a != b && err == nil {
				l.relays[a][b], err = newRelay(l.places[b].peers, o.delays[link(a, b)])
			}
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("loopback: %w", err), l.close())
	}
	return l, nil
}

func (l *loopback) words() string          { return "TCP relays on loopback" }
func (l *loopback) place(region int) place { return l.places[region] }
func (l *loopback) command(_ int, binary string, args ...string) *exec.Cmd {
	return exec.Command(binary, args...)
}
func (l *loopback) peer(from, to int) string { return l.relays[from][to].address() }
func (l *loopback) packets() bool            { return false }
func (l *loopback) lose(float64) error       { return errors.New("TCP hides loss from relays on loopback") }

func (l *loopback) cut(a, b int, cut bool) error {
	l.relays[a][b].hold(cut)
	l.relays[b][a].hold(cut)
	return nil
}

func (l *loopback) close() error {
	for _, row := range l.relays {
		for _, r := range row {
			if r != nil {
				r.close()
			}
		}
	}
	return nil
}

// relay passes connections on, each byte so much later than it came.
type relay struct {
	ln    net.Listener
	to    string
	delay time.Duration
	wg    sync.WaitGroup

	mu     sync.Mutex
	open   map[net.Conn]struct{} // nil once closed
	passes chan struct{}         // closed while bytes may pass
}

func newRelay(to string, delay time.Duration) (*relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{ln: ln, to: to, delay: delay, open: map[net.Conn]struct{}{}, passes: make(chan struct{})}
	close(r.passes)
	r.wg.Go(r.accept)
	return r, nil
}

func (r *relay) address() string { return r.ln.Addr().String() }

// hold keeps what comes, or lets it go on.
func (r *relay) hold(hold bool) {
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
func (r *relay) pass() {
	r.mu.Lock()
	gate := r.passes
	r.mu.Unlock()
	<-gate
}

func (r *relay) close() {
	r.hold(false)
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
func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		_ = c.Close()
		return false
	}
	r.open[c] = struct{}{}
	return true
}

func (r *relay) drop(c net.Conn) {
	_ = c.Close()
	r.mu.Lock()
	delete(r.open, c)
	r.mu.Unlock()
}

func (r *relay) accept() {
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

func (r *relay) join(near net.Conn) {
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
func (r *relay) carry(to, from net.Conn) {
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
