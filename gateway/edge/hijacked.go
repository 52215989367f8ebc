package edge

import (
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/internal/socket"
)

// A Hijacked is the connection of a client whose streamed answer is not written by fasthttp. When the handler returns, fasthttp frees its
// memory for the connection. After the end of the answer it may serve the connection again.
//
// A Hijacked belongs to one goroutine at a time.
type Hijacked struct {
	client   *Conn
	headConn *headConn
	log      *zap.Logger
	head     []byte // head of the answer, still to be written; nil: it is written already
	closes   bool   // the connection is closed after the answer
	keep     *KeepAlive

	raw     syscall.RawConn
	attempt func(fd uintptr) // the method value o.write, made once to save an allocation per chunk
	p       []byte           // bytes that attempt writes; n and err are its results
	n       int
	err     error

	blocked time.Time // since when the client has taken less than 64 KiB of the bytes that wait for it; zero: no bytes wait
	taken   int       // bytes that the client has taken since then
}

// Release makes fasthttp release the connection of ctx when the handler returns, and then calls run on a goroutine of its own. run, or code
// to which it passes the connection, writes the body and calls End. Release returns false if fasthttp must write the answer itself: to a
// client of HTTP/1.0, to a HEAD request, over TLS, or to a connection that did not come through a Listener.
func Hijack(ctx *fasthttp.RequestCtx, log *zap.Logger, run func(*Hijacked)) bool {
	conn := headConnOf(ctx)
	fromListener := conn != nil && conn.client != nil && conn.server != nil
	takesChunks := ctx.Request.Header.IsHTTP11() && !ctx.IsHead()
	if !fromListener || !takesChunks || ctx.IsTLS() { // the body is written to the socket, below TLS
		return false
	}
	sock, ok := conn.client.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sock.SyscallConn()
	if err != nil {
		return false
	}
	o := &Hijacked{client: conn.client, headConn: conn, log: log, raw: raw, keep: conn.alive}
	o.attempt = o.write
	if StopKeepAlive(ctx) { // the head is sent, and has said whether the connection closes
		o.closes = o.keep.closes
	} else {
		h := &ctx.Response.Header
		o.closes = conn.server.stopping.Load() || ctx.Request.Header.ConnectionClose() || h.ConnectionClose()
		if o.closes {
			h.SetConnectionClose()
		}
		h.SetContentLength(-1)
		o.head = h.AppendBytes(nil)
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) { o.guard(func() { run(o) }) })
	return true
}

// guard calls f and recovers its panic. fasthttp does not recover on this goroutine, so a panic would end the process.
func (o *Hijacked) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			o.log.Error("edge: panic while answering", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			o.client.abandon()
			_ = o.client.Close()
		}
	}()
	f()
}

// ChunkRoom is how many bytes Frame needs before the data, for the size of the chunk.
const ChunkRoom = 10

// Frame makes a chunk of the data behind the first ChunkRoom bytes of b, in place. The first chunk gets the answer's head before it, and
// then the head counts as written.
func (o *Hijacked) Frame(b []byte) []byte {
	var digits [ChunkRoom]byte
	size := append(strconv.AppendInt(digits[:0], int64(len(b)-ChunkRoom), 16), "\r\n"...)
	at := ChunkRoom - len(size)
	copy(b[at:], size)
	b = append(b, "\r\n"...)[at:]
	if o.head != nil {
		b, o.head = slices.Concat(o.head, b), nil
		o.keep.wrote()
	}
	return b
}

// KeepAlive returns the sender of comments to the client while the engine is silent; nil: the client gets no comments.
func (o *Hijacked) KeepAlive() *KeepAlive { return o.keep }

// Send writes data as a chunk and, if last is set, the end of the body. It waits until the client has taken all bytes.
func (o *Hijacked) Send(data []byte, last bool) error {
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	b := slices.Grow((*buf)[:0], ChunkRoom+len(data)+len("\r\n"+lastChunk))[:ChunkRoom]
	if len(data) > 0 {
		b = o.Frame(append(b, data...))
	} else { // a chunk without data would end the body
		b = append(b[:0], o.head...)
		o.head = nil
		o.keep.wrote()
	}
	if last {
		b = append(b, lastChunk...)
	}
	if cap(b) <= writePiece {
		*buf = b
	}
	_, err := o.client.Write(b)
	return err
}

// Finish writes the bytes that Try has not written. It waits until the client has taken them.
func (o *Hijacked) WriteRest(rest []byte) error {
	o.unblocked(time.Now())
	_, err := o.client.Write(rest)
	return err
}

// Smooth removes the write deadline, in place of which Patience bounds how long the client may be blocked. It must be called before Try.
func (o *Hijacked) ClearWriteDeadline() error {
	o.client.writeBy.Store(0)
	return o.client.Conn.SetWriteDeadline(time.Time{})
}

// Try writes as much of p as the client takes now. If that is not all of p, the client counts as blocked until
// another Try writes the rest.
func (o *Hijacked) TryWrite(p []byte, now time.Time) (int, error) {
	o.p, o.n, o.err = p, 0, nil
	err := o.raw.Control(o.attempt) // raw.Write would prepare to wait for room, but here the event loop waits
	o.p = nil
	if err == nil {
		err = o.err
	}
	switch {
	case err != nil:
		o.client.logCut(err, 0) // Smooth has removed the deadline, so the time does not matter
		o.client.abandon()
	case o.n < len(p):
		// Each 64 KiB have a deadline of their own, as in Conn.Write.
		if o.taken += o.n; o.blocked.IsZero() || o.taken >= writePiece {
			o.unblocked(now)
			o.blocked, o.taken = now, 0
		}
	default:
		o.unblocked(now)
	}
	return o.n, err
}

// unblocked adds the time for which the client kept a write waiting to its lag.
func (o *Hijacked) unblocked(now time.Time) {
	if !o.blocked.IsZero() {
		o.client.lagged.Add(int64(now.Sub(o.blocked)))
		o.blocked = time.Time{}
	}
}

// write writes p without waiting.
func (o *Hijacked) write(fd uintptr) { o.n, o.err = socket.Write(fd, o.p) }

// Patience returns when a blocked client is given up; zero: never.
func (o *Hijacked) GiveUpAt() time.Time {
	timeout := o.client.ln.opt.WriteTimeout
	if timeout <= 0 {
		return time.Time{}
	}
	return o.blocked.Add(min(timeout, o.client.lagLeft()))
}

// Cut gives up a blocked client whose Patience has passed.
func (o *Hijacked) GiveUp(now time.Time) {
	o.client.logCut(os.ErrDeadlineExceeded, now.Sub(o.blocked))
	o.client.abandon()
}

// Socket calls f with the descriptor of the client's socket, which stays open during the call. It fails if the socket is closed.
func (o *Hijacked) Socket(f func(fd int)) error {
	return o.raw.Control(func(fd uintptr) { f(int(fd)) })
}

// End closes the connection. If the answer was whole and the connection may stay open, it serves the next requests instead.
func (o *Hijacked) End(whole bool) {
	if !whole || o.closes {
		_ = o.client.Close() // an error could not be reported to anyone
		return
	}
	go o.headConn.again().serve()
}
