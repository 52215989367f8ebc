package edge

import (
	"net"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// A KeepAlive sends SSE comments to a client that waits for events, because other proxies close a
// silent connection. If no event has come yet, the first comment is sent with the head of the
// answer, whose status 200 stays even if the request fails later.
//
// Only the goroutine that answers the request may use a KeepAlive. Its timer uses the connection
// and the head only during a wait, between startTimer and stopTimer.
type KeepAlive struct {
	interval time.Duration
	comment  []byte
	log      *zap.Logger

	client      *Conn
	conn        net.Conn // the client's connection, above TLS
	header      *fasthttp.ResponseHeader
	isHTTP10    bool // the client speaks HTTP/1.0, which has no chunks
	closesAfter bool // the connection is closed after the answer
	server      *Server

	mu        sync.Mutex
	timer     *time.Timer
	headState headState
	isWaiting bool // the client waits for an event, so it gets comments
}

type headState uint8

const (
	headNotSent headState = iota // the head was not sent, so the status may still change
	headSentByComment
	headSentByAnswer
)

func (s headState) afterComment() (needsHead bool, next headState) {
	if s == headNotSent {
		return true, headSentByComment
	}
	return false, s
}

// StartKeepAlive sends a comment to the client once per interval, the first one at interval after
// since, until StopKeepAlive. It sends none if interval is 0 or less, to a HEAD request, or if the
// client did not come through a Listener of a Server. Before StopKeepAlive, the handler must not
// touch ctx's answer.
func StartKeepAlive(ctx *fasthttp.RequestCtx, interval time.Duration, since time.Time, comment []byte, log *zap.Logger) {
	h := headConnOf(ctx)
	fromListener := h != nil && h.client != nil && h.server != nil
	if interval <= 0 || !fromListener || ctx.IsHead() {
		return
	}
	isHTTP10 := !ctx.Request.Header.IsHTTP11() // only the end of the connection ends the body
	closeWanted := ctx.Request.Header.ConnectionClose() || ctx.Response.ConnectionClose()
	// Once a comment has sent the head, fasthttp cannot end the answer, so evenkeel writes it and
	// waits for the client's next request at the client's socket, where a request over TLS cannot be
	// read.
	canReadNext := !ctx.IsTLS()
	k := &KeepAlive{
		interval: interval, comment: comment, log: log, client: h.client, conn: ctx.Conn(), header: &ctx.Response.Header, server: h.server,
		isHTTP10: isHTTP10, closesAfter: closeWanted || isHTTP10 || !canReadNext,
	}
	h.keepAlive = k
	k.startTimer(time.Until(since.Add(interval)))
}

// StopKeepAlive returns true if a comment has sent the head, so that only events may follow.
func StopKeepAlive(ctx *fasthttp.RequestCtx) (headSent bool) {
	h := headConnOf(ctx)
	return h != nil && h.keepAlive.stopTimer() == headSentByComment
}

// startTimer begins or restarts a wait. k may be nil.
func (k *KeepAlive) startTimer(first time.Duration) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.isWaiting = true
	if k.timer == nil {
		k.timer = time.AfterFunc(max(0, first), k.sendComment)
	} else {
		k.timer.Reset(max(0, first))
	}
}

// StartTimer begins a wait, but not before the head is written. It reads headState without the
// lock, because the timer changes it only during a wait.
func (k *KeepAlive) StartTimer() {
	if k != nil && k.headState != headNotSent {
		k.startTimer(k.interval)
	}
}

// StopTimer ends a wait.
func (k *KeepAlive) StopTimer() { k.stopTimer() }

func (k *KeepAlive) stopTimer() headState {
	if k == nil {
		return headNotSent
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.isWaiting = false
	if k.timer != nil {
		k.timer.Stop() // sendComment then sees that the wait is over
	}
	return k.headState
}

// recordHeadWritten ends a wait. From then on, comments come without a head. Outside of a wait, the
// timer does not use headState, so no lock is needed. k may be nil.
func (k *KeepAlive) recordHeadWritten() {
	if k == nil {
		return
	}
	k.stopTimer()
	if k.headState == headNotSent {
		k.headState = headSentByAnswer
	}
}

// Interval is 0 if the client gets no comments.
func (k *KeepAlive) Interval() time.Duration {
	if k == nil {
		return 0
	}
	return k.interval
}

// Comment is without the framing of a chunk.
func (k *KeepAlive) Comment() []byte { return k.comment }

func (k *KeepAlive) sendComment() {
	defer func() { // on the timer's goroutine, it would end the process
		if v := recover(); v != nil {
			k.log.Error("edge: panic while keeping a client's connection alive", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			k.client.closeSocket()
		}
	}()
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.isWaiting { // the wait ended while the timer fired
		return
	}
	var out []byte
	needsHead, next := k.headState.afterComment()
	if needsHead {
		out = k.appendHead()
	}
	k.headState = next
	if _, err := k.conn.Write(k.frame(out, k.comment)); err != nil {
		k.isWaiting = false // the next write of the answer fails, too
		return
	}
	k.timer.Reset(k.interval)
}

// appendHead also sets the head in the response, and decides whether the connection is closed after
// the answer, which it tells the client.
func (k *KeepAlive) appendHead() []byte {
	h := k.header
	h.SetStatusCode(fasthttp.StatusOK)
	StreamHead(h, eventStream)
	k.closesAfter = k.closesAfter || k.server.stopping.Load()
	if k.isHTTP10 {
		h.SetContentLength(bodyUntilClose)
	} else {
		h.SetContentLength(-1) // chunked
	}
	if k.closesAfter {
		h.SetConnectionClose()
	}
	return h.AppendBytes(nil)
}

// bodyUntilClose is fasthttp's length of a body that ends with its connection.
const bodyUntilClose = -2

// Engines send this content type with streamed answers.
var eventStream = []byte("text/event-stream; charset=utf-8")

// StreamHead sets the fields of every streamed answer.
func StreamHead(h *fasthttp.ResponseHeader, contentType []byte) {
	h.SetContentTypeBytes(contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // tells nginx not to buffer
}

// An empty chunk would end the body.
func (k *KeepAlive) frame(dst, data []byte) []byte {
	if k.isHTTP10 || len(data) == 0 {
		return append(dst, data...)
	}
	dst = append(strconv.AppendInt(dst, int64(len(data)), 16), "\r\n"...)
	return append(append(dst, data...), "\r\n"...)
}
