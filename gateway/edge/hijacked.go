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

// A Hijacked is the connection of a client whose streamed answer evenkeel writes without fasthttp,
// which frees its memory for the connection when the handler returns. Afterwards the connection may
// serve further requests.
//
// Only one goroutine at a time may use a Hijacked.
type Hijacked struct {
	client      *Conn
	headConn    *headConn
	log         *zap.Logger
	pendingHead []byte // head of the answer, which is still to be written; nil: it is written already
	closesAfter bool   // the connection is closed after the answer
	keepAlive   *KeepAlive

	raw         syscall.RawConn
	writeFunc   func(fd uintptr) // made only once, to save an allocation per chunk
	toWrite     []byte           // for writeFunc
	lastWritten int              // bytes that the last call of writeFunc has written
	writeErr    error

	// The client has read less than 64 KiB since then, although more waits for it. Zero: nothing
	// waits.
	blockedSince      time.Time
	bytesSinceBlocked int // bytes that the client has read since blockedSince
}

// Hijack makes fasthttp release the connection when the handler returns, and then calls run on a
// goroutine of its own. run, or code to which it passes the Hijacked, writes the body and calls
// End. The comments of StartKeepAlive end with the call. Hijack returns false and does nothing if
// fasthttp must write the answer: to a client of HTTP/1.0, to a HEAD request, over TLS, or not
// through a Listener.
func Hijack(ctx *fasthttp.RequestCtx, log *zap.Logger, run func(*Hijacked)) bool {
	conn := headConnOf(ctx)
	fromListener := conn != nil && conn.client != nil && conn.server != nil
	takesChunks := ctx.Request.Header.IsHTTP11() && !ctx.IsHead()
	if !fromListener || !takesChunks || ctx.IsTLS() { // the body is written below any TLS
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
	if headSent := StopKeepAlive(ctx); headSent {
		// The head that was sent says whether the connection closes.
		o.closesAfter = o.keepAlive.closesAfter
	} else {
		o.makeHead(ctx)
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) { o.recoverPanic(func() { run(o) }) })
	return true
}

// The head tells the client whether the connection closes.
func (o *Hijacked) makeHead(ctx *fasthttp.RequestCtx) {
	h := &ctx.Response.Header
	o.closesAfter = o.headConn.server.stopping.Load() || ctx.Request.Header.ConnectionClose() || h.ConnectionClose()
	if o.closesAfter {
		h.SetConnectionClose()
	}
	h.SetContentLength(-1) // chunked
	o.pendingHead = h.AppendBytes(nil)
}

// fasthttp does not recover panics on a hijacked connection's goroutine, so one would end the
// process.
func (o *Hijacked) recoverPanic(f func()) {
	defer func() {
		if v := recover(); v != nil {
			o.log.Error("edge: panic while answering", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			o.client.dropClient() // the client sees that the answer is cut off
			_ = o.client.Close()
		}
	}()
	f()
}

// ChunkRoom is for the line with the chunk's size, before the data.
const ChunkRoom = 10

// Frame makes a chunk of b, whose data begins after ChunkRoom bytes. The line with the size ends
// right before the data; unused bytes before it are cut off. The answer's head comes before the
// first chunk, in new memory, and no comment sends a head any more.
func (o *Hijacked) Frame(b []byte) []byte {
	var digits [ChunkRoom]byte
	size := append(strconv.AppendInt(digits[:0], int64(len(b)-ChunkRoom), 16), "\r\n"...)
	start := ChunkRoom - len(size)
	copy(b[start:], size)
	b = append(b, "\r\n"...)[start:]
	if o.pendingHead != nil {
		b, o.pendingHead = slices.Concat(o.pendingHead, b), nil
		o.keepAlive.recordHeadWritten()
	}
	return b
}

// KeepAlive is nil if the client gets no comments.
func (o *Hijacked) KeepAlive() *KeepAlive { return o.keepAlive }

// Send writes data as a chunk and, if last, the end of the body. The first Send also writes the
// head, if no comment has sent it. Send waits until all bytes are in the socket.
func (o *Hijacked) Send(data []byte, last bool) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	b := slices.Grow((*buf)[:0], ChunkRoom+len(data)+len("\r\n"+lastChunk))[:ChunkRoom] // for Frame
	if len(data) > 0 {
		b = o.Frame(append(b, data...))
	} else { // a chunk without data would end the body
		b = append(b[:0], o.pendingHead...)
		o.pendingHead = nil
		o.keepAlive.recordHeadWritten() // as Frame does
	}
	if last {
		b = append(b, lastChunk...)
	}
	if cap(b) <= writePieceSize { // a larger one would waste memory in the pool
		*buf = b
	}
	_, err := o.client.Write(b)
	return err
}

