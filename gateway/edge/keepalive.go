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

// A KeepAlive keeps the connection of a client alive that waits for events, because proxies on its way close one on which
// nothing moves. When the client has waited for so long, it gets a comment, and another one after each such time. Before the
// first event the head of the answer goes out with the comment. From then on the status is 200, whatever becomes of the request.
//
// It belongs to the goroutine that answers. The timer has the connection and the head only while a wait is under way.
type KeepAlive struct {
	span    time.Duration
	comment []byte
	log     *zap.Logger

	client *Conn
	conn   net.Conn // above TLS
	header *fasthttp.ResponseHeader
	plain  bool // the client speaks HTTP/1.0, which has no chunks
	closes bool // the connection ends with the answer
	server *Server

	mu    sync.Mutex
	timer *time.Timer
	head  opening
	waits bool
}

// An opening says how far the head of an answer is.
type opening uint8

const (
	unopened opening = iota // the answer has no status yet
	opened                  // the head went out with a comment
	answered                // the head went out with the first event
)

// says is what a client gets that has waited for long enough, and how far the head is then.
func (o opening) says() (head bool, next opening) {
	if o == unopened {
		return true, opened
	}
	return false, o
}

// KeepClient begins the wait of ctx's client, who has waited since a moment already. It ends with EndWait. Until then nothing of
// ctx's answer may be touched.
func KeepClient(ctx *fasthttp.RequestCtx, span time.Duration, since time.Time, comment []byte, log *zap.Logger) {
	w := wireOf(ctx)
	if span <= 0 || w == nil || w.client == nil || w.server == nil || ctx.IsHead() {
		return
	}
	k := &KeepAlive{
		span: span, comment: comment, log: log, client: w.client, conn: ctx.Conn(), header: &ctx.Response.Header, server: w.server,
		plain: !ctx.Request.Header.IsHTTP11(), closes: !ctx.Request.Header.IsHTTP11() || ctx.IsTLS() || ctx.Request.Header.ConnectionClose() ||
			ctx.Response.ConnectionClose(),
	}
	w.alive = k
	k.wait(time.Until(since.Add(span)))
}

// EndWait ends the wait of ctx's client, and says whether the head of the answer went out meanwhile: then the rest is events.
func EndWait(ctx *fasthttp.RequestCtx) bool {
	w := wireOf(ctx)
	return w != nil && w.alive.over() == opened
}

// wait begins a wait. A comment goes out after a first time, and then after each span.
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
func (k *KeepAlive) Wait() {
	if k != nil && k.head != unopened {
		k.wait(k.span)
	}
}

// Over ends a wait. The timer does nothing more.
func (k *KeepAlive) Over() { k.over() }

// over also says how far the head is.
func (k *KeepAlive) over() opening {
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

// wrote notes that the answer's head is out.
func (k *KeepAlive) wrote() {
	if k != nil && k.over() == unopened {
		k.head = answered
	}
}

// Silence is after which time without an event the client gets a comment; 0: it gets none.
func (k *KeepAlive) Silence() time.Duration {
	if k == nil {
		return 0
	}
	return k.span
}

// Comment is what the client gets.
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
	head, next := k.head.says()
	if head {
		out = k.appendHead()
	}
	k.head = next
	if _, err := k.conn.Write(k.frame(out, k.comment)); err != nil {
		k.waits = false // the connection is given up, and whoever answers hears of it
		return
	}
	k.timer.Reset(k.span)
}

// appendHead makes the head of an answer that is not there yet.
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

// identity is fasthttp's length of a body that ends with its connection.
const identity = -2

// eventStream is the type of the answer, as engines have it.
var eventStream = []byte("text/event-stream; charset=utf-8")

// StreamHead sets what the head of each streamed answer has.
func StreamHead(h *fasthttp.ResponseHeader, contentType []byte) {
	h.SetContentTypeBytes(contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // an nginx in front must not gather tokens
}

// frame appends data as the client's protocol wants it.
func (k *KeepAlive) frame(dst, data []byte) []byte {
	if k.plain || len(data) == 0 {
		return append(dst, data...)
	}
	dst = append(strconv.AppendInt(dst, int64(len(data)), 16), "\r\n"...)
	return append(append(dst, data...), "\r\n"...)
}
