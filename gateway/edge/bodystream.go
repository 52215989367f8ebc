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

// ErrUnfinished means that the source was not read to its end, because the client left or wanted
// only the head.
var ErrUnfinished = errors.New("edge: the client left before the answer's end")

// BodyStream is the body of a streamed answer, which fasthttp reads. After each Read, fasthttp
// writes one chunk to the client on the connection's goroutine, so reads from the source wait for a
// slow client, without another goroutine or a pipe.
//
// fasthttp reads 4 KiB at a time. If the source has more, BodyStream itself writes one chunk of up
// to 64 KiB to the connection.
//
// If a Read fails with an error other than io.EOF, the connection ends without the last chunk, so
// that the client sees that the answer is cut off.
type BodyStream struct {
	src        io.Reader
	pendingSrc interface{ Pending() int } // nil: src does not have the method
	endedSrc   interface{ Ended() bool }  // nil: src does not have the method
	tornSrc    interface{ Torn() bool }   // nil: src does not have the method
	onEnd      func(err error)
	log        *zap.Logger
	chunkConn  io.Writer // for the large chunks that Read writes itself; nil: none
	headConn   *headConn // sends the end of the answer in one write; nil: in several
	// The head of the answer is written, or fasthttp writes it before it calls Read. Only then may
	// Read write to the connection itself.
	headWritten bool
	keepAlive   *KeepAlive
	err         error // why reading from src has ended; nil: it has not
	endOnce     sync.Once
}

// NewBodyStream returns a BodyStream of src, which may have three more methods. Pending() int is
// how many bytes Read returns without waiting, and Ended() bool says whether those are the last
// ones. Torn() bool says whether the client has got only a part of an event, so that a comment
// would damage it. onEnd is called exactly once, when fasthttp has finished the answer or given it
// up: with nil after io.EOF, else with the error or panic of src, or ErrUnfinished.
func NewBodyStream(src io.Reader, onEnd func(err error), log *zap.Logger) *BodyStream {
	p := &BodyStream{src: src, onEnd: onEnd, log: log}
	p.pendingSrc, _ = src.(interface{ Pending() int })
	p.endedSrc, _ = src.(interface{ Ended() bool })
	p.tornSrc, _ = src.(interface{ Torn() bool })
	return p
}

func (p *BodyStream) readyBytes() int {
	if p.pendingSrc == nil {
		return 0
	}
	return p.pendingSrc.Pending()
}

func (p *BodyStream) ended() bool { return p.endedSrc != nil && p.endedSrc.Ended() }

// Answer makes p the body of the answer to ctx's request. It returns at once if fasthttp can write
// the answer, else when all of it is written.
func (p *BodyStream) Answer(ctx *fasthttp.RequestCtx) {
	h := headConnOf(ctx)           // nil: not accepted by a Server of this package
	headSent := StopKeepAlive(ctx) // true: by a comment
	if h != nil {
		p.keepAlive = h.keepAlive
	}
	if headSent || !ctx.Request.Header.IsHTTP11() {
		// fasthttp would write a second head, or chunks that HTTP/1.0 does not have.
		p.writeWithoutFasthttp(ctx, headSent)
		return
	}
	p.chunkConn, p.headConn = ctx.Conn(), h
	// Read writes a large first chunk itself, so fasthttp must send the head before.
	p.headWritten = p.readyBytes() > smallChunk
	ctx.Response.ImmediateHeaderFlush = p.headWritten
	ctx.Response.SetBodyStream(p, -1) // chunked
}

// writeWithoutFasthttp is for clients of HTTP/1.0, and for answers whose head a KeepAlive has sent.
// HTTP/1.0 has no chunks, so there the body ends when the connection is closed. If it is cut off,
// the connection is reset instead, so that the client sees an error.
func (p *BodyStream) writeWithoutFasthttp(ctx *fasthttp.RequestCtx, headSent bool) {
	defer func() { _ = p.Close() }() // tells onEnd how the answer ended
	conn, h, isHTTP10 := ctx.Conn(), headConnOf(ctx), !ctx.Request.Header.IsHTTP11()
	servesOn := false             // for further requests; set below
	ctx.HijackSetNoResponse(true) // fasthttp would write chunks, or a second head
	ctx.Hijack(func(net.Conn) {   // fasthttp calls this when the handler has returned
		if servesOn {
			// It serves on another goroutine, so that fasthttp frees what this one holds for the old
			// request.
			go h.renew().serve()
			return
		}
		_ = conn.Close()
	})
	var head []byte
	if !headSent {
		ctx.Response.Header.SetContentLength(bodyUntilClose)
		head = ctx.Response.Header.AppendBytes(nil)
	}
	p.headWritten = headSent
	if p.writeBody(conn, head, isHTTP10) != nil {
		return
	}
	if p.err == io.EOF { //nolint:errorlint // another error, even one that wraps io.EOF, means that the answer is cut
		// In HTTP/1.0 the end of the connection ends the body.
		servesOn = headSent && !p.keepAlive.closesAfter
		return
	}
	if c, ok := ConnOf(ctx); ok {
		c.reset()
	}
}

