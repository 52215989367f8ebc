package refengine

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const typeJSON = "application/json"

// exchange is one request on a connection. The engine has its own HTTP server
// over net.Conn, because half of the faults are below net/http: a reset inside
// a chunk, one byte a write, headers and silence.
type exchange struct {
	life *life
	conn net.Conn
	req  *http.Request
	port int // index of the listener
	body []byte

	// ctx ends when the client leaves or the engine stops.
	ctx   context.Context
	close bool // the connection ends with this answer

	out   []byte // scratch of what is written
	chunk chunkStyle
}

// chunkStyle is how a stream's events reach the wire.
type chunkStyle struct{ crlf, split bool }

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4096) }}

// serve answers the requests of one connection, one after the other.
func (l *life) serve(conn net.Conn, port int) {
	br := readers.Get().(*bufio.Reader)
	br.Reset(conn)
	defer func() {
		_ = conn.Close()
		br.Reset(nil)
		readers.Put(br)
	}()
	var out []byte
	for {
		_ = conn.SetReadDeadline(time.Now().Add(l.engine.cfg.KeepAlive))
		if _, err := br.Peek(1); err != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Time{})
		req, err := http.ReadRequest(br)
		if err != nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\nconnection: close\r\n\r\n"+
				"Invalid HTTP request received.")
			return
		}
		x := &exchange{life: l, conn: conn, req: req, port: port, close: req.Close || !req.ProtoAtLeast(1, 1), out: out[:0]}
		if err := x.readBody(); err != nil {
			var tooLarge *http.MaxBytesError
			if errors.As(err, &tooLarge) {
				x.close = true
				x.fail(refuse(413, "Request body is larger than %d bytes.", l.engine.cfg.MaxBody))
				_ = conn.SetReadDeadline(time.Now().Add(time.Second)) // a close with bytes unread would reset the answer away
				_, _ = io.CopyN(io.Discard, req.Body, 8*l.engine.cfg.MaxBody)
			}
			return
		}
		if !x.watched(br, l.handle) || x.close {
			return
		}
		out = x.out
	}
}

// readBody reads all of it before anything is answered.
func (x *exchange) readBody() error {
	if strings.EqualFold(x.req.Header.Get("Expect"), "100-continue") {
		if _, err := io.WriteString(x.conn, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return err
		}
	}
	limit := x.life.engine.cfg.MaxBody
	if x.req.ContentLength > limit {
		return &http.MaxBytesError{Limit: limit}
	}
	if n := x.req.ContentLength; n >= 0 {
		x.body = make([]byte, n)
		_, err := io.ReadFull(x.req.Body, x.body)
		return err
	}
	body, err := io.ReadAll(io.LimitReader(x.req.Body, limit+1))
	if err == nil && int64(len(body)) > limit {
		return &http.MaxBytesError{Limit: limit}
	}
	x.body = body
	return err
}

// watched runs the handler while another goroutine waits for the client to
// leave: a read that ends before the answer does. It reports whether the
// connection can carry another request.
func (x *exchange) watched(br *bufio.Reader, handle func(*exchange) bool) bool {
	ctx, cancel := context.WithCancel(x.life.ctx)
	defer cancel()
	x.ctx = ctx
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

// reset ends the connection with a RST. It returns false, as handlers do that
// leave the connection unusable.
func (x *exchange) reset() bool {
	resetConn(x.conn)
	return false
}

func resetConn(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// hang waits until the client leaves.
func (x *exchange) hang() bool {
	<-x.ctx.Done()
	return false
}

func (x *exchange) header(status int, contentType string) {
	x.out = append(x.out[:0], "HTTP/1.1 "...)
	x.out = strconv.AppendInt(x.out, int64(status), 10)
	x.out = append(append(x.out, ' '), http.StatusText(status)...)
	x.out = append(x.out, "\r\nserver: uvicorn\r\n"...)
	if contentType != "" {
		x.out = append(append(append(x.out, "content-type: "...), contentType...), "\r\n"...)
	}
	if x.close {
		x.out = append(x.out, "connection: close\r\n"...)
	}
}

func (x *exchange) flush() bool {
	_, err := x.conn.Write(x.out)
	x.out = x.out[:0]
	return err == nil
}

// answer writes a whole response.
func (x *exchange) answer(status int, contentType string, body []byte, extra ...string) bool {
	x.header(status, contentType)
	for i := 0; i+1 < len(extra); i += 2 {
		x.out = append(append(append(append(x.out, extra[i]...), ": "...), extra[i+1]...), "\r\n"...)
	}
	x.out = strconv.AppendInt(append(x.out, "content-length: "...), int64(len(body)), 10)
	x.out = append(x.out, "\r\n\r\n"...)
	if x.req.Method != http.MethodHead {
		x.out = append(x.out, body...)
	}
	return x.flush()
}

func (x *exchange) fail(e *apiError) bool {
	return x.failAs(e, x.life.engine.cfg.ErrorShape)
}

func (x *exchange) failAs(e *apiError, shape ErrorShape) bool {
	body, contentType := e.body(shape)
	var extra []string
	if e.retryAfter > 0 {
		extra = []string{"retry-after", strconv.Itoa(e.retryAfter)}
	}
	return x.answer(e.status, contentType, body, extra...)
}

func (x *exchange) startStream(contentType string) bool {
	x.header(200, contentType)
	x.out = append(x.out, "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"...)
	return x.flush()
}

// beginEvent leaves room for the chunk's size in front of what is appended to
// x.out next; endEvent writes the chunk at once.
const chunkHead = 10 // 8 hex digits and a line end

func (x *exchange) beginEvent() {
	x.out = append(x.out[:0], "00000000\r\n"...)
}

func (x *exchange) endEvent() bool {
	if x.chunk.crlf {
		x.out = append(x.out[:chunkHead], strings.ReplaceAll(string(x.out[chunkHead:]), "\n", "\r\n")...)
	}
	if x.chunk.split {
		return x.splitEvent()
	}
	return x.writeFrom(x.sealChunk())
}

// sealChunk writes the size, without leading zeros, and returns where the chunk starts.
func (x *exchange) sealChunk() (start int) {
	n := len(x.out) - chunkHead
	x.out = append(x.out, "\r\n"...)
	const digits = "0123456789abcdef"
	start = chunkHead - 2
	for {
		start--
		x.out[start] = digits[n&15]
		if n >>= 4; n == 0 {
			return start
		}
	}
}

func (x *exchange) writeFrom(start int) bool {
	_, err := x.conn.Write(x.out[start:])
	return err == nil
}

func (x *exchange) splitEvent() bool {
	for _, b := range x.out[chunkHead:] {
		if _, err := x.conn.Write([]byte{'1', '\r', '\n', b, '\r', '\n'}); err != nil {
			return false
		}
	}
	return true
}

// endStream writes the last chunk.
func (x *exchange) endStream() bool {
	x.out = append(x.out[:0], "0\r\n\r\n"...)
	return x.flush()
}
