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

// A KeepAlive sends comments to a client that waits for events, because other proxies close a silent connection. The client gets a comment
// each time it has waited for span. If no event has come yet, the first comment is sent with the head of the answer, whose status is 200.
// This status stays even if the request fails later.
//
// Only the goroutine that answers may use a KeepAlive. Its timer uses the connection and the head only during a wait.
type KeepAlive struct {
	span    time.Duration
	comment []byte
	log     *zap.Logger

	client *Conn
	conn   net.Conn // the client's connection, above TLS
	header *fasthttp.ResponseHeader
	plain  bool // the client speaks HTTP/1.0, which has no chunks
	closes bool // the connection ends with the answer
	server *Server

	mu    sync.Mutex
	timer *time.Timer
	head  headState
	waits bool
}

// A headState says whether the head of an answer was sent, and whether with a comment or with an event.
type headState uint8

const (
	unopened headState = iota // the head was not sent, so the status may still change
	opened                    // the head went out with a comment
	answered                  // the head went out with the first event
)

// onComment returns whether the next comment must be sent with the head, and the state after this comment.
func (s headState) onComment() (head bool, next headState) {
	if s == unopened {
		return true, opened
	}
	return false, s
}

// KeepClient sends comments to ctx's client until EndWait: the first one at span after the time since. Before EndWait, the handler must not
// touch ctx's answer. KeepClient sends none if span is 0 or less, if the request is a HEAD, or if the client did not come through a
// Listener.
func StartKeepAlive(ctx *fasthttp.RequestCtx, span time.Duration, since time.Time, comment []byte, log *zap.Logger) {
	h := headConnOf(ctx)
	if span <= 0 || h == nil || h.client == nil || h.server == nil || ctx.IsHead() {
		return
	}
	plain := !ctx.Request.Header.IsHTTP11()
	closeWanted := ctx.Request.Header.ConnectionClose() || ctx.Response.ConnectionClose()
	k := &KeepAlive{
		span: span, comment: comment, log: log, client: h.client, conn: ctx.Conn(), header: &ctx.Response.Header, server: h.server,
		plain: plain, closes: closeWanted || plain || ctx.IsTLS(), // with TLS, await could not read the next request
	}
	h.alive = k
	k.wait(time.Until(since.Add(span)))
}

// EndWait ends the wait that KeepClient began. It returns true if the head of the answer was sent during the wait, so that only events may
// follow.
func StopKeepAlive(ctx *fasthttp.RequestCtx) bool {
	h := headConnOf(ctx)
	return h != nil && h.alive.over() == opened
}

// wait begins a wait. The client gets its first comment after the time first, and then one per span.
func (k *KeepAlive) wait(first time.Duration) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.waits = true; k.timer == nil {
		k.timer = time.AfterFunc(max(0, first), k.speak)
	} else {
		k.timer.Reset(max(0, first))
	}
}

// Wait begins a wait for the next event, if the head of the answer is out.
func (k *KeepAlive) StartTimer() {
	if k != nil && k.head != unopened {
		k.wait(k.span)
	}
}

// Over ends a wait: the client gets no more comments.
func (k *KeepAlive) StopTimer() { k.over() }

// over ends a wait, and returns the state of the head.
func (k *KeepAlive) over() headState {
	if k == nil {
		return unopened
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.waits = false; k.timer != nil {
		k.timer.Stop()
	}
	return k.head
}

// wrote ends the wait, and records that the answer's head was written.
func (k *KeepAlive) wrote() {
	if k != nil && k.over() == unopened {
		k.head = answered
	}
}

// Silence returns the time without an event after which the client gets a comment; 0: it gets none.
func (k *KeepAlive) Interval() time.Duration {
	if k == nil {
		return 0
	}
	return k.span
}

// Comment returns the bytes of the comment, without the framing of a chunk.
func (k *KeepAlive) Comment() []byte { return k.comment }

// speak writes a comment, if the client still waits.
func (k *KeepAlive) speak() {
	defer func() { // on the timer's goroutine a panic would end the process
		if v := recover(); v != nil {
			k.log.Error("edge: panic while keeping a client's connection alive", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			k.client.cut()
		}
	}()
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.waits {
		return
	}
	var out []byte
	head, next := k.head.onComment()
	if head {
		out = k.appendHead()
	}
	k.head = next
	if _, err := k.conn.Write(k.frame(out, k.comment)); err != nil {
		k.waits = false // no more comments: the connection is closed, so the next write of the answer fails, too
		return
	}
	k.timer.Reset(k.span)
}

// appendHead returns the head of an answer whose first event has not come.
func (k *KeepAlive) appendHead() []byte {
	h := k.header
	h.SetStatusCode(fasthttp.StatusOK)
	StreamHead(h, eventStream)
	k.closes = k.closes || k.server.stopping.Load()
	if k.plain {
		h.SetContentLength(identity)
	} else {
		h.SetContentLength(-1)
	}
	if k.closes {
		h.SetConnectionClose()
	}
	return h.AppendBytes(nil)
}

// identity is the value that fasthttp takes as the content length of a body that ends where its connection ends.
const identity = -2

// eventStream is the content type of streamed answers, as engines send it.
var eventStream = []byte("text/event-stream; charset=utf-8")

// StreamHead sets the header fields of every streamed answer.
func StreamHead(h *fasthttp.ResponseHeader, contentType []byte) {
	h.SetContentTypeBytes(contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // nginx must not buffer tokens
}

// frame appends data as a chunk, or unframed for a client of HTTP/1.0.
func (k *KeepAlive) frame(dst, data []byte) []byte {
	if k.plain || len(data) == 0 {
		return append(dst, data...)
	}
	dst = append(strconv.AppendInt(dst, int64(len(data)), 16), "\r\n"...)
	return append(append(dst, data...), "\r\n"...)
}
