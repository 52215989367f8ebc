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
	client      *Conn
	headConn    *headConn
	log         *zap.Logger
	pendingHead []byte // head of the answer, still to be written; nil: it is written already
	closesAfter bool   // the connection is closed after the answer
	keepAlive   *KeepAlive

	raw       syscall.RawConn
	writeFunc func(fd uintptr) // the method value o.writeSocket, made once to save an allocation per chunk
	toWrite   []byte           // bytes that writeFunc writes; written and writeErr are its results
	written   int
	writeErr  error

	blockedSince      time.Time // since when the client has taken less than 64 KiB of the bytes that wait for it; zero: no bytes wait
	bytesSinceBlocked int       // bytes that the client has taken since then
}

// Hijack makes fasthttp release the connection of ctx when the handler returns, and then calls run on a goroutine of its own. run, or code
// to which it passes the connection, writes the body and calls End. Hijack also ends the keep-alive comments that the client gets until
// then. It returns false, and does nothing, if fasthttp must write the answer itself: to a client of HTTP/1.0, to a HEAD request, over TLS,
// or to a connection that did not come through a Listener.
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
	o := &Hijacked{client: conn.client, headConn: conn, log: log, raw: raw, keepAlive: conn.keepAlive}
	o.writeFunc = o.writeSocket
	if headSent := StopKeepAlive(ctx); headSent { // the head has said whether the connection closes
		o.closesAfter = o.keepAlive.closesAfter
	} else {
		h := &ctx.Response.Header
		o.closesAfter = conn.server.stopping.Load() || ctx.Request.Header.ConnectionClose() || h.ConnectionClose()
		if o.closesAfter {
			h.SetConnectionClose()
		}
		h.SetContentLength(-1)
		o.pendingHead = h.AppendBytes(nil)
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) { o.recoverPanic(func() { run(o) }) })
	return true
}

// recoverPanic calls f and recovers its panic. fasthttp does not recover on this goroutine, so a panic would end the process.
func (o *Hijacked) recoverPanic(f func()) {
	defer func() {
		if v := recover(); v != nil {
			o.log.Error("edge: panic while answering", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			o.client.dropClient()
			_ = o.client.Close()
		}
	}()
	f()
}

// ChunkRoom is how many bytes Frame needs before the data, for the size of the chunk.
const ChunkRoom = 10

// Frame makes a chunk of the data behind the first ChunkRoom bytes of b, in place. The first chunk gets the answer's head before it; from
// then on, keep-alive comments no longer send a head.
func (o *Hijacked) Frame(b []byte) []byte {
	var digits [ChunkRoom]byte
	size := append(strconv.AppendInt(digits[:0], int64(len(b)-ChunkRoom), 16), "\r\n"...)
	at := ChunkRoom - len(size)
	copy(b[at:], size)
	b = append(b, "\r\n"...)[at:]
	if o.pendingHead != nil {
		b, o.pendingHead = slices.Concat(o.pendingHead, b), nil
		o.keepAlive.recordHeadWritten()
	}
	return b
}

// KeepAlive returns the sender of comments to the client while the engine is silent; nil: the client gets no comments.
func (o *Hijacked) KeepAlive() *KeepAlive { return o.keepAlive }

// Send writes data as a chunk and, if last is set, the end of the body. It waits until the client has taken all bytes.
func (o *Hijacked) Send(data []byte, last bool) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	b := slices.Grow((*buf)[:0], ChunkRoom+len(data)+len("\r\n"+lastChunk))[:ChunkRoom]
	if len(data) > 0 {
		b = o.Frame(append(b, data...))
	} else { // a chunk without data would end the body, so only the head is written, if it is not out yet
		b = append(b[:0], o.pendingHead...)
		o.pendingHead = nil
		o.keepAlive.recordHeadWritten()
	}
	if last {
		b = append(b, lastChunk...)
	}
	if cap(b) <= writePieceSize {
		*buf = b
	}
	_, err := o.client.Write(b)
	return err
}

// WriteRest writes the bytes that TryWrite has not written. It waits until the client has taken them.
func (o *Hijacked) WriteRest(rest []byte) error {
	o.endBlocked(time.Now())
	_, err := o.client.Write(rest)
	return err
}

// ClearWriteDeadline removes the write deadline, in place of which GiveUpAt bounds how long the client may be blocked. It must be called
// before TryWrite.
func (o *Hijacked) ClearWriteDeadline() error {
	o.client.writeDeadline.Store(0)
	return o.client.Conn.SetWriteDeadline(time.Time{})
}

// TryWrite writes as much of p as the client takes now. If that is not all of p, the client counts as blocked until
// another TryWrite writes the rest.
func (o *Hijacked) TryWrite(p []byte, now time.Time) (int, error) {
	o.toWrite, o.written, o.writeErr = p, 0, nil
	err := o.raw.Control(o.writeFunc) // raw.Write would prepare to wait for room, but here the event loop waits
	o.toWrite = nil
	if err == nil {
		err = o.writeErr
	}
	switch {
	case err != nil:
		o.client.countSlowClient(err, 0) // ClearWriteDeadline has removed the deadline, so the time does not matter
		o.client.dropClient()
	case o.written < len(p):
		// Each 64 KiB have a deadline of their own, as in Conn.Write.
		if o.bytesSinceBlocked += o.written; o.blockedSince.IsZero() || o.bytesSinceBlocked >= writePieceSize {
			o.endBlocked(now)
			o.blockedSince, o.bytesSinceBlocked = now, 0
		}
	default:
		o.endBlocked(now)
	}
	return o.written, err
}

// endBlocked ends the time in which the client counts as blocked, and adds it to the time for which writes have waited for the client.
func (o *Hijacked) endBlocked(now time.Time) {
	if !o.blockedSince.IsZero() {
		o.client.writeWaitNanos.Add(int64(now.Sub(o.blockedSince)))
		o.blockedSince = time.Time{}
	}
}

// writeSocket writes toWrite without waiting.
func (o *Hijacked) writeSocket(fd uintptr) { o.written, o.writeErr = socket.Write(fd, o.toWrite) }

// GiveUpAt returns when a blocked client is given up; zero: never.
func (o *Hijacked) GiveUpAt() time.Time {
	timeout := o.client.ln.options.WriteTimeout
	if timeout <= 0 {
		return time.Time{}
	}
	return o.blockedSince.Add(min(timeout, o.client.writeWaitLeft()))
}

// GiveUp gives up a blocked client whose time, GiveUpAt, has passed.
func (o *Hijacked) GiveUp(now time.Time) {
	o.client.countSlowClient(os.ErrDeadlineExceeded, now.Sub(o.blockedSince))
	o.client.dropClient()
}

// Socket calls f with the descriptor of the client's socket, which stays open during the call. It fails if the socket is closed.
func (o *Hijacked) Socket(f func(fd int)) error {
	return o.raw.Control(func(fd uintptr) { f(int(fd)) })
}

// End closes the connection. If the answer was whole and the connection may stay open, it serves the next requests instead.
func (o *Hijacked) End(whole bool) {
	if !whole || o.closesAfter {
		_ = o.client.Close() // an error could not be reported to anyone
		return
	}
	go o.headConn.renew().serve()
}
