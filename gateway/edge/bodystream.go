package edge

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// ErrUnfinished is passed to the function end of NewBodyStream if the source was not read to its end: the client left, or wanted only the
// head.
var ErrUnfinished = errors.New("edge: the client left before the answer's end")

// BodyStream is the body of a streamed answer, which fasthttp reads. After each Read, fasthttp writes one chunk to the client, on the
// goroutine of the connection. A slow client therefore slows the source down, without another goroutine or a pipe.
//
// fasthttp reads 4 KiB at a time. If the source has more, BodyStream writes one chunk of up to 64 KiB to the connection itself.
//
// A Read that fails with an error other than io.EOF ends the connection without the last chunk, so that the client sees that the answer is
// cut off.
type BodyStream struct {
	src         io.Reader
	pendingSrc  interface{ Pending() int } // src, if it can say how many bytes its Read returns without waiting; else nil
	endedSrc    interface{ Ended() bool }  // src, if it can say that those waiting bytes are the last ones; else nil
	tornSrc     interface{ Torn() bool }   // src, if it can say whether its Reads so far end inside an event; else nil
	onEnd       func(err error)
	log         *zap.Logger
	conn        io.Writer // the client's connection, for large chunks; nil: fasthttp writes all chunks
	headConn    *headConn // joins the last pieces of the answer into one write; nil: each piece is a write of its own
	headWritten bool      // the head of the answer is written, or fasthttp writes it before it reads; only then chunks may be written to conn
	keepAlive   *KeepAlive
	err         error // why reading from src ended; nil: it goes on
	endOnce     sync.Once
}

// NewBodyStream returns a BodyStream of src. src may have three more methods. Pending() int returns how many bytes Read returns without
// waiting. Ended() bool says whether those bytes are the last ones. Torn() bool says whether the client has only a part of an event; until
// it has the whole event, it gets no comments. onEnd is called exactly once, when fasthttp has finished the answer or given it up. Its err
// is nil after io.EOF, and otherwise the error of src, an error about a panic of src, or ErrUnfinished.
func NewBodyStream(src io.Reader, onEnd func(err error), log *zap.Logger) *BodyStream {
	p := &BodyStream{src: src, onEnd: onEnd, log: log}
	p.pendingSrc, _ = src.(interface{ Pending() int })
	p.endedSrc, _ = src.(interface{ Ended() bool })
	p.tornSrc, _ = src.(interface{ Torn() bool })
	return p
}

// pending returns how many bytes Read returns without waiting; 0 also if the source cannot say it.
func (p *BodyStream) pending() int {
	if p.pendingSrc == nil {
		return 0
	}
	return p.pendingSrc.Pending()
}

func (p *BodyStream) ended() bool { return p.endedSrc != nil && p.endedSrc.Ended() }

// Answer makes p the body of ctx's answer. It returns at once, except for the clients of writeWithoutFasthttp.
func (p *BodyStream) Answer(ctx *fasthttp.RequestCtx) {
	h, headSent := headConnOf(ctx), StopKeepAlive(ctx)
	if h != nil {
		p.keepAlive = h.keepAlive
	}
	if headSent || !ctx.Request.Header.IsHTTP11() {
		p.writeWithoutFasthttp(ctx, headSent)
		return
	}
	p.conn, p.headConn = ctx.Conn(), h
	p.headWritten = p.pending() > smallChunk // the head is flushed alone, because BodyStream may write the first chunk itself
	ctx.Response.ImmediateHeaderFlush = p.headWritten
	ctx.Response.SetBodyStream(p, -1)
}

// writeWithoutFasthttp writes the answer without fasthttp, and returns when all of it is written. It is for clients of HTTP/1.0, and for
// answers whose head a KeepAlive has sent. HTTP/1.0 has no chunks, so the body ends where the connection ends. If the body is cut off, the
// connection is reset, which the client sees as an error. headSent says that the client has the head of the answer already.
func (p *BodyStream) writeWithoutFasthttp(ctx *fasthttp.RequestCtx, headSent bool) {
	defer func() { _ = p.Close() }()
	conn, h, isHTTP10 := ctx.Conn(), headConnOf(ctx), !ctx.Request.Header.IsHTTP11()
	reuse := false                // the connection serves another request after this answer
	ctx.HijackSetNoResponse(true) // fasthttp would write chunks, or a second head
	ctx.Hijack(func(net.Conn) {   // fasthttp calls this when the handler has returned
		if reuse {
			go h.renew().serve()
			return
		}
		_ = conn.Close()
	})
	var out []byte
	if !headSent {
		ctx.Response.Header.SetContentLength(bodyUntilClose)
		out = ctx.Response.Header.AppendBytes(nil)
	}
	p.headWritten = headSent
	buf := make([]byte, smallChunk)
	for p.err == nil {
		n, _ := p.Read(buf)
		if isHTTP10 {
			out = append(out, buf[:n]...)
		} else {
			out = p.keepAlive.frame(out, buf[:n])
		}
		if p.err == io.EOF && !isHTTP10 { //nolint:errorlint // as Close compares
			out = append(out, lastChunk...)
		}
		if len(out) > 0 {
			if _, err := conn.Write(out); err != nil {
				return
			}
			out, p.headWritten = out[:0], true
		}
	}
	whole := p.err == io.EOF //nolint:errorlint // as Close compares
	// Without headSent, it is HTTP/1.0, and the body ends with the connection.
	reuse = whole && headSent && !p.keepAlive.closesAfter
	if whole {
		return
	}
	if c, ok := ConnOf(ctx); ok {
		c.dropClient()
		c.closeSocket()
	}
}

