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

// Server is a fasthttp server that reads only heads. Package edge reads the bodies itself, to bound their memory as they arrive.
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
	h := headConn{Conn: c, server: l.server}
	if t, ok := c.(*tls.Conn); ok {
		h.client, _ = t.NetConn().(*Conn)
		return &tlsHeadConn{h, t}, nil
	}
	h.client, _ = c.(*Conn)
	return &h, nil
}

// headConn is a connection as fasthttp reads it, above TLS. Its Read stops at the end of a request's head.
type headConn struct {
	net.Conn
	server      *Server
	client      *Conn // the connection below; nil: it did not come through a Listener
	head        headEnd
	rest        []byte           // bytes that have arrived after the head: they belong to the body, or to the next request
	first       *[firstRead]byte // the pooled memory that rest points into; nil: rest has memory of its own
	held        *[]byte          // bytes that fasthttp has written and that are not sent yet; nil: writes are sent at once
	last        bool             // the next write ends the answer: it sends the held bytes and its own
	reservation *Reservation     // memory charged for the body of the current request; nil: the request has no body
	taken       bool             // the handler has acquired the body, and must end its reservation
	alive       *KeepAlive       // comments for the client of the current request; nil: the client gets none
}

// tlsHeadConn has the two methods by which fasthttp recognises TLS.
type tlsHeadConn struct {
	headConn
	tls *tls.Conn
}

func (h *tlsHeadConn) Handshake() error                     { return h.tls.Handshake() }
func (h *tlsHeadConn) ConnectionState() tls.ConnectionState { return h.tls.ConnectionState() }

func (h *headConn) self() *headConn { return h }

// again returns a new headConn of the same connection, for ServeConn. h cannot be used again, because fasthttp may still hold it.
func (h *headConn) again() *headConn {
	return &headConn{Conn: h.Conn, server: h.server, client: h.client, rest: h.rest}
}

// serve waits for the next request, and serves it and the requests behind it.
func (h *headConn) serve() {
	if !h.await() {
		_ = h.client.Close() // it was idle
		return
	}
	_ = h.server.ServeConn(h) // ServeConn closes the connection and logs its own error
}

// await waits for the first byte of the next request; false: the connection must be closed. fasthttp must not wait itself: for ServeConn
// this request is the first of the connection, and ServeConn would answer 408 to a client that sends none.
func (h *headConn) await() bool {
	h.client.idle.Store(true)
	defer h.client.idle.Store(false)
	switch {
	case h.server.stopping.Load():
		return false
	case len(h.rest) > 0:
		return true
	case h.SetReadDeadline(time.Now().Add(h.server.IdleTimeout)) != nil:
		return false
	}
	return h.hear() == nil
}

// firstRead is the size of the first read of a request, in bytes: enough for the head and for most bodies.
const firstRead = 4 << 10

var firsts = sync.Pool{New: func() any { return new([firstRead]byte) }}

// hear waits for a request, and puts its first bytes into rest. It holds no buffer while it waits.
func (h *headConn) hear() error {
	if err := h.client.Await(); err != nil {
		return err
	}
	h.first = firsts.Get().(*[firstRead]byte)
	n, err := h.client.Read(h.first[:])
	h.keep(h.first[:n])
	return err
}

// errBeyondHead means that fasthttp reads on where headEnd found the end of a head. The two disagree, so the connection must end.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read returns no bytes after the end of a head.
func (h *headConn) Read(p []byte) (int, error) {
	if h.head.ended {
		return 0, errBeyondHead
	}
	waitsForRequest := len(p) == 1 && len(h.rest) == 0   // fasthttp reads one byte while it waits
	if waitsForRequest && h.Conn == net.Conn(h.client) { // hear reads the socket, whose bytes are not the request's if TLS is above it
		if err := h.hear(); err != nil {
			return 0, err
		}
	}
	if len(h.rest) > 0 {
		n := h.head.find(h.rest[:min(len(h.rest), len(p))])
		copy(p, h.rest[:n])
		h.keep(h.rest[n:])
		return n, nil
	}
	n, err := h.Conn.Read(p)
	end := h.head.find(p[:n])
	if end < n {
		h.rest = bytes.Clone(p[end:n])
	}
	return end, err
}

// keep sets rest to b. It gives the pooled buffer back if b is empty, or if the head is complete and only body bytes are left.
func (h *headConn) keep(b []byte) {
	if h.rest = b; len(b) == 0 {
		h.rest = nil
	}
	if h.first != nil && (len(b) == 0 || h.head.ended) {
		h.rest = bytes.Clone(h.rest)
		firsts.Put(h.first)
		h.first = nil
	}
}

// SetDeadline hides that the connection was cut. fasthttp calls it right before it calls the function of a hijack, and after an error it
// would not call this function, which gives back what the request holds. The function notices the cut itself.
func (h *headConn) SetDeadline(t time.Time) error {
	err := h.Conn.SetDeadline(t)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// hold makes Write collect bytes until complete. fasthttp writes the end of an answer in three pieces, which are then sent as one.
func (h *headConn) hold() {
	if h.held == nil {
		h.held, h.last = chunks.Get().(*[]byte), false
		*h.held = (*h.held)[:0]
	}
}

// complete makes the next Write the last one to be collected: it sends all collected bytes.
func (h *headConn) complete() { h.last = true }

func (h *headConn) Write(p []byte) (int, error) {
	if h.held == nil {
		return h.Conn.Write(p)
	}
	*h.held = append(*h.held, p...)
	if !h.last {
		return len(p), nil
	}
	return len(p), h.release()
}

// release sends the collected bytes.
func (h *headConn) release() error {
	held := h.held
	h.held = nil
	_, err := h.Conn.Write(*held)
	if cap(*held) <= writePiece {
		chunks.Put(held)
	}
	return err
}

// body reads the bytes after the head.
type body struct{ headConn *headConn }

func (b body) Read(p []byte) (int, error) {
	if h := b.headConn; len(h.rest) > 0 {
		n := copy(p, h.rest)
		h.keep(h.rest[n:])
		return n, nil
	}
	return b.headConn.Conn.Read(p)
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
		unread := p[n:]
		lf := bytes.IndexByte(unread, '\n')
		if lf < 0 { // the line has not ended
			h.line += len(unread)
			h.cr = unread[len(unread)-1] == '\r'
			return len(p)
		}
		n += lf + 1
		if lf > 0 {
			h.line += lf
			h.cr = unread[lf-1] == '\r'
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
