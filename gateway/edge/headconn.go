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

// Server is a fasthttp server that reads only the heads of requests. Package edge reads the bodies
// itself, so that it can bound their memory while they arrive.
type Server struct {
	*fasthttp.Server
	options  *Options
	stopping atomic.Bool // Drain was called: the server takes no new requests
}

// Serve serves a Listener, or tls.NewListener around one, until it is closed.
func (s *Server) Serve(ln net.Listener) error { return s.Server.Serve(headListener{ln, s}) }

type headListener struct {
	net.Listener
	server *Server
}

// fasthttp must see that a connection uses TLS.
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

// headConn is a client connection as fasthttp reads it, after TLS is removed. Its Read stops at the
// end of a request's head.
type headConn struct {
	net.Conn
	server          *Server
	client          *Conn // the Conn below TLS; nil: the connection did not come through a Listener
	head            headScanner
	unread          []byte               // read from the client, not yet returned by Read
	pooledBuf       *[firstReadSize]byte // behind unread; nil: unread has memory of its own
	heldWrites      *[]byte              // not sent to the client yet; nil: Write sends at once
	nextWriteIsLast bool                 // and sends the held bytes, too
	reservation     *Reservation         // for the body; nil: none
	bodyAcquired    bool                 // the handler releases the reservation
	keepAlive       *KeepAlive           // of the current request; nil: no comments
}

// tlsHeadConn is a headConn over TLS, which fasthttp recognises by the two methods.
type tlsHeadConn struct {
	headConn
	tls *tls.Conn
}

func (h *tlsHeadConn) Handshake() error                     { return h.tls.Handshake() }
func (h *tlsHeadConn) ConnectionState() tls.ConnectionState { return h.tls.ConnectionState() }

// self is for headConnOf.
func (h *headConn) self() *headConn { return h }

// renew returns a headConn for ServeConn. h must not be used again, because fasthttp may still
// refer to it.
func (h *headConn) renew() *headConn {
	return &headConn{Conn: h.Conn, server: h.server, client: h.client, unread: h.unread}
}

func (h *headConn) serve() {
	if !h.awaitRequest() {
		_ = h.client.Close() // nothing is lost
		return
	}
	_ = h.server.ServeConn(h) // closes, and logs its own error
}

// awaitRequest waits for the first byte of the next request; false: close the connection. ServeConn
// would answer 408 to a client that sends none, as on a new connection.
func (h *headConn) awaitRequest() bool {
	h.client.waitsForRequest.Store(true)
	defer h.client.waitsForRequest.Store(false)
	switch {
	case h.server.stopping.Load():
		return false
	case len(h.unread) > 0: // it arrived together with the one before
		return true
	case h.SetReadDeadline(time.Now().Add(h.server.IdleTimeout)) != nil:
		return false
	}
	return h.readFirst() == nil
}

// firstReadSize is enough for the head and for most bodies, in bytes.
const firstReadSize = 4 << 10

var firstReadPool = sync.Pool{New: func() any { return new([firstReadSize]byte) }}

// While readFirst waits, the connection holds no buffer, which saves memory for idle connections.
func (h *headConn) readFirst() error {
	if err := h.client.Await(); err != nil {
		return err
	}
	h.pooledBuf = firstReadPool.Get().(*[firstReadSize]byte)
	n, err := h.client.Read(h.pooledBuf[:])
	h.setUnread(h.pooledBuf[:n]) // if nothing was read, this gives the buffer back
	return err
}

// errBeyondHead means that fasthttp and headScanner disagree about where the body begins, so the
// connection must end.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read returns bytes of a request's head only. The rest stays in unread, for type body.
func (h *headConn) Read(p []byte) (int, error) {
	if h.head.ended {
		return 0, errBeyondHead
	}
	// fasthttp reads a single byte while it waits for a request.
	waitsForRequest := len(p) == 1 && len(h.unread) == 0
	isPlain := h.Conn == net.Conn(h.client) // without TLS
	// With TLS, readFirst cannot be used, because it reads from the socket itself.
	if waitsForRequest && isPlain {
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
	headBytes := h.head.scan(p[:n])
	if headBytes < n { // no pooled buffer to give back
		h.unread = bytes.Clone(p[headBytes:n]) // fasthttp reuses p
	}
	return headBytes, err
}

// setUnread gives the pooled buffer back if b is empty, or if the head is complete: b then belongs
// to a body and is copied, so that others can use the buffer meanwhile.
func (h *headConn) setUnread(b []byte) {
	h.unread = b
	if len(b) == 0 {
		h.unread = nil
	}
	if h.pooledBuf != nil && (len(b) == 0 || h.head.ended) {
		h.unread = bytes.Clone(h.unread)
		firstReadPool.Put(h.pooledBuf)
		h.pooledBuf = nil
	}
}

// SetDeadline hides net.ErrClosed. fasthttp calls it right before the function of a hijack, and
// would not call that after an error, although it releases what the request holds.
func (h *headConn) SetDeadline(t time.Time) error {
	err := h.Conn.SetDeadline(t)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// holdWrites makes Write collect bytes. fasthttp writes the end of an answer in three pieces, which
// are then sent with one system call.
func (h *headConn) holdWrites() {
	if h.heldWrites == nil {
		h.heldWrites, h.nextWriteIsLast = bufferPool.Get().(*[]byte), false
		*h.heldWrites = (*h.heldWrites)[:0]
	}
}

func (h *headConn) releaseWithNextWrite() { h.nextWriteIsLast = true }

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

func (h *headConn) sendHeld() error {
	buf := h.heldWrites
	h.heldWrites = nil
	_, err := h.Conn.Write(*buf)
	if cap(*buf) <= writePieceSize { // a larger one would waste memory in the pool
		bufferPool.Put(buf)
	}
	return err
}

type body struct{ headConn *headConn }

// It may also return bytes of the next request.
func (b body) Read(p []byte) (int, error) {
	if h := b.headConn; len(h.unread) > 0 {
		n := copy(p, h.unread)
		h.setUnread(h.unread[n:])
		return n, nil
	}
	return b.headConn.Conn.Read(p)
}

// headScanner finds the end of a head as fasthttp does: the first empty line after one that is not.
type headScanner struct {
	sawLine   bool // a line that is not empty has been read
	lineBytes int  // bytes of the current line
	endsInCR  bool // the last byte read of the current line is a CR
	bareLF    bool // some line ended in LF without a CR before it
	ended     bool
}

// scan returns how many of the next bytes belong to the head.
func (h *headScanner) scan(p []byte) (n int) {
	for n < len(p) && !h.ended {
		unread := p[n:]
		lf := bytes.IndexByte(unread, '\n')
		if lf < 0 {
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
		switch empty := h.lineBytes == 0 || h.lineBytes == 1 && h.endsInCR; { // nothing but the CR
		case !empty:
			h.sawLine = true
		case h.sawLine: // empty lines before the request line do not count
			h.ended = true
		}
		h.lineBytes, h.endsInCR = 0, false
	}
	return n
}
