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

// Server is a fasthttp server that reads only the heads of requests. Package edge reads the bodies itself, so that it can bound
// their memory while they arrive.
type Server struct {
	*fasthttp.Server
	options  *Options
	stopping atomic.Bool // Drain was called: the server takes no new requests
}

// Serve serves the connections of a Listener, or of tls.NewListener around one, until the listener is closed.
func (s *Server) Serve(ln net.Listener) error { return s.Server.Serve(headListener{ln, s}) }

// headListener is a listener whose connections are headConns, which show fasthttp only the heads of requests.
type headListener struct {
	net.Listener
	server *Server
}

// Accept returns the next connection as a headConn, or as a tlsHeadConn if it uses TLS, because fasthttp must see that.
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

// headConn is a client connection as fasthttp reads it, after TLS is removed. Its Read stops at the end of a request's head.
type headConn struct {
	net.Conn
	server          *Server
	client          *Conn // the Conn below TLS; nil: the connection did not come through a Listener
	head            headScanner
	unread          []byte               // bytes that were read from the client and that Read has not returned yet
	pooledBuf       *[firstReadSize]byte // the pooled buffer that unread points into; nil: unread has memory of its own
	heldWrites      *[]byte              // bytes from fasthttp that are not sent to the client yet; nil: Write sends at once
	nextWriteIsLast bool                 // the next Write sends the held bytes together with its own, because it ends the answer
	reservation     *Reservation         // memory charged for the current request's body; nil: the request has no body
	bodyAcquired    bool                 // the handler has called AcquireBody, and must release the reservation
	keepAlive       *KeepAlive           // sends comments to the client of the current request; nil: the client gets none
}

// tlsHeadConn is a headConn over TLS. fasthttp recognises TLS by the two methods Handshake and ConnectionState.
type tlsHeadConn struct {
	headConn
	tls *tls.Conn
}

func (h *tlsHeadConn) Handshake() error                     { return h.tls.Handshake() }
func (h *tlsHeadConn) ConnectionState() tls.ConnectionState { return h.tls.ConnectionState() }

// self returns the headConn itself, or the one inside a tlsHeadConn, so that headConnOf finds both.
func (h *headConn) self() *headConn { return h }

// renew returns a new headConn for the same connection, which ServeConn can serve. h must not be used again, because
// fasthttp may still refer to it.
func (h *headConn) renew() *headConn {
	return &headConn{Conn: h.Conn, server: h.server, client: h.client, unread: h.unread}
}

// serve waits for the client's next request, and serves that request and all later ones of the connection.
func (h *headConn) serve() {
	if !h.awaitRequest() {
		_ = h.client.Close() // the client sent no request, so nothing is lost
		return
	}
	_ = h.server.ServeConn(h) // ServeConn closes the connection and logs its own error
}

// awaitRequest waits for the first byte of the next request; false: the connection must be closed. fasthttp must not wait for this byte
// itself. ServeConn takes the request for the first one of a new connection, and would answer 408 to a client that sends none.
func (h *headConn) awaitRequest() bool {
	h.client.waitsForRequest.Store(true)
	defer h.client.waitsForRequest.Store(false)
	switch {
	case h.server.stopping.Load():
		return false
	case len(h.unread) > 0: // the request has begun to arrive, together with the one before it
		return true
	case h.SetReadDeadline(time.Now().Add(h.server.IdleTimeout)) != nil: // the connection is closed
		return false
	}
	return h.readFirst() == nil
}

// firstReadSize is the size of the first read of a request, in bytes: enough for the head and for most bodies.
const firstReadSize = 4 << 10

var firstReadPool = sync.Pool{New: func() any { return new([firstReadSize]byte) }}

// readFirst waits for a request, and puts its first bytes into unread. While it waits, the connection holds no buffer, which saves
// memory for idle connections.
func (h *headConn) readFirst() error {
	if err := h.client.Await(); err != nil {
		return err
	}
	h.pooledBuf = firstReadPool.Get().(*[firstReadSize]byte)
	n, err := h.client.Read(h.pooledBuf[:])
	h.setUnread(h.pooledBuf[:n]) // if nothing was read, this gives the buffer back
	return err
}

