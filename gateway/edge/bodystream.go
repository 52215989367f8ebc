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
	src      io.Reader
	ahead    interface{ Pending() int } // src, if it can say how many bytes its Read returns without waiting; else nil
	ends     interface{ Ended() bool }  // src, if it can say that those waiting bytes are the last ones; else nil
	torn     interface{ Torn() bool }   // src, if it can say whether its Reads so far end inside an event; else nil
	end      func(err error)
	log      *zap.Logger
	conn     io.Writer // the client's connection, for large chunks; nil: fasthttp writes all chunks
	headConn *headConn // joins the last pieces of the answer into one write; nil: each piece is a write of its own
	head     bool      // the head of the answer is written, or fasthttp writes it before it reads; only then chunks may be written to conn
	keep     *KeepAlive
	err      error // why reading from src ended; nil: it goes on
	once     sync.Once
}

// NewBodyStream returns a BodyStream of src. src may have three more methods. Pending() int returns how many bytes Read returns without
// waiting. Ended() bool says whether those bytes are the last ones. Torn() bool says whether the client has only a part of an event; until
// it has the whole event, it gets no comments. end is called exactly once, when fasthttp has finished the answer or given it up. Its err is
// nil after io.EOF, and otherwise the error of src, an error about a panic of src, or ErrUnfinished.
func NewBodyStream(src io.Reader, end func(err error), log *zap.Logger) *BodyStream {
	p := &BodyStream{src: src, end: end, log: log}
	p.ahead, _ = src.(interface{ Pending() int })
	p.ends, _ = src.(interface{ Ended() bool })
	p.torn, _ = src.(interface{ Torn() bool })
	return p
}

func (p *BodyStream) pending() int {
	if p.ahead == nil {
		return 0
	}
	return p.ahead.Pending()
}

func (p *BodyStream) ended() bool { return p.ends != nil && p.ends.Ended() }

// Answer makes p the body of ctx's answer. It returns at once, except for the clients of writePlain.
func (p *BodyStream) Answer(ctx *fasthttp.RequestCtx) {
	h, opened := headConnOf(ctx), StopKeepAlive(ctx)
	if h != nil {
		p.keep = h.alive
	}
	if opened || !ctx.Request.Header.IsHTTP11() {
		p.writePlain(ctx, opened)
		return
	}
	p.conn, p.headConn = ctx.Conn(), h
	p.head = p.pending() > smallChunk // the head is flushed alone, because BodyStream may write the first chunk itself
	ctx.Response.ImmediateHeaderFlush = p.head
	ctx.Response.SetBodyStream(p, -1)
}

// writePlain writes the answer without fasthttp, and returns when all of it is written. It is for clients of HTTP/1.0, and for answers
// whose head a KeepAlive has sent. HTTP/1.0 has no chunks, so the body ends where the connection ends. If the body is cut off, the
// connection is reset, which the client sees as an error.
func (p *BodyStream) writePlain(ctx *fasthttp.RequestCtx, opened bool) {
	defer func() { _ = p.Close() }()
	conn, h, plain := ctx.Conn(), headConnOf(ctx), !ctx.Request.Header.IsHTTP11()
	reuse := false                // the connection serves another request after this answer
	ctx.HijackSetNoResponse(true) // fasthttp would write chunks, or a second head
	ctx.Hijack(func(net.Conn) {   // fasthttp calls this when the handler has returned
		if reuse {
			go h.again().serve()
			return
		}
		_ = conn.Close()
	})
	var out []byte
	if !opened {
		ctx.Response.Header.SetContentLength(identity)
		out = ctx.Response.Header.AppendBytes(nil)
	}
	p.head = opened
	buf := make([]byte, smallChunk)
	for p.err == nil {
		n, _ := p.Read(buf)
		if plain {
			out = append(out, buf[:n]...)
		} else {
			out = p.keep.frame(out, buf[:n])
		}
		if p.err == io.EOF && !plain { //nolint:errorlint // as Close compares
			out = append(out, lastChunk...)
		}
		if len(out) > 0 {
			if _, err := conn.Write(out); err != nil {
				return
			}
			out, p.head = out[:0], true
		}
	}
	whole := p.err == io.EOF                  //nolint:errorlint // as Close compares
	reuse = whole && opened && !p.keep.closes // without opened, it is HTTP/1.0, and the body ends with the connection
	if whole {
		return
	}
	if c, ok := ConnOf(ctx); ok {
		c.abandon()
		c.cut()
	}
}

const lastChunk = "0\r\n\r\n"

const (
	smallChunk = 4<<10 - 64 // with its framing, it fits into fasthttp's buffer
	chunkRoom  = 16         // bytes for the framing of a chunk
)

var chunks = sync.Pool{New: func() any { return new([]byte) }}

// Read reads from the source, and turns a panic of the source into an error.
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
	if p.head {
		p.keep.wrote()
		if p.torn == nil || !p.torn.Torn() { // a comment inside an event would spoil the event
			p.keep.StartTimer()
			defer p.keep.StopTimer()
		}
	}
	n, err = p.src.Read(b)
	isLast := err == io.EOF //nolint:errorlint // as fasthttp compares
	if err == nil && p.pending() == 0 && p.ended() {
		isLast = true // the source says so before it returns io.EOF
	}
	if isLast && p.headConn != nil {
		p.headConn.hold()
	}
	switch {
	case err != nil || p.conn == nil: // the caller ends the answer, or writes all chunks
	case !p.head:
		p.head = true // fasthttp sends the head with what was read
	case n+p.pending() > smallChunk:
		return 0, p.write(b[:n]) // after 0 bytes without an error, fasthttp reads again
	}
	return n, err
}

// write writes one chunk of up to writePiece bytes: first the bytes of begun, then those that the source returns without waiting.
func (p *BodyStream) write(begun []byte) error {
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	size := min(len(begun)+p.pending(), writePiece-chunkRoom)
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

// Close calls end, but only the first time. It always returns nil: the answer is written already, and fasthttp would report an error as its
// failure.
func (p *BodyStream) Close() error {
	p.once.Do(func() {
		defer p.complete()
		defer func() {
			if v := recover(); v != nil {
				_ = p.panicked("ending an answer", v) // panicked has logged it
			}
		}()
		switch p.err {
		case nil:
			p.end(ErrUnfinished)
		case io.EOF: // not errors.Is: like fasthttp, we take a wrapped io.EOF for a failure
			p.end(nil)
		default:
			p.end(p.err)
		}
	})
	return nil
}

// complete makes headConn send the bytes that it holds: after io.EOF together with the end of the answer, which fasthttp writes next, and
// after an error at once.
func (p *BodyStream) complete() {
	switch {
	case p.headConn == nil || p.headConn.held == nil:
	case p.err == io.EOF: //nolint:errorlint // as fasthttp compares
		p.headConn.complete()
	default:
		_ = p.headConn.release() // the connection ends in any case
	}
}

func (p *BodyStream) panicked(doing string, v any) error {
	p.log.Error("edge: panic while "+doing, zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return fmt.Errorf("edge: panic while %s: %v", doing, v)
}
