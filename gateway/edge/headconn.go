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
func (s *Server) Serve(ln net.Listener) error { return s.Server.Serve(headListener{ln, s}) }

// headListener is a listener whose connections, headConns, show fasthttp only the heads of requests.
type headListener struct {
	net.Listener
	server *Server
}

// Accept returns the next connection as a headConn. With TLS it is a tlsHeadConn, by which fasthttp sees that the connection uses TLS.
func (l headListener) Accept() (net.Conn, error) {
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
	server          *Server
	client          *Conn // the connection below; nil: it did not come through a Listener
	head            headScanner
	unread          []byte               // bytes that have arrived after the head: they belong to the body, or to the next request
	pooledBuf       *[firstReadSize]byte // the pooled memory that unread points into; nil: unread has memory of its own
	heldWrites      *[]byte              // bytes that fasthttp has written and that are not sent yet; nil: writes are sent at once
	nextWriteIsLast bool                 // the next write ends the answer: it sends the held bytes and its own
	reservation     *Reservation         // memory charged for the body of the current request; nil: the request has no body
	bodyAcquired    bool                 // the handler has acquired the body, and must end its reservation
	keepAlive       *KeepAlive           // comments for the client of the current request; nil: the client gets none
}

// tlsHeadConn has the two methods by which fasthttp recognises TLS.
type tlsHeadConn struct {
	headConn
	tls *tls.Conn
}

func (h *tlsHeadConn) Handshake() error                     { return h.tls.Handshake() }
func (h *tlsHeadConn) ConnectionState() tls.ConnectionState { return h.tls.ConnectionState() }

// self returns h, also for a tlsHeadConn, which embeds it.
func (h *headConn) self() *headConn { return h }

// renew returns a new headConn of the same connection, for ServeConn. h cannot be used again, because fasthttp may still hold it.
func (h *headConn) renew() *headConn {
	return &headConn{Conn: h.Conn, server: h.server, client: h.client, unread: h.unread}
}

// serve waits for the next request, and serves it and the requests behind it.
func (h *headConn) serve() {
	if !h.awaitRequest() {
		_ = h.client.Close() // it was idle
		return
	}
	_ = h.server.ServeConn(h) // ServeConn closes the connection and logs its own error
}

// awaitRequest waits for the first byte of the next request; false: the connection must be closed. fasthttp must not wait itself: for
// ServeConn this request is the first of the connection, and ServeConn would answer 408 to a client that sends none.
func (h *headConn) awaitRequest() bool {
	h.client.waitsForRequest.Store(true)
	defer h.client.waitsForRequest.Store(false)
	switch {
	case h.server.stopping.Load():
		return false
	case len(h.unread) > 0:
		return true
	case h.SetReadDeadline(time.Now().Add(h.server.IdleTimeout)) != nil:
		return false
	}
	return h.readFirst() == nil
}

// firstReadSize is the size of the first read of a request, in bytes: enough for the head and for most bodies.
const firstReadSize = 4 << 10

var firstReadPool = sync.Pool{New: func() any { return new([firstReadSize]byte) }}

// readFirst waits for a request, and puts its first bytes into unread. It holds no buffer while it waits.
func (h *headConn) readFirst() error {
	if err := h.client.Await(); err != nil {
		return err
	}
	h.pooledBuf = firstReadPool.Get().(*[firstReadSize]byte)
	n, err := h.client.Read(h.pooledBuf[:])
	h.setUnread(h.pooledBuf[:n])
	return err
}

