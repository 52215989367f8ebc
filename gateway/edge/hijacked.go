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

// A Hijacked is the connection of a client whose streamed answer evenkeel writes without fasthttp. When the handler returns, fasthttp frees
// its memory for the connection. After the end of the answer, the connection may serve further requests.
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
	writeFunc   func(fd uintptr) // the method value o.writeSocket, made only once to save an allocation per chunk
	toWrite     []byte           // bytes that writeFunc writes; its results are in lastWritten and writeErr
	lastWritten int              // bytes that the last call of writeFunc has written
	writeErr    error

	// blockedSince is the time since which the client has read less than 64 KiB of the bytes that wait for it. Zero: no bytes wait.
	blockedSince      time.Time
	bytesSinceBlocked int // bytes that the client has read since blockedSince
}

// Hijack makes fasthttp release the connection of ctx when the handler returns, and then calls run on a goroutine of its own. run, or code
// to which it passes the Hijacked, writes the body and calls End. From the call of Hijack on, the client gets no more keep-alive comments
// of StartKeepAlive. Hijack returns false and does nothing if fasthttp must write the answer: to a client of HTTP/1.0, to a HEAD request,
// over TLS, or to a connection that did not come through a Listener.
func Hijack(ctx *fasthttp.RequestCtx, log *zap.Logger, run func(*Hijacked)) bool {
	conn := headConnOf(ctx)
	fromListener := conn != nil && conn.client != nil && conn.server != nil
	takesChunks := ctx.Request.Header.IsHTTP11() && !ctx.IsHead()
	if !fromListener || !takesChunks || ctx.IsTLS() { // the body is written to the socket itself, below any TLS
		return false
	}
	sock, ok := conn.client.Conn.(syscall.Conn)
	if !ok { // TryWrite needs a socket
		return false
	}
	raw, err := sock.SyscallConn()
	if err != nil {
		return false
	}
	o := &Hijacked{client: conn.client, headConn: conn, log: log, raw: raw, keepAlive: conn.keepAlive}
	o.writeFunc = o.writeSocket
	if headSent := StopKeepAlive(ctx); headSent { // the head that was sent says whether the connection closes
		o.closesAfter = o.keepAlive.closesAfter
	} else {
		o.makeHead(ctx)
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) { o.recoverPanic(func() { run(o) }) })
	return true
}

// makeHead sets pendingHead to the head of ctx's answer, and closesAfter to whether the connection is closed after the answer, which the
// head tells the client.
func (o *Hijacked) makeHead(ctx *fasthttp.RequestCtx) {
	h := &ctx.Response.Header
	o.closesAfter = o.headConn.server.stopping.Load() || ctx.Request.Header.ConnectionClose() || h.ConnectionClose()
	if o.closesAfter {
		h.SetConnectionClose()
	}
	h.SetContentLength(-1) // -1: the body comes in chunks
	o.pendingHead = h.AppendBytes(nil)
}

// recoverPanic calls f and recovers a panic in it. It runs on the goroutine that fasthttp begins for a hijacked connection. fasthttp does
// not recover there, so a panic would end the process. After a panic, the client's connection is reset.
func (o *Hijacked) recoverPanic(f func()) {
	defer func() {
		if v := recover(); v != nil {
			o.log.Error("edge: panic while answering", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			o.client.dropClient() // makes Close reset the connection, so that the client sees that the answer is cut off
			_ = o.client.Close()
		}
	}()
	f()
}

// ChunkRoom is how many bytes Frame needs before the data, for the line with the chunk's size.
const ChunkRoom = 10

// Frame makes a chunk of b and returns it. The data begins after the first ChunkRoom bytes of b. The line with the chunk's size is written
// so that it ends right before the data, and the unused bytes before this line are cut off. Frame puts the answer's head before the first
// chunk, in new memory; from then on, keep-alive comments no longer send a head.
func (o *Hijacked) Frame(b []byte) []byte {
	var digits [ChunkRoom]byte
	size := append(strconv.AppendInt(digits[:0], int64(len(b)-ChunkRoom), 16), "\r\n"...)
	start := ChunkRoom - len(size) // where the line with the size begins
	copy(b[start:], size)
	b = append(b, "\r\n"...)[start:]
	if o.pendingHead != nil {
		b, o.pendingHead = slices.Concat(o.pendingHead, b), nil
		o.keepAlive.recordHeadWritten()
	}
	return b
}

// KeepAlive returns what sends comments to the client while the engine is silent; nil: the client gets no comments.
func (o *Hijacked) KeepAlive() *KeepAlive { return o.keepAlive }

// Send writes data as a chunk and, if last is set, the end of the body. The first Send also writes the head, if no comment has sent it:
// Frame puts it before the data. Send waits until all bytes are in the socket.
func (o *Hijacked) Send(data []byte, last bool) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	b := slices.Grow((*buf)[:0], ChunkRoom+len(data)+len("\r\n"+lastChunk))[:ChunkRoom] // Frame fills the first ChunkRoom bytes
	if len(data) > 0 {
		b = o.Frame(append(b, data...))
	} else { // a chunk without data would end the body, so only the head is written, unless it has been written already
		b = append(b[:0], o.pendingHead...)
		o.pendingHead = nil
		o.keepAlive.recordHeadWritten() // as Frame does when it writes the head
	}
	if last {
		b = append(b, lastChunk...)
	}
	if cap(b) <= writePieceSize { // a larger buffer would waste memory in the pool
		*buf = b
	}
	_, err := o.client.Write(b)
	return err
}