// errBeyondHead means that fasthttp reads more of the head although headScanner has found its end. The two disagree about where the body
// begins, so the connection must end.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read returns bytes of a request's head only. Bytes that arrive after the head are stored in unread, and the reader of the body (type
// body) returns them. A Read after the end of the head fails.
func (h *headConn) Read(p []byte) (int, error) {
	if h.head.ended {
		return 0, errBeyondHead
	}
	waitsForRequest := len(p) == 1 && len(h.unread) == 0 // fasthttp reads a single byte while it waits for a request
	isPlain := h.Conn == net.Conn(h.client)              // false: TLS is above the client's socket
	// While readFirst waits for a request, the connection holds no buffer. With TLS, readFirst cannot be used, because it reads from
	// the socket itself.
	if waitsForRequest && isPlain {
		if err := h.readFirst(); err != nil {
			return 0, err
		}
	}
	if len(h.unread) > 0 {
		n := h.head.scan(h.unread[:min(len(h.unread), len(p))])
		copy(p, h.unread[:n])
		h.setUnread(h.unread[n:]) // the rest of the head, or the beginning of the body
		return n, nil
	}
	n, err := h.Conn.Read(p)
	headBytes := h.head.scan(p[:n])
	if headBytes < n { // the rest belongs to the body; without setUnread, because there is no pooled buffer to give back
		h.unread = bytes.Clone(p[headBytes:n]) // a copy, because fasthttp reuses p
	}
	return headBytes, err
}

// setUnread sets unread to b, and gives the pooled buffer back if it is not needed any more. This is so if b is empty, or if the head is
// complete: b then belongs to a body, and is copied out of the buffer. Other connections can use the buffer while the body is read.
func (h *headConn) setUnread(b []byte) {
	h.unread = b
	if len(b) == 0 {
		h.unread = nil // so that unread does not keep the memory of b
	}
	if h.pooledBuf != nil && (len(b) == 0 || h.head.ended) {
		h.unread = bytes.Clone(h.unread)
		firstReadPool.Put(h.pooledBuf)
		h.pooledBuf = nil
	}
}

// SetDeadline sets the deadlines, but returns no error if the connection was closed. fasthttp calls it right before the function of a
// hijack, and would not call that function after an error. The function must run, because it releases what the request holds, and it
// notices the closed connection itself.
func (h *headConn) SetDeadline(t time.Time) error {
	err := h.Conn.SetDeadline(t)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// holdWrites makes Write collect bytes until the write that follows releaseWithNextWrite. fasthttp writes the end of an answer in three
// pieces, which are then sent with one system call. A second call changes nothing.
func (h *headConn) holdWrites() {
	if h.heldWrites == nil {
		h.heldWrites, h.nextWriteIsLast = bufferPool.Get().(*[]byte), false
		*h.heldWrites = (*h.heldWrites)[:0]
	}
}

// releaseWithNextWrite makes the next Write send its bytes together with all that holdWrites has collected.
func (h *headConn) releaseWithNextWrite() { h.nextWriteIsLast = true }

// Write writes to the connection. After holdWrites, it only collects bytes; the write after releaseWithNextWrite sends them all.
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

// sendHeld sends the bytes that holdWrites has collected. Later writes are sent at once again.
func (h *headConn) sendHeld() error {
	buf := h.heldWrites
	h.heldWrites = nil
	_, err := h.Conn.Write(*buf)
	if cap(*buf) <= writePieceSize { // a larger buffer would waste memory in the pool
		bufferPool.Put(buf)
	}
	return err
}

// body reads a request's body: first the bytes that arrived with the head, then the connection.
type body struct{ headConn *headConn }

// Read returns the bytes in unread first. It does not know where the body ends, so it may also return bytes of the next request.
func (b body) Read(p []byte) (int, error) {
	if h := b.headConn; len(h.unread) > 0 {
		n := copy(p, h.unread)
		h.setUnread(h.unread[n:])
		return n, nil
	}
	return b.headConn.Conn.Read(p)
}

// headScanner finds the end of a request's head as fasthttp does: the first empty line after a line that is not empty.
type headScanner struct {
	sawLine   bool // a line that is not empty has been read
	lineBytes int  // bytes of the current line
	endsInCR  bool // the last byte read of the current line is a CR
	bareLF    bool // some line ended in LF without a CR before it
	ended     bool
}

// scan takes the next bytes from the client, and returns how many of them belong to the head. A line may be spread over several calls.
func (h *headScanner) scan(p []byte) (n int) {
	for n < len(p) && !h.ended {
		unread := p[n:]
		lf := bytes.IndexByte(unread, '\n')
		if lf < 0 { // the rest of p is part of a line that has not ended
			h.lineBytes += len(unread)
			h.endsInCR = unread[len(unread)-1] == '\r'
			return len(p)
		}
		n += lf + 1
		if lf > 0 { // otherwise the bytes of this line came with earlier calls, or there are none
			h.lineBytes += lf
			h.endsInCR = unread[lf-1] == '\r'
		}
		h.bareLF = h.bareLF || !h.endsInCR
		switch empty := h.lineBytes == 0 || h.lineBytes == 1 && h.endsInCR; { // nothing but the CR
		case !empty:
			h.sawLine = true
		case h.sawLine: // empty lines before the request line do not end the head
			h.ended = true
		}
		h.lineBytes, h.endsInCR = 0, false
	}
	return n
}