// WriteRest writes what TryWrite has not. It waits until all is in the socket, or until the client
// is too slow.
func (o *Hijacked) WriteRest(rest []byte) error {
	o.endBlocked(time.Now())
	_, err := o.client.Write(rest)
	return err
}

// ClearWriteDeadline must be called before TryWrite. GiveUpAt then bounds how long the client may
// be blocked.
func (o *Hijacked) ClearWriteDeadline() error {
	o.client.writeDeadline.Store(0)
	return o.client.Conn.SetWriteDeadline(time.Time{})
}

// TryWrite writes as much of p as fits into the socket now. After a part, the client counts as
// blocked until all is written.
func (o *Hijacked) TryWrite(p []byte, now time.Time) (int, error) {
	o.toWrite, o.lastWritten, o.writeErr = p, 0, nil
	err := o.raw.Control(o.writeFunc) // raw.Write would prepare to wait, but the event loop waits
	o.toWrite = nil
	if err == nil {
		err = o.writeErr
	}
	switch {
	case err != nil:
		o.client.countSlowClient(err, 0) // no deadline is set, so the wait does not matter
		o.client.dropClient()
	case o.lastWritten < len(p):
		o.noteBlocked(now)
	default:
		o.endBlocked(now)
	}
	return o.lastWritten, err
}

// As with the deadlines of Conn.Write, the time for GiveUpAt begins anew after each 64 KiB.
func (o *Hijacked) noteBlocked(now time.Time) {
	o.bytesSinceBlocked += o.lastWritten
	wasBlocked, pieceIsWritten := !o.blockedSince.IsZero(), o.bytesSinceBlocked >= writePieceSize
	if wasBlocked && !pieceIsWritten {
		return
	}
	o.endBlocked(now) // counts the time so far
	o.blockedSince, o.bytesSinceBlocked = now, 0
}

// The time for which the client was blocked counts towards MaxLag.
func (o *Hijacked) endBlocked(now time.Time) {
	if !o.blockedSince.IsZero() {
		o.client.writeWaitNanos.Add(int64(now.Sub(o.blockedSince)))
		o.blockedSince = time.Time{}
	}
}

func (o *Hijacked) writeSocket(fd uintptr) { o.lastWritten, o.writeErr = socket.Write(fd, o.toWrite) }

// GiveUpAt returns when a blocked client must be given up: after WriteTimeout, or what is left of
// MaxLag; zero: never. Without a blocked client it has no meaning.
func (o *Hijacked) GiveUpAt() time.Time {
	timeout := o.client.ln.options.WriteTimeout
	if timeout <= 0 {
		return time.Time{}
	}
	return o.blockedSince.Add(min(timeout, o.client.writeWaitLeft()))
}

// GiveUp counts the client as too slow.
func (o *Hijacked) GiveUp(now time.Time) {
	o.client.countSlowClient(os.ErrDeadlineExceeded, now.Sub(o.blockedSince))
	o.client.dropClient()
}

// Socket calls f with the client's socket, which stays open during the call.
func (o *Hijacked) Socket(f func(fd int)) error {
	return o.raw.Control(func(fd uintptr) { f(int(fd)) })
}

// End lets the connection serve the next requests if the answer is whole, and else closes it. The
// Hijacked must not be used afterwards.
func (o *Hijacked) End(whole bool) {
	if !whole || o.closesAfter {
		_ = o.client.Close()
		return
	}
	go o.headConn.renew().serve()
}
