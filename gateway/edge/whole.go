package edge

import (
	"io"

	"github.com/valyala/fasthttp"
)

// ChargeAnswer charges the n bytes of an answer to ctx's caller, unless the connection's buffers
// hold them; false: nothing is charged.
func ChargeAnswer(ctx *fasthttp.RequestCtx, n int) (memory *Reservation, ok bool) {
	if n <= smallBody {
		return nil, true
	}
	memory = NewAnswer(ctx)
	return memory, memory.Acquire(n)
}

// NewAnswer returns an empty reservation of the request's caller, on the quota for bodies; nil: no
// Server of this package has accepted the connection.
func NewAnswer(ctx *fasthttp.RequestCtx) *Reservation {
	h := headConnOf(ctx)
	switch {
	case h == nil:
		return nil
	case h.reservation != nil:
		return h.reservation.quota.For(h.reservation)
	}
	o := h.server.options
	return &Reservation{quota: o.Bodies, caller: o.callerOf(&ctx.Request.Header, h)}
}

// AcquireAnswer is ChargeAnswer with a reservation.
func (r *Reservation) AcquireAnswer(n int) bool { return n <= smallBody || r.Acquire(n) }

// ReplaceAnswer charges the n bytes in place of all that r holds; false: nothing changes.
func (r *Reservation) ReplaceAnswer(n int) bool {
	if n <= smallBody {
		n = 0
	}
	more := n - int(r.held())
	if more < 0 {
		r.releaseSome(int64(-more))
		return true
	}
	return r.Acquire(more)
}

// AnswerWhole answers in one piece. memory is given back once the body is written or the client is
// gone.
func AnswerWhole(ctx *fasthttp.RequestCtx, contentType string, body []byte, memory *Reservation) {
	ctx.SetContentType(contentType)
	if len(body) <= smallBody {
		memory.Release()
		ctx.SetBody(body) // copies the body
		return
	}
	ctx.SetBodyStream(&WholeAnswer{unread: body, memory: memory}, len(body))
}

// WholeOf is nil if AnswerWhole gave ctx no answer, or if the connection's buffers hold it.
func WholeOf(ctx *fasthttp.RequestCtx) *WholeAnswer {
	answer, _ := ctx.Response.BodyStream().(*WholeAnswer)
	return answer
}

// WholeAnswer is not written yet, and its memory is charged. fasthttp writes it when the handler
// has returned, and then calls Close, also if the client is gone.
type WholeAnswer struct {
	OnWritten func() // called by Close, unless it is nil
	unread    []byte
	memory    *Reservation
}

func (a *WholeAnswer) Read(p []byte) (int, error) {
	if len(a.unread) == 0 {
		return 0, io.EOF
	}
	n := copy(p, a.unread)
	a.unread = a.unread[n:]
	return n, nil
}

// fasthttp's buffer of 4 KiB takes the end of these at least, and sends it only after Close.
const heldBackBytes = 1 << 10

// WriteTo does not copy. A client that has the last byte finds the answer charged no more, because
// that byte is sent after Close.
func (a *WholeAnswer) WriteTo(w io.Writer) (int64, error) {
	beginning := max(0, len(a.unread)-heldBackBytes)
	n, err := w.Write(a.unread[:beginning])
	if err != nil {
		return int64(n), err
	}
	m, err := w.Write(a.unread[beginning:])
	return int64(n + m), err
}

// Close gives the memory back.
func (a *WholeAnswer) Close() error {
	a.memory.Release()
	if a.OnWritten != nil {
		a.OnWritten()
	}
	return nil
}
