package edge

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

// firstBufferSize is the largest buffer, in bytes, before any of a body has arrived. Most bodies
// are shorter, and get a buffer of their own length.
const firstBufferSize = 64 << 10

var (
	errBodyTooLarge = errors.New("edge: the body is too large")
	errNoRoom       = errors.New("edge: bodies fill their budget")
)

// upload charges a body's memory before it allocates it.
type upload struct {
	o           *Options
	headConn    *headConn
	framing     framing
	limit       int // most bytes that the body may have
	began       time.Time
	reservation *Reservation
	buf         []byte
}

// AcquireBody gives the handler the body and its reservation, which the handler must release.
// Without AcquireBody, the server frees the body when the handler returns.
func AcquireBody(ctx *fasthttp.RequestCtx) ([]byte, *Reservation) {
	var r *Reservation
	if h := headConnOf(ctx); h != nil {
		r, h.bodyAcquired = h.reservation, true
	}
	return ctx.Request.SwapBody(nil), r
}

// receiveBody makes the body that of ctx, or returns a refusal, after which the connection ends.
// The body is not read if the head is the reason, except a small body of a caller whom Authenticate
// refuses: the handler then refuses the request, so that the connection stays open.
func (o *Options) receiveBody(ctx *fasthttp.RequestCtx, conn *headConn, f framing) *Refusal {
	conn.reservation, conn.bodyAcquired = nil, false // of the connection's previous request
	if !f.chunked && f.length == 0 {
		conn.head = headScanner{} // the next bytes belong to the next request
		return nil
	}
	h := &ctx.Request.Header
	authRefusal := o.authenticate(h, f)
	u := upload{o: o, headConn: conn, framing: f, limit: o.MaxBody, began: time.Now(),
		reservation: &Reservation{quota: o.Bodies, caller: o.callerOf(h, conn)}}
	if authRefusal != nil {
		u.limit = min(smallBody, o.MaxBody) // a body up to this is read, and the handler refuses it
	}
	if r := u.refusalByHead(authRefusal); r != nil {
		return r
	}
	if err := u.read(); err != nil {
		u.reservation.Release()
		// A chunked body may have turned out too large.
		return o.bodyRefusal(ctx, err, authRefusal)
	}
	// The next bytes belong to the next request.
	conn.head, conn.reservation = headScanner{}, u.reservation
	ctx.Request.SwapBody(u.buf)
	h.SetContentLength(len(u.buf))
	return nil
}

// The length of a chunked body is 0 here, so read must check it.
func (u *upload) refusalByHead(authRefusal *Refusal) *Refusal {
	isRefusedCaller, tooLong := authRefusal != nil, u.framing.length > u.limit
	switch {
	// A small body of a refused caller is read. A client that waits for 100 Continue is refused before
	// it sends one.
	case isRefusedCaller && (tooLong || u.framing.awaitsContinue):
		return authRefusal
	case tooLong:
		return u.o.tooLarge()
	case !u.reservation.fits(u.framing.length):
		return &noRoomForBody
	}
	return nil
}

func (o *Options) authenticate(h *fasthttp.RequestHeader, f framing) *Refusal {
	mayBeLarge := f.chunked || f.length > smallBody
	askNow := mayBeLarge || f.awaitsContinue // a waiting client then need not send its body
	if o.Authenticate == nil || !askNow {
		return nil
	}
	return o.Authenticate(h)
}

// With authRefusal, only a body up to smallBody was to be read: a larger one gets it, too.
func (o *Options) bodyRefusal(ctx *fasthttp.RequestCtx, err error, authRefusal *Refusal) *Refusal {
	var bad errChunked
	switch {
	case errors.Is(err, errBodyTooLarge) && authRefusal != nil:
		return authRefusal
	case errors.Is(err, errBodyTooLarge):
		return o.tooLarge()
	case errors.Is(err, errNoRoom):
		return &noRoomForBody
	case errors.As(err, &bad):
		r := refusedRequest
		r.Message = string(bad)
		return &r
	}
	r := refusalOf(ctx, err, o.MaxHead)
	return &r
}

func (o *Options) callerOf(h *fasthttp.RequestHeader, conn *headConn) (c caller) {
	if o.Caller != nil {
		c.name = o.Caller(h)
	}
	if c.name == "" && conn.client != nil {
		c.addr = conn.client.ip
	}
	return c
}

// read sends 100 Continue if the client waits for it. If exactly the whole body has arrived with
// the head, buf is the memory in which it arrived, without a copy.
func (u *upload) read() error {
	if h := u.headConn; !u.framing.chunked && len(h.unread) == u.framing.length {
		u.buf = h.unread
		h.unread = nil
		if !u.reservation.Acquire(len(u.buf)) {
			return errNoRoom
		}
		return nil
	}
	if u.framing.awaitsContinue && len(u.headConn.unread) == 0 { // it does not wait any more
		if _, err := io.WriteString(u.headConn, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return err
		}
	}
	if !u.framing.chunked {
		return u.copyFrom(body{u.headConn}, u.framing.length)
	}
	br := readers.Get().(*bufio.Reader)
	br.Reset(body{u.headConn})
	err := u.readChunks(br)
	// br may have read beyond the body. These bytes come before those that are still in unread.
	if nextRequest, _ := br.Peek(br.Buffered()); err == nil && len(nextRequest) > 0 {
		u.headConn.unread = append(bytes.Clone(nextRequest), u.headConn.unread...)
	}
	br.Reset(nil) // a reader in the pool keeps no connection
	readers.Put(br)
	return err
}

// The size of the buffer, 4 KiB, bounds a line of the chunk framing.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

func (u *upload) copyFrom(src io.Reader, n int) error {
	for n > 0 {
		if len(u.buf) == cap(u.buf) {
			if err := u.grow(); err != nil {
				return err
			}
		}
		read, err := src.Read(u.buf[len(u.buf):min(cap(u.buf), len(u.buf)+n)])
		u.buf = u.buf[:len(u.buf)+read]
		n -= read
		if err != nil && n > 0 { // an error after the last byte does not concern the body
			return unexpectedEOF(err)
		}
	}
	return nil
}

// grow makes buf and the read deadline larger in proportion to the bytes that have arrived, so a
// client that announces much and sends little gets little memory and little time. If the length is
// known, the steps are larger, but never go beyond it.
func (u *upload) grow() error {
	newSize := min(u.limit, max(smallBody, 2*len(u.buf)))
	if !u.framing.chunked {
		newSize = min(u.framing.length, max(firstBufferSize, 8*len(u.buf)))
	}
	if !u.reservation.Acquire(newSize - cap(u.buf)) {
		return errNoRoom
	}
	if err := u.headConn.SetReadDeadline(u.began.Add(u.o.uploadTime(newSize))); err != nil {
		return err
	}
	larger := make([]byte, len(u.buf), newSize)
	copy(larger, u.buf)
	u.buf = larger
	return nil
}

func (o *Options) uploadTime(bytes int) time.Duration {
	return o.ReadTimeout + time.Duration(float64(bytes)/float64(o.MinUploadRate)*float64(time.Second))
}

func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
