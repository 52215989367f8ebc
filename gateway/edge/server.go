package edge

import (
	"cmp"
	"fmt"
	"net"
	"runtime/debug"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// A number below 0 counts as not set, too.
func (o Options) withDefaults() Options {
	o.MaxHead = cmp.Or(max(0, o.MaxHead), 16<<10)
	o.MaxBody = cmp.Or(max(0, o.MaxBody), 32<<20)
	o.MinUploadRate = cmp.Or(max(0, o.MinUploadRate), 256<<10)
	o.Concurrency = cmp.Or(max(0, o.Concurrency), 64<<10)
	o.ReadTimeout = cmp.Or(max(0, o.ReadTimeout), 30*time.Second)
	o.IdleTimeout = cmp.Or(max(0, o.IdleTimeout), 120*time.Second)
	o.Log = cmp.Or(o.Log, zap.NewNop())
	o.Bodies = cmp.Or(o.Bodies, NewBodies(0))
	if o.Answer == nil {
		o.Answer = AnswerJSON
	}
	if o.Refused == nil {
		o.Refused = func(*fasthttp.RequestHeader, Refusal) {}
	}
	return o
}

// NewServer returns a server to Serve on a Listener, or on tls.NewListener around one, and to end
// with Drain.
//
// fasthttp's WriteTimeout would bound a whole answer and cut long streams; the Listener bounds each
// write instead.
func NewServer(o Options) *Server {
	o = o.withDefaults()
	return &Server{options: &o, Server: &fasthttp.Server{
		Handler:        o.serve,
		HeaderReceived: withoutBody,
		ErrorHandler:   o.answerUnreadable,
		ReadBufferSize: o.MaxHead,
		ReadTimeout:    o.ReadTimeout,
		IdleTimeout:    o.IdleTimeout,
		Concurrency:    o.Concurrency,

		// With the default of 10 s, goroutines would keep their stacks for 10 s after a burst of
		// requests, although event loops already carry the answers.
		MaxIdleWorkerDuration: time.Second,
		CloseOnShutdown:       true,
		KeepHijackedConns:     true, // a Hijacked still uses the connection
		ReduceMemoryUsage:     true, // otherwise each running stream holds a read buffer of 16 KiB

		NoDefaultServerHeader:        true,
		SecureErrorLogMessage:        true, // otherwise errors quote request heads, with API keys
		DisablePreParseMultipartForm: true, // no endpoint needs multipart bodies parsed
		Logger:                       logger{o.Log},
	}}
}

// withoutBody lets package edge read the body. RawHeaders still has the head as received. Without
// the header Expect, fasthttp sends no 100 Continue; upload.read sends it if the body is wanted.
func withoutBody(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	if h.ContentLength() != 0 { // below 0 if chunked
		h.SetContentLength(0)
	}
	if len(h.Peek(fasthttp.HeaderExpect)) > 0 {
		h.Del(fasthttp.HeaderExpect)
	}
	return fasthttp.RequestConfig{}
}

// serve recovers a panic of the handler: fasthttp does not, and it would end the process.
func (o *Options) serve(ctx *fasthttp.RequestCtx) {
	defer func() {
		if v := recover(); v != nil {
			o.Log.Error("edge: panic in a handler", zap.Any("panic", v), zap.ByteString("method", ctx.Method()),
				zap.ByteString("path", ctx.Path()), zap.ByteString("stack", debug.Stack()))
			o.answerPanic(ctx)
		}
	}()
	h := headConnOf(ctx)
	f, why := parseHead(ctx.Request.Header.Protocol(), ctx.Request.Header.RawHeaders())
	if h.head.bareLF { // it may be the request line, which parseHead does not see
		why = "a header line does not end in CRLF"
	}
	if why != "" {
		r := refusedHead
		r.Message = why
		o.refuse(ctx, r) // closes the connection, because the beginning of the next request is not known
		return
	}
	if r := o.receiveBody(ctx, h, f); r != nil {
		o.refuse(ctx, *r)
		return
	}
	defer func() { // otherwise its memory would be charged until the answer ends
		if !h.bodyAcquired {
			_, reservation := AcquireBody(ctx)
			reservation.Release()
		}
	}()
	if fromListener := h.client != nil; fromListener {
		h.client.writeWaitNanos.Store(0) // MaxLag is for each answer
	}
	h.keepAlive = nil // of the connection's previous request
	if h.server.stopping.Load() {
		// With CloseOnShutdown, fasthttp does this only until its Shutdown returns, which does not wait
		// for hijacked connections.
		ctx.SetConnectionClose()
	}
	o.Handler(ctx)
}

func (o *Options) answerPanic(ctx *fasthttp.RequestCtx) {
	if h := headConnOf(ctx); h != nil {
		h.reservation.Release() // the handler could not end it
	}
	c, fromListener := ConnOf(ctx) // otherwise neither a callback nor a KeepAlive
	headSent := false
	if fromListener {
		c.OnGone(nil)                 // the handler's callback must not run any more
		headSent = StopKeepAlive(ctx) // with status 200, by a comment
	}
	if headSent {
		cutAnswer(ctx, c)
		return
	}
	ctx.Response.Reset() // also closes a body stream
	o.refuse(ctx, refusedPanic)
}

// cutAnswer shows the client, which has the head, that the answer is incomplete. It takes the
// connection from fasthttp, which would write a second head; the hijack then calls Close, as reset
// demands.
func cutAnswer(ctx *fasthttp.RequestCtx, c *Conn) {
	if conn := ctx.Conn(); !ctx.Hijacked() { // else the hijack's own function closes it
		ctx.HijackSetNoResponse(true)
		ctx.Hijack(func(net.Conn) { _ = conn.Close() })
	}
	c.reset()
}

// answerUnreadable is fasthttp's ErrorHandler for heads that it could not read. It closes the
// connection afterwards.
func (o *Options) answerUnreadable(ctx *fasthttp.RequestCtx, err error) {
	o.refuse(ctx, refusalOf(ctx, err, o.MaxHead))
}

// refuse closes the connection, because the rest of the request is not read.
func (o *Options) refuse(ctx *fasthttp.RequestCtx, r Refusal) {
	// A client that was too slow gets no further time.
	tooSlow := r.Status == fasthttp.StatusRequestTimeout
	if c, ok := ConnOf(ctx); ok && !tooSlow {
		c.linger.Store(true) // see Conn.Close
	}
	o.Refused(&ctx.Request.Header, r)
	o.Answer(ctx, r)
	ctx.SetConnectionClose()
}

// logger takes what fasthttp says about single connections: the gateway logs the end of each
// request itself.
type logger struct{ log *zap.Logger }

func (l logger) Printf(format string, args ...any) {
	if l.log.Core().Enabled(zap.DebugLevel) {
		l.log.Debug("edge: " + fmt.Sprintf(format, args...))
	}
}
