package edge

import (
	"bytes"
	"crypto/tls"
	"errors"
	"net"

	"github.com/valyala/fasthttp"
)

// Server is a fasthttp server that reads heads only: the edge reads the bodies,
// because it can bound and charge them as they arrive, and fasthttp cannot.
type Server struct{ *fasthttp.Server }

// Serve serves a Listener, or tls.NewListener of one, until it is closed.
func (s *Server) Serve(ln net.Listener) error { return s.Server.Serve(wires{ln}) }

// wires hands out connections that fasthttp gets heads from.
type wires struct{ net.Listener }

func (l wires) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	w := wire{Conn: c}
	if t, ok := c.(*tls.Conn); ok {
		w.client, _ = t.NetConn().(*Conn)
		return &tlsWire{w, t}, nil
	}
	w.client, _ = c.(*Conn)
	return &w, nil
}

// wire is what fasthttp reads a connection through, above TLS. Its Read ends
// with the head of a request. What came behind the head waits in rest, for the
// body's reader or as the beginning of the next request.
type wire struct {
	net.Conn
	client *Conn // the connection below; nil: it did not come through a Listener
	head   headEnd
	rest   []byte
	charge *Charge // of the request being served; nil: it has no body
	taken  bool    // the handler has the body, and gives its charge back
}

// tlsWire lets fasthttp see that a connection is TLS, by these two methods.
type tlsWire struct {
	wire
	tls *tls.Conn
}

func (w *tlsWire) Handshake() error                     { return w.tls.Handshake() }
func (w *tlsWire) ConnectionState() tls.ConnectionState { return w.tls.ConnectionState() }

func (w *wire) self() *wire { return w }

// wireOf returns the connection of a request; nil: our Serve did not accept it.
func wireOf(ctx *fasthttp.RequestCtx) *wire {
	if w, ok := ctx.Conn().(interface{ self() *wire }); ok {
		return w.self()
	}
	return nil
}

// errBeyondHead means that fasthttp and headEnd do not agree where a head ends.
var errBeyondHead = errors.New("edge: the head has ended and more of it is asked for")

// Read reads no further than the end of a head.
func (w *wire) Read(p []byte) (int, error) {
	if w.head.ended {
		return 0, errBeyondHead
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

// keep leaves b for later and lets go of the memory when there is nothing in it.
func (w *wire) keep(b []byte) {
	if len(b) == 0 {
		b = nil
	}
	w.rest = b
}

// body reads what follows the head.
type body struct{ w *wire }

func (b body) Read(p []byte) (int, error) {
	if w := b.w; len(w.rest) > 0 {
		n := copy(p, w.rest)
		w.keep(w.rest[n:])
		return n, nil
	}
	return b.w.Conn.Read(p)
}

// headEnd finds the end of a head, as fasthttp does: the first empty line after
// one that is not.
type headEnd struct {
	begun  bool // a line that is not empty has come
	line   int  // bytes of the current line
	cr     bool // the last of them is a CR
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
