package edge

import (
	"fmt"
	"runtime/debug"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// Options are the limits of a server; a zero value means the default named.
type Options struct {
	// Handler serves one request. It may panic: the client gets a 500, the log the stack.
	Handler fasthttp.RequestHandler
	// Answer writes a refusal as the answer of ctx (default: OpenAI's error
	// object). ctx.Request may be empty or half read.
	Answer func(ctx *fasthttp.RequestCtx, r Refusal)
	Log    *zap.Logger // default: none

	// Stranger, if set, tells from the head alone that a request will be refused,
	// and how; nil lets it pass. A body of more than 4 KiB is then not read: else
	// anybody could have MaxBody of memory on each connection.
	Stranger func(h *fasthttp.RequestHeader) *Refusal

	// Bodies, if set, bounds the memory of all bodies together. Those up to 4 KiB
	// are always read: they are no more than a connection's own buffers.
	Bodies *Bodies
	// Refused, if set, hears of every refusal that the handler never saw.
	Refused func(Refusal)

	MaxHead int // bytes of request line and headers (16 KiB); more: 431
	MaxBody int // bytes of body (32 MiB, contract 10); more: 413

	// ReadTimeout bounds a request from its first byte to its last (30 s; 408).
	// MinUploadRate, in bytes a second (256 KiB), extends it for what a large
	// body takes at that rate: 128 s more for 32 MiB, or for a body of unknown size.
	ReadTimeout   time.Duration
	MinUploadRate int
	IdleTimeout   time.Duration // of a connection between requests (120 s: longer than common clients keep theirs)

	// Concurrency is how many connections are served at once (65,536). Keep the
	// listener's MaxConns below it: that one refuses without blocking accept.
	Concurrency int

	reading *reading
}

func (o Options) withDefaults() Options {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.MaxHead, 16<<10)
	def(&o.MaxBody, 32<<20)
	def(&o.MinUploadRate, 256<<10)
	def(&o.Concurrency, 64<<10)
	if o.ReadTimeout <= 0 {
		o.ReadTimeout = 30 * time.Second
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = 120 * time.Second
	}
	if o.Answer == nil {
		o.Answer = answerJSON
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.Bodies == nil {
		o.Bodies = NewBodies(0)
	}
	if o.Refused == nil {
		o.Refused = func(Refusal) {}
	}
	o.reading = &reading{bodies: o.Bodies, taken: map[*fasthttp.RequestHeader]int{}}
	return o
}

// NewServer returns a fasthttp server with the limits set. Serve it on a
// Listener, for TLS on tls.NewListener(listener, config), and end it with Drain.
//
// There is no WriteTimeout: fasthttp's is for a whole answer and would cut
// long streams; the Listener has one per write.
func NewServer(o Options) *fasthttp.Server {
	o = o.withDefaults()
	return &fasthttp.Server{
		Handler: o.guard,
		HeaderReceived: func(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
			limit := o.maxBody(h)
			return fasthttp.RequestConfig{ReadTimeout: o.uploadTime(h, limit), MaxRequestBodySize: limit}
		},
		ErrorHandler:       o.refuse,
		ReadBufferSize:     o.MaxHead,
		MaxRequestBodySize: o.MaxBody,
		ReadTimeout:        o.ReadTimeout,
		IdleTimeout:        o.IdleTimeout,
		Concurrency:        o.Concurrency,
		CloseOnShutdown:    true,
		ReduceMemoryUsage:  true, // a stream holds no 16 KiB read buffer while it runs

		NoDefaultServerHeader:        true,
		SecureErrorLogMessage:        true, // without it errors quote request heads, keys included
		DisablePreParseMultipartForm: true, // we serve none: a body is bytes
		Logger:                       logger{o.Log},
	}
}

// guard keeps what a handler does to itself away from everybody else: fasthttp
// recovers no panic, it would end the process.
func (o *Options) guard(ctx *fasthttp.RequestCtx) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		o.Log.Error("edge: panic in a handler", zap.Any("panic", v), zap.ByteString("method", ctx.Method()),
			zap.ByteString("path", ctx.Path()), zap.ByteString("stack", debug.Stack()))
		if c, ok := ConnOf(ctx); ok {
			c.OnGone(nil)
		}
		ctx.Response.Reset() // also closes a stream that was set
		o.Refused(refusedPanic)
		o.Answer(ctx, refusedPanic)
		ctx.SetConnectionClose()
	}()
	o.reading.end(&ctx.Request.Header) // the handler has it now
	if c, ok := ConnOf(ctx); ok {
		c.lagged.Store(0)
	}
	if why := malformed(ctx.Request.Header.Protocol(), ctx.Request.Header.RawHeaders()); why != "" {
		r := refusedHead
		r.Message = why
		o.Refused(r)
		o.Answer(ctx, r)
		ctx.SetConnectionClose() // who knows where the next request begins
		return
	}
	o.Handler(ctx)
}

// refuse is fasthttp's ErrorHandler: it starts at status 200, and the
// connection is closed after it.
func (o *Options) refuse(ctx *fasthttp.RequestCtx, err error) {
	r := refusalOf(ctx, err, o.MaxHead, o.MaxBody)
	if o.reading.end(&ctx.Request.Header) {
		r = refusedBodies
	}
	if stranger := o.stranger(&ctx.Request.Header); stranger != nil && r.Status == fasthttp.StatusRequestEntityTooLarge {
		r = *stranger
	}
	if c, ok := ConnOf(ctx); ok && r.Status != fasthttp.StatusRequestTimeout {
		c.linger.Store(true) // it may be sending still
	}
	o.Refused(r)
	o.Answer(ctx, r)
}

// smallBody is what is read of a body whose request will be refused: enough
// to answer an honest mistake without closing the connection.
const smallBody = 4 << 10

// maxBody bounds the body of one request. Only those that may be large are
// looked at twice.
func (o *Options) maxBody(h *fasthttp.RequestHeader) int {
	size := h.ContentLength()
	if size != -1 && size <= smallBody {
		return o.MaxBody
	}
	if size == -1 { // chunked
		size = o.MaxBody
	}
	if o.stranger(h) == nil && (size > o.MaxBody || o.reading.begin(h, size)) {
		return o.MaxBody
	}
	return min(smallBody, o.MaxBody)
}

func (o *Options) stranger(h *fasthttp.RequestHeader) *Refusal {
	if o.Stranger == nil {
		return nil
	}
	return o.Stranger(h)
}

// uploadTime is ReadTimeout plus what the body takes at the slowest rate we accept.
func (o *Options) uploadTime(h *fasthttp.RequestHeader, maxBody int) time.Duration {
	size := h.ContentLength()
	switch {
	case size == -1 || size > maxBody: // chunked, or refused in a moment
		size = maxBody
	case size < 0: // no body
		size = 0
	}
	return o.ReadTimeout + time.Duration(float64(size)/float64(o.MinUploadRate)*float64(time.Second))
}

// logger takes fasthttp's lines about single connections, for whoever debugs
// one: what a request came to is the gateway's to log.
type logger struct{ log *zap.Logger }

func (l logger) Printf(format string, args ...any) {
	if l.log.Core().Enabled(zap.DebugLevel) {
		l.log.Debug("edge: " + fmt.Sprintf(format, args...))
	}
}