// WriteRest writes the bytes that TryWrite has not written. It waits until all of them are in the socket, or until the client is too slow.
func (o *Hijacked) WriteRest(rest []byte) error {
	o.endBlocked(time.Now())
	_, err := o.client.Write(rest)
	return err
}

// ClearWriteDeadline removes the write deadline. GiveUpAt then bounds how long the client may be blocked. Call
// ClearWriteDeadline before TryWrite.
func (o *Hijacked) ClearWriteDeadline() error {
	o.client.writeDeadline.Store(0)
	return o.client.Conn.SetWriteDeadline(time.Time{})
}

// TryWrite writes as much of p as fits into the socket now. If some of p does not fit, the client counts as blocked until a later
// TryWrite writes all that is left.
func (o *Hijacked) TryWrite(p []byte, now time.Time) (int, error) {
	o.toWrite, o.lastWritten, o.writeErr = p, 0, nil
	err := o.raw.Control(o.writeFunc) // raw.Write would prepare to wait until there is room, but here the event loop waits
	o.toWrite = nil
	if err == nil {
		err = o.writeErr
	}
	switch {
	case err != nil:
		o.client.countSlowClient(err, 0) // no write deadline is set, so how long the write waited does not matter
		o.client.dropClient()
	case o.lastWritten < len(p):
		o.noteBlocked(now)
	default:
		o.endBlocked(now)
	}
	return o.lastWritten, err
}

// noteBlocked records that only a part of what TryWrite had for the client fitted into the socket: lastWritten bytes of it. GiveUpAt bounds
// how long a client may be blocked. As with the deadlines of Conn.Write, this time begins anew after each 64 KiB that were written.
func (o *Hijacked) noteBlocked(now time.Time) {
	o.bytesSinceBlocked += o.lastWritten
	wasBlocked, pieceIsWritten := !o.blockedSince.IsZero(), o.bytesSinceBlocked >= writePieceSize
	if wasBlocked && !pieceIsWritten { // the time since blockedSince runs on
		return
	}
	o.endBlocked(now) // counts the time so far, if the client was blocked, before a new time begins
	o.blockedSince, o.bytesSinceBlocked = now, 0
}

// endBlocked records that the client is no longer blocked. The time for which it was blocked counts towards MaxLag.
func (o *Hijacked) endBlocked(now time.Time) {
	if !o.blockedSince.IsZero() {
		o.client.writeWaitNanos.Add(int64(now.Sub(o.blockedSince)))
		o.blockedSince = time.Time{}
	}
}

// writeSocket writes as much of toWrite as fits into the socket, without waiting.
func (o *Hijacked) writeSocket(fd uintptr) { o.lastWritten, o.writeErr = socket.Write(fd, o.toWrite) }

// GiveUpAt returns the time at which a blocked client must be given up; zero: never. The result has no meaning for a client that is not
// blocked. The client may be blocked for WriteTimeout, or for less if all its writes have waited for almost MaxLag.
func (o *Hijacked) GiveUpAt() time.Time {
	timeout := o.client.ln.options.WriteTimeout
	if timeout <= 0 { // writes may wait for ever
		return time.Time{}
	}
	return o.blockedSince.Add(min(timeout, o.client.writeWaitLeft()))
}

// GiveUp gives up a client that is still blocked at the time of GiveUpAt, and counts it as too slow.
func (o *Hijacked) GiveUp(now time.Time) {
	o.client.countSlowClient(os.ErrDeadlineExceeded, now.Sub(o.blockedSince))
	o.client.dropClient()
}

// Socket calls f with the file descriptor of the client's socket, which stays open during the call. It fails if the socket is closed.
func (o *Hijacked) Socket(f func(fd int)) error {
	return o.raw.Control(func(fd uintptr) { f(int(fd)) })
}

// End ends the use of the Hijacked. If the answer is whole and the connection may stay open, it serves the next requests;
// otherwise it is closed.
func (o *Hijacked) End(whole bool) {
	if !whole || o.closesAfter {
		_ = o.client.Close() // an error could not be reported to anyone
		return
	}
	go o.headConn.renew().serve()
}
