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

// A KeepAlive sends SSE comments to a client that waits for events, because other proxies close a silent connection. The client gets a
// comment each time it has waited for interval. If no event has come yet, the first comment is sent with the head of the answer, whose
// status is 200. This status stays even if the request fails later.
//
// Only the goroutine that answers the request may use a KeepAlive. Its timer uses the connection and the head only during a wait,
// between startTimer and stopTimer.
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

// A headState says whether the head of an answer was sent, and whether with a comment or with an event.
type headState uint8

const (
	headNotSent       headState = iota // the head was not sent, so the status may still change
	headSentByComment                  // the head went out with a comment
	headSentByAnswer                   // the head went out with the first event
)

// afterComment says whether the next comment must be sent together with the head, and returns the state after that comment.
func (s headState) afterComment() (needsHead bool, next headState) {
	if s == headNotSent {
		return true, headSentByComment
	}
	return false, s
}

// StartKeepAlive sends a comment to the client of ctx once per interval, the first one at interval after the time since, until
// StopKeepAlive is called. It sends none if interval is 0 or less, if the request is a HEAD, or if the client did not come through a
// Listener of a Server of this package. Before StopKeepAlive, the handler must not touch ctx's answer.
func StartKeepAlive(ctx *fasthttp.RequestCtx, interval time.Duration, since time.Time, comment []byte, log *zap.Logger) {
	h := headConnOf(ctx)
	fromListener := h != nil && h.client != nil && h.server != nil
	if interval <= 0 || !fromListener || ctx.IsHead() {
		return
	}
	isHTTP10 := !ctx.Request.Header.IsHTTP11() // without chunks, only the end of the connection ends the body
	closeWanted := ctx.Request.Header.ConnectionClose() || ctx.Response.ConnectionClose()
	// Once a comment has sent the head, fasthttp cannot end the answer. evenkeel then takes the connection from fasthttp, writes the
	// answer and waits for the client's next request itself. It waits at the client's socket, where a request over TLS cannot be read,
	// so with TLS the connection is closed instead.
	canReadNext := !ctx.IsTLS()
	k := &KeepAlive{
		interval: interval, comment: comment, log: log, client: h.client, conn: ctx.Conn(), header: &ctx.Response.Header, server: h.server,
		isHTTP10: isHTTP10, closesAfter: closeWanted || isHTTP10 || !canReadNext,
	}
	h.keepAlive = k
	k.startTimer(time.Until(since.Add(interval)))
}

// StopKeepAlive stops the comments that StartKeepAlive began. It returns true if a comment has sent the head of the answer, so
// that only events may follow.
func StopKeepAlive(ctx *fasthttp.RequestCtx) (headSent bool) {
	h := headConnOf(ctx)
	return h != nil && h.keepAlive.stopTimer() == headSentByComment
}

// startTimer begins a wait of the client, or restarts the current one. The client gets its first comment after the time first, and then one
// per interval. Nothing happens if k is nil.
func (k *KeepAlive) startTimer(first time.Duration) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.isWaiting = true
	if k.timer == nil { // this is the first wait
		k.timer = time.AfterFunc(max(0, first), k.sendComment)
	} else {
		k.timer.Reset(max(0, first))
	}
}

// StartTimer begins a wait for the next event, during which the client gets comments. It does nothing before the head of
// the answer is written. It reads headState without the lock, because the timer changes it only during a wait.
func (k *KeepAlive) StartTimer() {
	if k != nil && k.headState != headNotSent {
		k.startTimer(k.interval)
	}
}

// StopTimer ends a wait: the client gets no more comments until the next StartTimer.
func (k *KeepAlive) StopTimer() { k.stopTimer() }

// stopTimer ends a wait, and returns whether the head was sent, and how. A nil KeepAlive has sent no head.
func (k *KeepAlive) stopTimer() headState {
	if k == nil {
		return headNotSent
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.isWaiting = false
	if k.timer != nil {
		k.timer.Stop() // if the timer has fired already, sendComment sees that the wait is over
	}
	return k.headState
}

// recordHeadWritten records that the answer has sent the head, unless a comment had sent it before. From then on, comments are sent
// without a head. It first ends the client's wait for an event, if there is one. Outside a wait, the timer does not use headState, so no
// lock is needed to read and set it. Nothing happens if k is nil.
func (k *KeepAlive) recordHeadWritten() {
	if k == nil {
		return
	}
	k.stopTimer()
	if k.headState == headNotSent {
		k.headState = headSentByAnswer
	}
}

// Interval returns how long the client waits for an event before it gets a comment; 0: it gets none.
func (k *KeepAlive) Interval() time.Duration {
	if k == nil {
		return 0
	}
	return k.interval
}

// Comment returns the bytes of the comment, without the framing of a chunk.
func (k *KeepAlive) Comment() []byte { return k.comment }

// sendComment writes a comment if the client still waits for an event. The timer calls it.
func (k *KeepAlive) sendComment() {
	defer func() { // a panic on the timer's goroutine would end the process
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
		k.isWaiting = false // no more comments: the connection is broken, so the next write of the answer fails, too
		return
	}
	k.timer.Reset(k.interval)
}

// appendHead returns the head of an answer that has no event yet: a stream with status 200. It also sets this head in the response, and
// decides whether the connection is closed after the answer, which the head tells the client.
func (k *KeepAlive) appendHead() []byte {
	h := k.header
	h.SetStatusCode(fasthttp.StatusOK)
	StreamHead(h, eventStream)
	k.closesAfter = k.closesAfter || k.server.stopping.Load()
	if k.isHTTP10 {
		h.SetContentLength(bodyUntilClose)
	} else {
		h.SetContentLength(-1) // -1: the body comes in chunks
	}
	if k.closesAfter {
		h.SetConnectionClose()
	}
	return h.AppendBytes(nil)
}

// bodyUntilClose is fasthttp's content length for a body that ends when its connection is closed.
const bodyUntilClose = -2

// eventStream is the content type of streamed answers, as engines send it.
var eventStream = []byte("text/event-stream; charset=utf-8")

// StreamHead sets the header fields that every streamed answer has.
func StreamHead(h *fasthttp.ResponseHeader, contentType []byte) {
	h.SetContentTypeBytes(contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // tells nginx not to buffer the answer
}

// frame appends data to dst as a chunk, or as it is for a client of HTTP/1.0, which has no chunks. Empty data adds nothing, because an
// empty chunk would end the body.
func (k *KeepAlive) frame(dst, data []byte) []byte {
	if k.isHTTP10 || len(data) == 0 {
		return append(dst, data...)
	}
	dst = append(strconv.AppendInt(dst, int64(len(data)), 16), "\r\n"...)
	return append(append(dst, data...), "\r\n"...)
}