// errBeyondHead means that fasthttp reads on where headScanner found the end of a head. The two disagree, so the connection must end.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read returns no bytes after the end of a head.
func (h *headConn) Read(p []byte) (int, error) {
	if h.head.ended {
		return 0, errBeyondHead
	}
	waitsForRequest := len(p) == 1 && len(h.unread) == 0 // fasthttp reads one byte while it waits
	// readFirst reads the socket, whose bytes are not the request's if TLS is above it.
	if waitsForRequest && h.Conn == net.Conn(h.client) {
		if err := h.readFirst(); err != nil {
			return 0, err
		}
	}
	if len(h.unread) > 0 {
		n := h.head.scan(h.unread[:min(len(h.unread), len(p))])
		copy(p, h.unread[:n])
		h.setUnread(h.unread[n:])
		return n, nil
	}
	n, err := h.Conn.Read(p)
	end := h.head.scan(p[:n])
	if end < n { // p belongs to fasthttp, so the bytes of the body are copied
		h.unread = bytes.Clone(p[end:n])
	}
	return end, err
}

// setUnread sets unread to b. It gives the pooled buffer back if b is empty, or if the head is complete and only body bytes are left, which
// are copied first. The buffer is then free for other connections while the body is read.
func (h *headConn) setUnread(b []byte) {
	if h.unread = b; len(b) == 0 {
		h.unread = nil
	}
	if h.pooledBuf != nil && (len(b) == 0 || h.head.ended) {
		h.unread = bytes.Clone(h.unread)
		firstReadPool.Put(h.pooledBuf)
		h.pooledBuf = nil
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

// holdWrites makes Write collect bytes until releaseWithNextWrite. fasthttp writes the end of an answer in three pieces, which are then
// sent as one.
func (h *headConn) holdWrites() {
	if h.heldWrites == nil {
		h.heldWrites, h.nextWriteIsLast = bufferPool.Get().(*[]byte), false
		*h.heldWrites = (*h.heldWrites)[:0]
	}
}

// releaseWithNextWrite makes the next Write the last one that is collected: it sends its own bytes together with all collected ones.
func (h *headConn) releaseWithNextWrite() { h.nextWriteIsLast = true }

// Write writes to the connection. After holdWrites, it only collects the bytes, until releaseWithNextWrite makes a write send them all.
func (h *headConn) Write(p []byte) (int, error) {
	if h.heldWrites == nil {
		return h.Conn.Write(p)
	}
	*h.heldWrites = append(*h.heldWrites, p...)
	if !h.nextWriteIsLast {
		return len(p), nil
	}
	return len(p), h.sendHeld()
}

// sendHeld sends the collected bytes.
func (h *headConn) sendHeld() error {
	buf := h.heldWrites
	h.heldWrites = nil
	_, err := h.Conn.Write(*buf)
	if cap(*buf) <= writePieceSize {
		bufferPool.Put(buf)
	}
	return err
}

// body reads the bytes after the head.
type body struct{ headConn *headConn }

func (b body) Read(p []byte) (int, error) {
	if h := b.headConn; len(h.unread) > 0 {
		n := copy(p, h.unread)
		h.setUnread(h.unread[n:])
		return n, nil
	}
	return b.headConn.Conn.Read(p)
}

// headScanner finds the end of a head as fasthttp does: the first empty line after a line that is not empty.
type headScanner struct {
	sawLine   bool // a line that is not empty has come
	lineBytes int  // bytes of the current line
	endsInCR  bool // the last byte of the line so far is a CR
	bareLF    bool // a line ended without a CR
	ended     bool
}

// scan takes the next bytes and returns how many of them belong to the head.
func (h *headScanner) scan(p []byte) (n int) {
	for n < len(p) && !h.ended {
		unread := p[n:]
		lf := bytes.IndexByte(unread, '\n')
		if lf < 0 { // the line has not ended
			h.lineBytes += len(unread)
			h.endsInCR = unread[len(unread)-1] == '\r'
			return len(p)
		}
		n += lf + 1
		if lf > 0 {
			h.lineBytes += lf
			h.endsInCR = unread[lf-1] == '\r'
		}
		h.bareLF = h.bareLF || !h.endsInCR
		switch empty := h.lineBytes == 0 || h.lineBytes == 1 && h.endsInCR; {
		case !empty:
			h.sawLine = true
		case h.sawLine:
			h.ended = true
		}
		h.lineBytes, h.endsInCR = 0, false
	}
	return n
}