const lastChunk = "0\r\n\r\n"

const (
	smallChunk = 4<<10 - 64 // with its framing, it fits into fasthttp's buffer
	chunkRoom  = 16         // bytes for the framing of a chunk
)

var bufferPool = sync.Pool{New: func() any { return new([]byte) }}

// Read reads from the source for fasthttp, which writes each result as a chunk. While the source has nothing, the client gets keep-alive
// comments, but not inside an event. If the source has more than a small chunk, Read writes one large chunk to the connection itself and
// returns 0 bytes. A panic of the source becomes an error.
func (p *BodyStream) Read(b []byte) (n int, err error) {
	if p.err != nil {
		return 0, p.err
	}
	defer func() {
		if v := recover(); v != nil {
			n, err = 0, p.panicked("reading an answer", v)
		}
		if err != nil {
			p.err = err
		}
	}()
	if p.headWritten {
		p.keepAlive.recordHeadWritten()
		if insideEvent := p.tornSrc != nil && p.tornSrc.Torn(); !insideEvent { // a comment inside an event would spoil the event
			p.keepAlive.StartTimer()
			defer p.keepAlive.StopTimer() // if the source panics
		}
	}
	n, err = p.src.Read(b)
	p.keepAlive.StopTimer() // before anything is written: a comment must not come behind a part of an event, or while writes are held
	isLast := err == io.EOF //nolint:errorlint // as fasthttp compares
	if err == nil && p.pending() == 0 && p.ended() {
		isLast = true // the source says so before it returns io.EOF
	}
	if isLast && p.headConn != nil {
		p.headConn.holdWrites() // so that the last chunk and the end of the body are sent together
	}
	switch {
	case err != nil || p.conn == nil: // the caller ends the answer, or writes all chunks
	case !p.headWritten:
		p.headWritten = true // fasthttp sends the head with what was read
	case n+p.pending() > smallChunk:
		return 0, p.writeChunk(b[:n]) // after 0 bytes without an error, fasthttp reads again
	}
	return n, err
}

// writeChunk writes one chunk of up to writePieceSize bytes: first the bytes of begun, then those that the source returns without waiting.
func (p *BodyStream) writeChunk(begun []byte) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	size := min(len(begun)+p.pending(), writePieceSize-chunkRoom)
	b := slices.Grow((*buf)[:0], size+chunkRoom)
	b = append(append(strconv.AppendInt(b, int64(size), 16), "\r\n"...), begun...)
	for size -= len(begun); size > 0; {
		n, err := p.src.Read(b[len(b) : len(b)+size])
		if err != nil {
			return err
		}
		b, size = b[:len(b)+n], size-n
	}
	b = append(b, "\r\n"...)
	*buf = b
	_, err := p.conn.Write(b)
	return err
}

// Close calls onEnd, but only the first time, and lets the connection send the bytes that it holds. It always returns nil: the client has
// already got what it gets of the answer, and fasthttp would take an error of Close for an error of the answer.
func (p *BodyStream) Close() error {
	p.endOnce.Do(func() {
		defer p.endHeldWrites()
		defer func() {
			if v := recover(); v != nil {
				_ = p.panicked("ending an answer", v) // panicked has logged it
			}
		}()
		switch p.err {
		case nil: // fasthttp has stopped before the source's end
			p.onEnd(ErrUnfinished)
		case io.EOF: // not errors.Is: like fasthttp, we take a wrapped io.EOF for a failure
			p.onEnd(nil)
		default:
			p.onEnd(p.err)
		}
	})
	return nil
}

// endHeldWrites makes headConn send the bytes that it holds: after io.EOF together with the end of the answer, which fasthttp writes next,
// and after an error at once.
func (p *BodyStream) endHeldWrites() {
	switch {
	case p.headConn == nil || p.headConn.heldWrites == nil:
	case p.err == io.EOF: //nolint:errorlint // as fasthttp compares
		p.headConn.releaseWithNextWrite()
	default:
		_ = p.headConn.sendHeld() // the connection ends in any case
	}
}

// panicked logs the panic v of the source and returns it as an error.
func (p *BodyStream) panicked(doing string, v any) error {
	p.log.Error("edge: panic while "+doing, zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return fmt.Errorf("edge: panic while %s: %v", doing, v)
}
