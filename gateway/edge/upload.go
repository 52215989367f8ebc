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

// firstBufferSize bounds the buffer that a body gets before any of it has arrived, in bytes. Most bodies are shorter, and get a buffer of
// their own length.
const firstBufferSize = 64 << 10

// Besides errors of the connection, these errors end the reading of a body.
var (
	errBodyTooLarge = errors.New("edge: the body is too large")
	errNoRoom       = errors.New("edge: bodies fill their budget")
)

// upload reads one body.
type upload struct {
	o           *Options
	headConn    *headConn
	framing     framing
	limit       int // bytes of the body
	began       time.Time
	reservation *Reservation
	buf         []byte
}

// AcquireBody gives the body of a request to the handler, with the reservation for its memory. The handler ends the reservation when it no
// longer needs the body. If the handler does not acquire the body, the server frees it when the handler returns.
func AcquireBody(ctx *fasthttp.RequestCtx) ([]byte, *Reservation) {
	var r *Reservation
	if h := headConnOf(ctx); h != nil {
		r, h.bodyAcquired = h.reservation, true
	}
	return ctx.Request.SwapBody(nil), r
}

// receiveBody reads the body of a request whose head has been read, and makes it the body of ctx. It returns a refusal if the head alone
// decides it, if the body is too large, if the quota has no room, or if reading fails. Whatever is refused by the head is not read, except
// a small body of a caller whom Authenticate refuses: the handler refuses this request, and the connection stays open.
func (o *Options) receiveBody(ctx *fasthttp.RequestCtx, conn *headConn, f framing) *Refusal {
	conn.reservation, conn.bodyAcquired = nil, false
	if !f.chunked && f.length == 0 {
		conn.head = headScanner{} // the next bytes belong to the next request
		return nil
	}
	h := &ctx.Request.Header
	authRefusal := o.authenticate(h, f)
	u := upload{o: o, headConn: conn, framing: f, limit: o.MaxBody, began: time.Now(),
		reservation: &Reservation{quota: o.Bodies, caller: o.callerOf(h, conn)}}
	if authRefusal != nil {
		u.limit = min(smallBody, o.MaxBody) // up to this, the handler refuses the request, and the connection stays open
	}
	switch {
	case authRefusal != nil && (f.length > u.limit || f.expect):
		return authRefusal
	case f.length > u.limit:
		return o.tooLarge()
	case !u.reservation.fits(f.length):
		return &refusedBodies
	}
	if err := u.read(); err != nil {
		u.reservation.Release()
		return o.bodyRefusal(ctx, err, authRefusal)
	}
	conn.head, conn.reservation = headScanner{}, u.reservation // the next bytes belong to the next request
	ctx.Request.SwapBody(u.buf)
	h.SetContentLength(len(u.buf))
	return nil
}

// authenticate returns the refusal of a caller whose head Authenticate rules out; nil: the head is in order, or it need not be checked,
// because the body is small.
func (o *Options) authenticate(h *fasthttp.RequestHeader, f framing) *Refusal {
	mayBeLarge := f.chunked || f.length > smallBody
	if o.Authenticate == nil || !mayBeLarge && !f.expect { // a client that expects 100 Continue can be refused before it sends
		return nil
	}
	return o.Authenticate(h)
}

// bodyRefusal returns the refusal of a request whose body could not be read. If authRefusal is not nil, the body was read only up to
// smallBody, and a larger one is refused by authRefusal.
func (o *Options) bodyRefusal(ctx *fasthttp.RequestCtx, err error, authRefusal *Refusal) *Refusal {
	var bad errChunked
	switch {
	case errors.Is(err, errBodyTooLarge) && authRefusal != nil:
		return authRefusal
	case errors.Is(err, errBodyTooLarge):
		return o.tooLarge()
	case errors.Is(err, errNoRoom):
		return &refusedBodies
	case errors.As(err, &bad):
		r := refusedRequest
		r.Message = string(bad)
		return &r
	}
	r := refusalOf(ctx, err, o.MaxHead)
	return &r
}

// callerOf returns who is charged for the body of a request: the caller that the option Caller names or, without a name, the client's
// address.
func (o *Options) callerOf(h *fasthttp.RequestHeader, conn *headConn) (c caller) {
	if o.Caller != nil {
		c.name = o.Caller(h)
	}
	if c.name == "" && conn.client != nil {
		c.addr = conn.client.ip
	}
	return c
}

// read reads the whole body into buf. If the client waits for 100 Continue, it sends this first.
func (u *upload) read() error {
	if h := u.headConn; !u.framing.chunked && len(h.unread) == u.framing.length { // the whole body came with the head, and nothing after it
		u.buf = h.unread
		h.unread = nil
		if !u.reservation.Acquire(len(u.buf)) {
			return errNoRoom
		}
		return nil
	}
	if u.framing.expect && len(u.headConn.unread) == 0 {
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
	if nextRequest, _ := br.Peek(br.Buffered()); err == nil && len(nextRequest) > 0 {
		u.headConn.unread = append(bytes.Clone(nextRequest), u.headConn.unread...)
	}
	br.Reset(nil)
	readers.Put(br)
	return err
}

// readers is a pool of readers for chunked bodies. Their buffer size bounds a line of the framing.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

// copyFrom reads the next n bytes of the body.
func (u *upload) copyFrom(src io.Reader, n int) error {
	for n > 0 {
		if len(u.buf) == cap(u.buf) {
			if err := u.grow(); err != nil {
				return err
			}
		}
		k, err := src.Read(u.buf[len(u.buf):min(cap(u.buf), len(u.buf)+n)])
		u.buf = u.buf[:len(u.buf)+k]
		n -= k
		if err != nil && n > 0 { // an error after the last byte does not concern the body
			return unexpectedEOF(err)
		}
	}
	return nil
}

// grow makes room in proportion to the bytes that have arrived, and extends the read deadline in the same proportion. A caller that
// announces much and sends little therefore gets little memory and little time. If the length is known, the room grows in larger steps,
// but never beyond that length.
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

// uploadTime returns ReadTimeout plus the time that the bytes take at MinUploadRate.
func (o *Options) uploadTime(bytes int) time.Duration {
	return o.ReadTimeout + time.Duration(float64(bytes)/float64(o.MinUploadRate)*float64(time.Second))
}

// unexpectedEOF turns io.EOF in the middle of a body into io.ErrUnexpectedEOF.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
