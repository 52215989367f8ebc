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

// An Outlet is the connection of a client whose streamed answer fasthttp does not write: after the request,
// fasthttp has let go of the connection and of its memory for it. After the end of the
// answer, fasthttp serves the connection again.
//
// An Outlet belongs to one goroutine at a time.
type Outlet struct {
	client *Conn
	wire   *wire
	log    *zap.Logger
	head   []byte // the answer's head; nil: it was written already
	closes bool   // the connection ends with the answer
	keep   *KeepAlive

	raw     syscall.RawConn
	attempt func(fd uintptr) // made once: a closure for each chunk would be garbage
	p       []byte           // what attempt is to write; n and err are what came of it
	n       int
	err     error

	blocked time.Time // since when the client has not taken all that Try was given; zero: it has taken all
}

// Release has fasthttp let go of the connection of ctx once the handler has returned, and then calls run on
// a goroutine of its own. run, or the code to which it passes the outlet, writes the body and calls End.
// Release is false if fasthttp has to write the answer itself: to a client without chunks, or over TLS.
func Release(ctx *fasthttp.RequestCtx, log *zap.Logger, run func(*Outlet)) bool {
	w := wireOf(ctx)
	if w == nil || w.client == nil || w.server == nil || ctx.IsTLS() || ctx.IsHead() || !ctx.Request.Header.IsHTTP11() {
		return false
	}
	sock, ok := w.client.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sock.SyscallConn()
	if err != nil {
		return false
	}
	o := &Outlet{client: w.client, wire: w, log: log, raw: raw, keep: w.alive}
	o.attempt = o.write
	if EndWait(ctx) {
		o.closes = o.keep.closes
	} else {
		h := &ctx.Response.Header
		o.closes = w.server.stopping.Load() || ctx.Request.Header.ConnectionClose() || h.ConnectionClose()
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

// guard keeps a panic from ending the process: fasthttp does not recover here.
func (o *Outlet) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			o.log.Error("edge: panic while answering", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			o.client.abandon()
			_ = o.client.Close()
		}
	}()
	f()
}

// ChunkRoom is how many bytes of a buffer Frame needs before the data.
const ChunkRoom = 10

// Frame makes a chunk, in place, of the data behind the first ChunkRoom bytes of b. It puts the
// answer's head before the first chunk.
func (o *Outlet) Frame(b []byte) []byte {
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

// KeepAlive is what sends the client comments while the engine is silent; nil: the client gets none.
func (o *Outlet) KeepAlive() *KeepAlive { return o.keep }

// Send writes data as a chunk, and the end of the body behind it if last is set. It waits until the client
// has taken all of it.
func (o *Outlet) Send(data []byte, last bool) error {
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	b := slices.Grow((*buf)[:0], ChunkRoom+len(data)+len("\r\n"+lastChunk))[:ChunkRoom]
	if len(data) > 0 {
		b = o.Frame(append(b, data...))
	} else {
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

// Finish writes the rest of bytes that Try wrote in part, and waits until the client has taken it.
func (o *Outlet) Finish(rest []byte) error {
	o.unblocked(time.Now())
	_, err := o.client.Write(rest)
	return err
}

// Smooth makes the connection ready for Try.
func (o *Outlet) Smooth() error {
	o.client.writeBy.Store(0)
	return o.client.Conn.SetWriteDeadline(time.Time{})
}

// Try writes as much of p as the client takes now. If that is not all of p, the client counts as blocked until
// another Try writes the rest.
func (o *Outlet) Try(p []byte, now time.Time) (int, error) {
	o.p, o.n, o.err = p, 0, nil
	err := o.raw.Control(o.attempt) // not raw.Write, which prepares to wait for room in the socket: here the loop waits
	o.p = nil
	if err == nil {
		err = o.err
	}
	switch {
	case err != nil:
		o.client.logCut(err, 0)
		o.client.abandon()
	case o.n < len(p):
		if o.blocked.IsZero() {
			o.blocked = now
		}
	default:
		o.unblocked(now)
	}
	return o.n, err
}

// unblocked charges the client for the time for which it kept a write waiting.
func (o *Outlet) unblocked(now time.Time) {
	if !o.blocked.IsZero() {
		o.client.lagged.Add(int64(now.Sub(o.blocked)))
		o.blocked = time.Time{}
	}
}

// write is attempt: it writes p without waiting.
func (o *Outlet) write(fd uintptr) { o.n, o.err = socket.Write(fd, o.p) }

// Patience is the time by which a blocked client has to take the rest; zero: there is no limit.
func (o *Outlet) Patience() time.Time {
	timeout := o.client.ln.opt.WriteTimeout
	if timeout <= 0 {
		return time.Time{}
	}
	return o.blocked.Add(min(timeout, o.client.lagLeft()))
}

// Cut gives up a blocked client whose Patience has passed.
func (o *Outlet) Cut(now time.Time) {
	o.client.logCut(os.ErrDeadlineExceeded, now.Sub(o.blocked))
	o.client.abandon()
}

// Socket calls f with the descriptor of the client's socket, which stays open meanwhile. It fails if the socket
// is closed.
func (o *Outlet) Socket(f func(fd int)) error {
	return o.raw.Control(func(fd uintptr) { f(int(fd)) })
}

// End closes the connection, or has its next requests served if the answer was whole.
func (o *Outlet) End(whole bool) {
	if !whole || o.closes {
		_ = o.client.Close() // an error could not be reported to anyone
		return
	}
	go o.wire.again().serve()
}
