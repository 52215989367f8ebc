package edge

import (
	"bytes"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// Server is a fasthttp server that reads only heads. The edge reads the bodies, because it can bound and charge their memory as they
// arrive.
type Server struct {
	*fasthttp.Server
	stopping atomic.Bool // Drain was called
}

// Serve serves a Listener, or tls.NewListener of one, until it is closed.
func (s *Server) Serve(ln net.Listener) error { return s.Server.Serve(headConns{ln, s}) }

// headConns is a listener whose connections show fasthttp only the heads of requests.
type headConns struct {
	net.Listener
	server *Server
}

func (l headConns) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	w := headConn{Conn: c, server: l.server}
	if t, ok := c.(*tls.Conn); ok {
		w.client, _ = t.NetConn().(*Conn)
		return &tlsWire{w, t}, nil
	}
	w.client, _ = c.(*Conn)
	return &w, nil
}

// headConn is a connection as fasthttp reads it, above TLS. Its Read stops at the end of a request's head. Bytes that arrived after the
// head wait in rest. They belong to the body, or to the next request.
type headConn struct {
	net.Conn
	server      *Server
	client      *Conn // the connection below; nil: it did not come through a Listener
	head        headEnd
	rest        []byte
	first       *[firstRead]byte // the pooled memory that rest points into; nil: rest has memory of its own
	held        *[]byte          // bytes that fasthttp has written and that are not sent yet; nil: writes are sent at once
	last        bool             // the next write ends the answer: it sends the held bytes and its own
	reservation *Reservation     // memory charged for the body of the current request; nil: the request has no body
	taken       bool             // the handler has acquired the body, and must end its reservation
	alive       *KeepAlive       // comments for the client of the current request; nil: the client gets none
}

// tlsWire has the two methods by which fasthttp recognises TLS.
type tlsWire struct {
	headConn
	tls *tls.Conn
}

func (w *tlsWire) Handshake() error                     { return w.tls.Handshake() }
func (w *tlsWire) ConnectionState() tls.ConnectionState { return w.tls.ConnectionState() }

func (w *headConn) self() *headConn { return w }

// again returns a new wire of the same connection for the next ServeConn. w cannot be used again, because fasthttp may still hold it.
func (w *headConn) again() *headConn {
	return &headConn{Conn: w.Conn, server: w.server, client: w.client, rest: w.rest}
}

// serve waits for the next request, and serves it and the requests behind it.
func (w *headConn) serve() {
	if !w.await() {
		_ = w.client.Close() // it was idle
		return
	}
	_ = w.server.ServeConn(w) // ServeConn closes the connection and logs its own error
}

// await waits for the first byte of the next request; false: close the connection. fasthttp must not wait itself: it would treat the
// request as the first of the connection, and answer 408 to a client that sends none.
func (w *headConn) await() bool {
	w.client.idle.Store(true)
	defer w.client.idle.Store(false)
	switch {
	case w.server.stopping.Load():
		return false
	case len(w.rest) > 0:
		return true
	case w.SetReadDeadline(time.Now().Add(w.server.IdleTimeout)) != nil:
		return false
	}
	return w.hear() == nil
}

// firstRead is the size of the first read of a request, in bytes: enough for the head and for most bodies.
const firstRead = 4 << 10

var firsts = sync.Pool{New: func() any { return new([firstRead]byte) }}

// hear waits for a request, and puts its first bytes into rest. It holds no buffer while it waits.
func (w *headConn) hear() error {
	if err := w.client.Await(); err != nil {
		return err
	}
	w.first = firsts.Get().(*[firstRead]byte)
	n, err := w.client.Read(w.first[:])
	w.keep(w.first[:n])
	return err
}

// errBeyondHead means that fasthttp reads on where headEnd found the end of a head: the two disagree, so the connection must end.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read returns no bytes after the end of a head.
func (w *headConn) Read(p []byte) (int, error) {
	if w.head.ended {
		return 0, errBeyondHead
	}
	if len(p) == 1 && len(w.rest) == 0 && w.Conn == net.Conn(w.client) { // fasthttp reads one byte when it waits for a request
		if err := w.hear(); err != nil {
			return 0, err
		}
	}
	if len(w.rest) > 0 {
		n := w.head.find(w.rest[:min(len(w.rest), len(p))])
		copy(p, w.rest[:n])
		w.keep(w.rest[n:])
		return n, nil
	}
	n, err := w.Conn.Read(p)
	end := w.head.find(p[:n])
	if end < n {
		w.rest = bytes.Clone(p[end:n])
	}
	return end, err
}

// keep sets rest to b. It gives the pooled buffer back if b is empty, or if the head is complete and only body bytes are left.
func (w *headConn) keep(b []byte) {
	if w.rest = b; len(b) == 0 {
		w.rest = nil
	}
	if w.first != nil && (len(b) == 0 || w.head.ended) {
		w.rest = bytes.Clone(w.rest)
		firsts.Put(w.first)
		w.first = nil
	}
}

// SetDeadline hides that the connection was cut. fasthttp calls it right before it calls the function of a hijack, and would not call that
// function after an error. But the function gives back what the request holds, and notices the cut itself.
func (w *headConn) SetDeadline(t time.Time) error {
	err := w.Conn.SetDeadline(t)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// hold makes Write collect bytes until complete. fasthttp writes the end of an answer in three pieces, which are then sent as one.
func (w *headConn) hold() {
	if w.held == nil {
		w.held, w.last = chunks.Get().(*[]byte), false
		*w.held = (*w.held)[:0]
	}
}

// complete makes the next Write the last one to be collected: it sends all collected bytes.
func (w *headConn) complete() { w.last = true }

func (w *headConn) Write(p []byte) (int, error) {
	if w.held == nil {
		return w.Conn.Write(p)
	}
	*w.held = append(*w.held, p...)
	if !w.last {
		return len(p), nil
	}
	return len(p), w.release()
}

// release sends the collected bytes.
func (w *headConn) release() error {
	held := w.held
	w.held = nil
	_, err := w.Conn.Write(*held)
	if cap(*held) <= writePiece {
		chunks.Put(held)
	}
	return err
}

// body reads the bytes after the head.
type body struct{ w *headConn }

func (b body) Read(p []byte) (int, error) {
	if w := b.w; len(w.rest) > 0 {
		n := copy(p, w.rest)
		w.keep(w.rest[n:])
		return n, nil
	}
	return b.w.Conn.Read(p)
}

// headEnd finds the end of a head as fasthttp does: the first empty line after a line that is not empty.
type headEnd struct {
	begun  bool // a line that is not empty has come
	line   int  // bytes of the current line
	cr     bool // the last byte of the line so far is a CR
	bareLF bool // a line ended without a CR
	ended  bool
}

// find takes the next bytes and returns how many of them belong to the head.
func (h *headEnd) find(p []byte) (n int) {
	for n < len(p) && !h.ended {
		rest := p[n:]
		lf := bytes.IndexByte(rest, '\n')
		if lf < 0 {
			h.line += len(rest)
			h.cr = rest[len(rest)-1] == '\r'
			return len(p)
		}
		n += lf + 1
		if lf > 0 {
			h.line += lf
			h.cr = rest[lf-1] == '\r'
		}
		h.bareLF = h.bareLF || !h.cr
		switch empty := h.line == 0 || h.line == 1 && h.cr; {
		case !empty:
			h.begun = true
		case h.begun:
			h.ended = true
		}
		h.line, h.cr = 0, false
	}
	return n
}