// writeBody writes out, the head or nothing, and then all that Read returns. It returns when the
// source has ended (p.err), or with the error of a write.
func (p *BodyStream) writeBody(conn net.Conn, out []byte, isHTTP10 bool) error {
	buf := make([]byte, smallChunk)
	for p.err == nil {
		n, _ := p.Read(buf) // the error is in p.err
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
				return err
			}
			out = out[:0]
			p.headWritten = true // the head is sent
		}
	}
	return nil
}

const lastChunk = "0\r\n\r\n"

const (
	smallChunk = 4<<10 - 64 // what fits into fasthttp's 4 KiB buffer with its framing, in bytes
	chunkRoom  = 16         // bytes reserved for the framing of a chunk
)

var bufferPool = sync.Pool{New: func() any { return new([]byte) }}

// Read reads from the source. While it waits, the client gets keep-alive comments. If more than
// smallChunk bytes are ready, Read itself writes them as one large chunk, and returns 0 bytes. A
// panic of the source becomes an error.
func (p *BodyStream) Read(b []byte) (n int, err error) {
	if p.err != nil {
		return 0, p.err
	}
	defer func() {
		if v := recover(); v != nil {
			p.keepAlive.StopTimer() // a panic has left the comments running
			n, err = 0, p.panicked("reading an answer", v)
		}
		if err != nil {
			p.err = err
		}
	}()
	if p.headWritten {
		p.startComments()
	}
	n, err = p.src.Read(b)
	// No comment may follow a part of an event, or be written while writes are held.
	p.keepAlive.StopTimer()
	if p.isLastRead(err) && p.headConn != nil {
		p.headConn.holdWrites() // the last chunk and the end of the body are then sent together
	}
	switch {
	case err != nil: // nothing follows these bytes
	case p.chunkConn == nil: // writeBody writes all bytes itself
	case !p.headWritten:
		p.headWritten = true // fasthttp sends the head together with these bytes
	case n+p.readyBytes() > smallChunk:
		return 0, p.writeChunk(b[:n]) // after 0 bytes without an error, fasthttp reads again
	}
	return n, err
}

// startComments starts none inside an event, because they would damage it. Read does not wait for
// the rest of an event that is ready, but the whole process may stand still.
func (p *BodyStream) startComments() {
	p.keepAlive.recordHeadWritten()
	insideEvent := p.tornSrc != nil && p.tornSrc.Torn()
	if restIsReady := p.readyBytes() > 0; !insideEvent && !restIsReady {
		p.keepAlive.StartTimer()
	}
}

// isLastRead says whether nothing follows a read of the source that returned err.
func (p *BodyStream) isLastRead(err error) bool {
	saysEnded := err == nil && p.readyBytes() == 0 && p.ended()
	return saysEnded || err == io.EOF //nolint:errorlint // as fasthttp compares
}

// writeChunk writes firstBytes and what the source returns without waiting as one chunk of up to
// writePieceSize bytes.
func (p *BodyStream) writeChunk(firstBytes []byte) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	size := min(len(firstBytes)+p.readyBytes(), writePieceSize-chunkRoom)
	b := slices.Grow((*buf)[:0], size+chunkRoom)
	b = append(append(strconv.AppendInt(b, int64(size), 16), "\r\n"...), firstBytes...)
	missing := size - len(firstBytes)
	for missing > 0 {
		n, err := p.src.Read(b[len(b) : len(b)+missing])
		if err != nil { // nothing of this chunk has been written
			return err
		}
		b, missing = b[:len(b)+n], missing-n
	}
	b = append(b, "\r\n"...)
	*buf = b // it may have grown
	_, err := p.chunkConn.Write(b)
	return err
}

// Close calls onEnd the first time. It always returns nil: fasthttp would take its error for an
// error of the answer, of which nothing can be changed any more.
func (p *BodyStream) Close() error {
	p.endOnce.Do(func() {
		defer p.endHeldWrites()
		defer func() {
			if v := recover(); v != nil {
				_ = p.panicked("ending an answer", v)
			}
		}()
		switch p.err {
		case nil: // fasthttp stopped before the source ended
			p.onEnd(ErrUnfinished)
		case io.EOF: // not errors.Is: like fasthttp, we take a wrapped io.EOF for a failure
			p.onEnd(nil)
		default:
			p.onEnd(p.err)
		}
	})
	return nil
}

// The end of the answer takes one write: after io.EOF, together with the end of the body, which
// fasthttp writes next; after an error, at once.
func (p *BodyStream) endHeldWrites() {
	switch {
	case p.headConn == nil || p.headConn.heldWrites == nil:
	case p.err == io.EOF: //nolint:errorlint // as fasthttp compares
		p.headConn.releaseWithNextWrite()
	default:
		_ = p.headConn.sendHeld() // the connection ends anyway
	}
}

func (p *BodyStream) panicked(doing string, v any) error {
	p.log.Error("edge: panic while "+doing, zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return fmt.Errorf("edge: panic while %s: %v", doing, v)
}
