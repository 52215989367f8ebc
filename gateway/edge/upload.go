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

// firstBufferSize is the largest buffer, in bytes, that a body gets before any of it has arrived. Most bodies are shorter, and get
// a buffer of their own length.
const firstBufferSize = 64 << 10

// Reading a body ends with one of these errors, or with an error of the connection.
var (
	errBodyTooLarge = errors.New("edge: the body is too large")
	errNoRoom       = errors.New("edge: bodies fill their budget")
)

// upload reads one request body, and charges its memory before it allocates it.
type upload struct {
	o           *Options
	headConn    *headConn
	framing     framing
	limit       int // most bytes that the body may have
	began       time.Time
	reservation *Reservation
	buf         []byte
}

// AcquireBody gives the body of a request to the handler, with the reservation for its memory. The handler must release the reservation
// when it no longer needs the body. If the handler does not call AcquireBody, the server frees the body when the handler returns.
func AcquireBody(ctx *fasthttp.RequestCtx) ([]byte, *Reservation) {
	var r *Reservation
	if h := headConnOf(ctx); h != nil {
		r, h.bodyAcquired = h.reservation, true
	}
	return ctx.Request.SwapBody(nil), r
}

// receiveBody reads the body of a request whose head has been read, and makes it the body of ctx. It returns a refusal if the head
// alone is a reason for one, if the body is too large, if the quota has no room, or if reading fails. The connection ends after a
// refusal. If the head is the reason, the body is not read. The exception is a small body of a caller whom Authenticate refuses: it is
// read, and the handler then refuses the request, so that the connection stays open.
func (o *Options) receiveBody(ctx *fasthttp.RequestCtx, conn *headConn, f framing) *Refusal {
	conn.reservation, conn.bodyAcquired = nil, false // both were about the connection's previous request
	if !f.chunked && f.length == 0 {
		conn.head = headScanner{} // the next bytes belong to the next request
		return nil
	}
	h := &ctx.Request.Header
	authRefusal := o.authenticate(h, f)
	u := upload{o: o, headConn: conn, framing: f, limit: o.MaxBody, began: time.Now(),
		reservation: &Reservation{quota: o.Bodies, caller: o.callerOf(h, conn)}}
	if authRefusal != nil {
		u.limit = min(smallBody, o.MaxBody) // a body up to this size is read, and left to the handler to refuse
	}
	if r := u.refusalByHead(authRefusal); r != nil {
		return r
	}
	if err := u.read(); err != nil {
		u.reservation.Release()
		// A chunked body that turned out too large gets authRefusal, if there is one.
		return o.bodyRefusal(ctx, err, authRefusal)
	}
	conn.head, conn.reservation = headScanner{}, u.reservation // the next bytes belong to the next request
	ctx.Request.SwapBody(u.buf)
	h.SetContentLength(len(u.buf))
	return nil
}

// refusalByHead returns the refusal of a request whose body is not to be read, because of its length or because of authRefusal; nil: the
// body is to be read. The length of a chunked body is 0 here, so read must check it.
func (u *upload) refusalByHead(authRefusal *Refusal) *Refusal {
	isRefusedCaller, tooLong := authRefusal != nil, u.framing.length > u.limit
	switch {
	// A small body of a refused caller is read, so that the connection can stay open. If the client waits for 100 Continue, it is
	// refused before it sends a body.
	case isRefusedCaller && (tooLong || u.framing.awaitsContinue):
		return authRefusal
	case tooLong:
		return u.o.tooLarge()
	case !u.reservation.fits(u.framing.length):
		return &noRoomForBody
	}
	return nil
}

// authenticate returns the refusal of a request whose head Authenticate does not accept; nil: it accepts the head, or it was not
// asked because the body is small.
func (o *Options) authenticate(h *fasthttp.RequestHeader, f framing) *Refusal {
	mayBeLarge := f.chunked || f.length > smallBody
	askNow := mayBeLarge || f.awaitsContinue // a client that waits for 100 Continue can be refused before it sends its body
	if o.Authenticate == nil || !askNow {
		return nil
	}
	return o.Authenticate(h)
}

// bodyRefusal returns the refusal of a request whose body could not be read because of err. If authRefusal is not nil, the caller is
// refused, and only a body up to smallBody was to be read. A larger body then gets authRefusal, and no refusal about its size.
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

// callerOf returns the caller to which the body of a request is charged: the one that the option Caller names or, without a
// name, the client's address.
func (o *Options) callerOf(h *fasthttp.RequestHeader, conn *headConn) (c caller) {
	if o.Caller != nil {
		c.name = o.Caller(h)
	}
	if c.name == "" && conn.client != nil {
		c.addr = conn.client.ip
	}
	return c
}

// read reads the whole body into buf. If the client waits for 100 Continue, read sends 100 Continue first. If the whole body has arrived
// with the head, and nothing after it, buf is the memory in which it arrived, without a copy.
func (u *upload) read() error {
	if h := u.headConn; !u.framing.chunked && len(h.unread) == u.framing.length {
		u.buf = h.unread
		h.unread = nil
		if !u.reservation.Acquire(len(u.buf)) {
			return errNoRoom
		}
		return nil
	}
	if u.framing.awaitsContinue && len(u.headConn.unread) == 0 { // a client that sends its body already does not wait any more
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
	// br may have read beyond the body. These bytes belong to the next request, and come before those that are still in unread.
	if nextRequest, _ := br.Peek(br.Buffered()); err == nil && len(nextRequest) > 0 {
		u.headConn.unread = append(bytes.Clone(nextRequest), u.headConn.unread...)
	}
	br.Reset(nil) // so that a reader in the pool keeps no connection
	readers.Put(br)
	return err
}

// readers is a pool of readers for chunked bodies. The size of their buffer, 4 KiB, bounds a line of the chunk framing.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

// copyFrom reads the next n bytes of the body into buf, which grows as needed.
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
		if err != nil && n > 0 { // an error after the body's last byte does not concern the body
			return unexpectedEOF(err)
		}
	}
	return nil
}

// grow makes buf larger in proportion to the bytes that have arrived, and extends the read deadline in the same proportion. A client that
// announces much and sends little therefore gets little memory and little time. If the length of the body is known, buf grows in larger
// steps, but never beyond that length.
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

// uploadTime returns how long a body of this size may take: ReadTimeout plus the time for the bytes at MinUploadRate.
func (o *Options) uploadTime(bytes int) time.Duration {
	return o.ReadTimeout + time.Duration(float64(bytes)/float64(o.MinUploadRate)*float64(time.Second))
}

// unexpectedEOF turns io.EOF into io.ErrUnexpectedEOF, for a connection that ends in the middle of a body.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
