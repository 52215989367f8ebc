// Package wire is an HTTP server over net.Conn. The reference engine has its own,
// because half of its faults are below net/http: a reset inside a chunk, one byte a
// write, headers and silence.
package wire

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Server answers the requests of connections.
type Server struct {
	KeepAlive time.Duration // an idle connection is closed after it
	MaxBody   int64         // bytes
	// Handle answers a request. It reports whether the connection can carry another one.
	Handle func(x *Exchange) bool
	// TooLarge answers a request whose body is larger than MaxBody.
	TooLarge func(x *Exchange)
}

// Exchange is one request on a connection, and its answer.
type Exchange struct {
	Req   *http.Request
	Body  []byte
	Port  int             // index of the listener
	Ctx   context.Context //nolint:containedctx // it ends when the client leaves or the engine stops
	Close bool            // the connection ends with this answer

	// How a stream's events reach the wire.
	CRLF  bool // lines end in \r\n
	Split bool // one byte a chunk and a write

	conn       net.Conn
	out, event []byte // scratch of what is written
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4096) }}

// Serve answers the requests of one connection, one after the other, and closes it.
func (s *Server) Serve(ctx context.Context, conn net.Conn, port int) {
	br := readers.Get().(*bufio.Reader)
	br.Reset(conn)
	defer func() {
		_ = conn.Close()
		br.Reset(nil)
		readers.Put(br)
	}()
	var out, event []byte
	for {
		_ = conn.SetReadDeadline(time.Now().Add(s.KeepAlive))
		if _, err := br.Peek(1); err != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Time{})
		req, err := http.ReadRequest(br)
		if err != nil {
			_, _ = io.WriteString(conn,
				"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\nconnection: close\r\n\r\n"+
					"Invalid HTTP request received.")
			return
		}
		x := &Exchange{conn: conn, Req: req, Port: port, Close: req.Close || !req.ProtoAtLeast(1, 1), out: out[:0], event: event[:0]}
		if err := x.readBody(s.MaxBody); err != nil {
			var tooLarge *http.MaxBytesError
			if errors.As(err, &tooLarge) {
				x.Close = true
				s.TooLarge(x)
				_ = conn.SetReadDeadline(time.Now().Add(time.Second)) // a close with bytes unread would reset the answer away
				_, _ = io.CopyN(io.Discard, req.Body, 8*s.MaxBody)
			}
			return
		}
		if !x.watched(ctx, br, s.Handle) || x.Close {
			return
		}
		out, event = x.out, x.event
	}
}

// readBody reads all of it before anything is answered.
func (x *Exchange) readBody(limit int64) error {
	if strings.EqualFold(x.Req.Header.Get("Expect"), "100-continue") {
		if _, err := io.WriteString(x.conn, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return err
		}
	}
	n := x.Req.ContentLength
	if n > limit {
		return &http.MaxBytesError{Limit: limit}
	}
	var err error
	if n >= 0 {
		x.Body = make([]byte, n)
		_, err = io.ReadFull(x.Req.Body, x.Body)
		return err
	}
	x.Body, err = io.ReadAll(http.MaxBytesReader(nil, x.Req.Body, limit))
	return err
}

// watched runs the handler while another goroutine waits for the client to
// leave: a read that ends before the answer does. It reports whether the
// connection can carry another request.
func (x *Exchange) watched(ctx context.Context, br *bufio.Reader, handle func(*Exchange) bool) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x.Ctx = ctx
	var answered atomic.Bool
	watcher := make(chan struct{})
	go func() {
		defer close(watcher)
		if _, err := br.Peek(1); err != nil && !answered.Load() {
			cancel()
		}
	}()
	ok := handle(x)
	answered.Store(true)
	_ = x.conn.SetReadDeadline(time.Unix(1, 0)) // wakes the watcher
	<-watcher
	return ok && ctx.Err() == nil
}

// Reset ends the connection with a RST. It returns false, as handlers do that
// leave the connection unusable.
func (x *Exchange) Reset() bool {
	Reset(x.conn)
	return false
}

// Reset ends a connection with a RST.
func Reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// Hang waits until the client leaves.
func (x *Exchange) Hang() bool {
	<-x.Ctx.Done()
	return false
}

// Pause waits; false: the client left meanwhile.
func (x *Exchange) Pause(d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-x.Ctx.Done():
	}
	return x.Ctx.Err() == nil
}

func (x *Exchange) head(status int, contentType string) {
	x.out = fmt.Appendf(x.out[:0], "HTTP/1.1 %d %s\r\nserver: uvicorn\r\n", status, http.StatusText(status))
	if contentType != "" {
		x.out = fmt.Appendf(x.out, "content-type: %s\r\n", contentType)
	}
	if x.Close {
		x.out = append(x.out, "connection: close\r\n"...)
	}
}

func (x *Exchange) flush() bool {
	_, err := x.conn.Write(x.out)
	return err == nil
}

// Answer writes a whole response, with pairs of further header fields.
func (x *Exchange) Answer(status int, contentType string, body []byte, extra ...string) bool {
	x.head(status, contentType)
	for i := 0; i+1 < len(extra); i += 2 {
		x.out = fmt.Appendf(x.out, "%s: %s\r\n", extra[i], extra[i+1])
	}
	x.out = fmt.Appendf(x.out, "content-length: %d\r\n\r\n", len(body))
	if x.Req.Method != http.MethodHead {
		x.out = append(x.out, body...)
	}
	return x.flush()
}

// Promise sends the head of a long answer, and the beginning of a body whose rest
// does not come.
func (x *Exchange) Promise(contentType, body string) {
	x.head(http.StatusOK, contentType)
	x.out = append(append(x.out, "content-length: 4096\r\n\r\n"...), body...)
	_ = x.flush()
}

// Stream sends the head of a stream.
func (x *Exchange) Stream(contentType string) bool {
	x.head(http.StatusOK, contentType)
	x.out = append(x.out, "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"...)
	return x.flush()
}

// Event writes what build appends to a stream, as one chunk at once.
func (x *Exchange) Event(build func(dst []byte) []byte) bool {
	x.chunk(build)
	if !x.Split {
		return x.flush()
	}
	for _, b := range x.event {
		if _, err := x.conn.Write([]byte{'1', '\r', '\n', b, '\r', '\n'}); err != nil {
			return false
		}
	}
	return true
}

// HalfEvent announces a chunk and sends half of it.
func (x *Exchange) HalfEvent(build func(dst []byte) []byte) {
	x.chunk(build)
	_, _ = x.conn.Write(x.out[:len(x.out)/2])
}

// chunk puts an event and its chunk into the scratch.
func (x *Exchange) chunk(build func(dst []byte) []byte) {
	x.event = build(x.event[:0])
	if x.CRLF {
		x.event = bytes.ReplaceAll(x.event, []byte("\n"), []byte("\r\n"))
	}
	x.out = strconv.AppendInt(x.out[:0], int64(len(x.event)), 16)
	x.out = append(append(append(x.out, "\r\n"...), x.event...), "\r\n"...)
}

// EndStream writes the last chunk.
func (x *Exchange) EndStream() bool {
	x.out = append(x.out[:0], "0\r\n\r\n"...)
	return x.flush()
}
