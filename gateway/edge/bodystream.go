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

// ErrUnfinished is passed to the function onEnd of NewBodyStream if the source was not read to its end, because the client
// left or wanted only the head.
var ErrUnfinished = errors.New("edge: the client left before the answer's end")

// BodyStream is the body of a streamed answer, which fasthttp reads. After each Read, fasthttp writes one chunk to the client, on the
// goroutine of the connection. Reads from the source therefore wait for a slow client, without another goroutine or a pipe.
//
// fasthttp reads 4 KiB at a time. If the source has more, BodyStream itself writes one chunk of up to 64 KiB to the connection.
//
// If a Read fails with an error other than io.EOF, the connection ends without the last chunk, so that the client sees that
// the answer is cut off.
type BodyStream struct {
	src        io.Reader
	pendingSrc interface{ Pending() int } // src, if it can say how many bytes its Read returns without waiting; otherwise nil
	endedSrc   interface{ Ended() bool }  // src, if it can say that the bytes of Pending are the last ones; otherwise nil
	tornSrc    interface{ Torn() bool }   // src, if it can say whether its Reads so far end inside an event; otherwise nil
	onEnd      func(err error)
	log        *zap.Logger
	chunkConn  io.Writer // the client's connection, to which Read itself writes large chunks; nil: it writes none
	headConn   *headConn // sends the last pieces of the answer in one write; nil: each piece is a write of its own
	// headWritten says that the head of the answer is written, or that fasthttp writes it before it calls Read. Only then may Read
	// write to the connection itself: large chunks, and the comments of keepAlive.
	headWritten bool
	keepAlive   *KeepAlive
	err         error // why reading from src has ended; nil: it has not
	endOnce     sync.Once
}

// NewBodyStream returns a BodyStream of src. src may have three more methods. Pending() int returns how many bytes Read returns without
// waiting. Ended() bool says whether those bytes are the last ones. Torn() bool says whether the client has got only a part of an event, so
// that a comment would damage the event. onEnd is called exactly once, when fasthttp has finished the answer or given it up. Its err is nil
// after io.EOF, and otherwise the error of src, an error about a panic of src, or ErrUnfinished.
func NewBodyStream(src io.Reader, onEnd func(err error), log *zap.Logger) *BodyStream {
	p := &BodyStream{src: src, onEnd: onEnd, log: log}
	p.pendingSrc, _ = src.(interface{ Pending() int })
	p.endedSrc, _ = src.(interface{ Ended() bool })
	p.tornSrc, _ = src.(interface{ Torn() bool })
	return p
}

// readyBytes returns how many further bytes the source returns without waiting; 0 also if the source cannot say it.
func (p *BodyStream) readyBytes() int {
	if p.pendingSrc == nil {
		return 0
	}
	return p.pendingSrc.Pending()
}

func (p *BodyStream) ended() bool { return p.endedSrc != nil && p.endedSrc.Ended() }

// Answer makes p the body of the answer to ctx's request. fasthttp then writes the answer after the handler has returned: it calls Read,
// and writes what Read returns. But Read itself writes large chunks to the connection, and returns nothing of them. If writeWithoutFasthttp
// must write the answer, Answer returns when all of it is written.
func (p *BodyStream) Answer(ctx *fasthttp.RequestCtx) {
	h := headConnOf(ctx)           // nil: the connection was not accepted by a Server of this package
	headSent := StopKeepAlive(ctx) // true: a comment for the waiting client has already sent the head
	if h != nil {
		p.keepAlive = h.keepAlive
	}
	if headSent || !ctx.Request.Header.IsHTTP11() { // fasthttp would write a second head, or chunks that HTTP/1.0 does not have
		p.writeWithoutFasthttp(ctx, headSent)
		return
	}
	p.chunkConn, p.headConn = ctx.Conn(), h
	// A first chunk that is large is written by Read itself, so fasthttp must send the head before it calls Read.
	p.headWritten = p.readyBytes() > smallChunk
	ctx.Response.ImmediateHeaderFlush = p.headWritten
	ctx.Response.SetBodyStream(p, -1) // -1: the body comes in chunks
}

// writeWithoutFasthttp writes the answer without fasthttp, and returns when all of it is written. It is for clients of HTTP/1.0, and for
// answers whose head a KeepAlive has sent. HTTP/1.0 has no chunks, so there the body ends when the connection is closed. If the body is cut
// off, the connection is reset instead, so that the client sees an error. headSent says that the client has the head of the answer already.
func (p *BodyStream) writeWithoutFasthttp(ctx *fasthttp.RequestCtx, headSent bool) {
	defer func() { _ = p.Close() }() // tells onEnd how the answer ended
	conn, h, isHTTP10 := ctx.Conn(), headConnOf(ctx), !ctx.Request.Header.IsHTTP11()
	servesOn := false             // whether the connection serves further requests after this answer; set below
	ctx.HijackSetNoResponse(true) // because fasthttp would write chunks, or a second head
	ctx.Hijack(func(net.Conn) {   // fasthttp calls this when the handler has returned, i.e. after the whole answer
		if servesOn { // on another goroutine, so that this one ends and fasthttp frees what it holds for the old request
			go h.renew().serve()
			return
		}
		_ = conn.Close()
	})
	var head []byte // empty: the client has the head already
	if !headSent {
		ctx.Response.Header.SetContentLength(bodyUntilClose)
		head = ctx.Response.Header.AppendBytes(nil)
	}
	p.headWritten = headSent
	if p.writeBody(conn, head, isHTTP10) != nil { // a write to the client has failed
		return
	}
	if p.err == io.EOF { //nolint:errorlint // another error, even one that wraps io.EOF, means that the answer is cut
		// Without headSent the client speaks HTTP/1.0, where the end of the connection ends the body.
		servesOn = headSent && !p.keepAlive.closesAfter
		return
	}
	if c, ok := ConnOf(ctx); ok {
		c.reset()
	}
}

// writeBody writes out, which is the head of the answer or empty, and then all that Read returns, in chunks or as it is for HTTP/1.0. It
// returns when the source has ended, for which p.err has the reason, or with the error of a write.
func (p *BodyStream) writeBody(conn net.Conn, out []byte, isHTTP10 bool) error {
	buf := make([]byte, smallChunk)
	for p.err == nil {
		n, _ := p.Read(buf) // Read keeps its error in p.err
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
			p.headWritten = true // the first write has sent the head, so from now on Read may let keepAlive send comments
		}
	}
	return nil
}

const lastChunk = "0\r\n\r\n"

const (
	smallChunk = 4<<10 - 64 // bytes of the largest chunk that fits into fasthttp's 4 KiB buffer with its framing
	chunkRoom  = 16         // bytes reserved for the framing of a chunk
)

var bufferPool = sync.Pool{New: func() any { return new([]byte) }}

// Read reads from the source for fasthttp, which writes each result as a chunk. While it waits for the source, the client gets keep-alive
// comments. If more than smallChunk bytes can be read without waiting, Read itself writes them to the connection as one large chunk, and
// returns 0 bytes. A panic of the source becomes an error.
func (p *BodyStream) Read(b []byte) (n int, err error) {
	if p.err != nil {
		return 0, p.err
	}
	defer func() {
		if v := recover(); v != nil {
			p.keepAlive.StopTimer() // a source that panics has left the comments running
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
	// The comments stop before anything is written, because none may follow a part of an event, or be written while writes are held.
	p.keepAlive.StopTimer()
	if p.isLastRead(err) && p.headConn != nil {
		p.headConn.holdWrites() // the last chunk and the end of the body, which fasthttp writes next, are then sent together
	}
	switch {
	case err != nil: // nothing follows these bytes: fasthttp or writeBody writes them, and ends the answer
	case p.chunkConn == nil: // writeBody calls Read, and writes all bytes itself
	case !p.headWritten:
		p.headWritten = true // from the next Read on: fasthttp sends the head together with the bytes of this Read
	case n+p.readyBytes() > smallChunk: // the n bytes in b and those that the source still has ready
		return 0, p.writeChunk(b[:n]) // after 0 bytes without an error, fasthttp reads again
	}
	return n, err
}

// startComments lets the client get keep-alive comments until StopTimer, while Read waits for the source. It first records that the head is
// written, so that no comment brings a head. It starts no comments inside an event, because they would damage the event. The client may
// have only a part of an event whose rest is ready. Read does not wait for the rest, but the whole process may stand still.
func (p *BodyStream) startComments() {
	p.keepAlive.recordHeadWritten()
	insideEvent := p.tornSrc != nil && p.tornSrc.Torn()
	if restIsReady := p.readyBytes() > 0; !insideEvent && !restIsReady {
		p.keepAlive.StartTimer()
	}
}

// isLastRead says whether nothing follows the bytes of a read of the source that returned err. This is so at io.EOF, or if the source says
// before io.EOF that it has ended (Ended).
func (p *BodyStream) isLastRead(err error) bool {
	saysEnded := err == nil && p.readyBytes() == 0 && p.ended()
	return saysEnded || err == io.EOF //nolint:errorlint // as fasthttp compares
}

// writeChunk writes one chunk of up to writePieceSize bytes to the connection: firstBytes, which the caller has read from the source, and
// then the bytes that the source returns without waiting.
func (p *BodyStream) writeChunk(firstBytes []byte) error {
	buf := bufferPool.Get().(*[]byte)
	defer bufferPool.Put(buf)
	size := min(len(firstBytes)+p.readyBytes(), writePieceSize-chunkRoom)
	b := slices.Grow((*buf)[:0], size+chunkRoom)
	b = append(append(strconv.AppendInt(b, int64(size), 16), "\r\n"...), firstBytes...)
	missing := size - len(firstBytes) // bytes of the chunk's data that are not in b yet
	for missing > 0 {
		n, err := p.src.Read(b[len(b) : len(b)+missing])
		if err != nil { // nothing of this chunk has been written
			return err
		}
		b, missing = b[:len(b)+n], missing-n
	}
	b = append(b, "\r\n"...)
	*buf = b // the pool gets the buffer that may have grown
	_, err := p.chunkConn.Write(b)
	return err
}

// Close calls onEnd the first time, and lets the connection send the bytes that it holds. It always returns nil, because fasthttp would
// take an error of Close for an error of the answer, of which nothing can be changed any more.
func (p *BodyStream) Close() error {
	p.endOnce.Do(func() {
		defer p.endHeldWrites()
		defer func() {
			if v := recover(); v != nil {
				_ = p.panicked("ending an answer", v) // panicked has logged it
			}
		}()
		switch p.err {
		case nil: // fasthttp stopped reading before the source ended
			p.onEnd(ErrUnfinished)
		case io.EOF: // not errors.Is: like fasthttp, we take a wrapped io.EOF for a failure
			p.onEnd(nil)
		default:
			p.onEnd(p.err)
		}
	})
	return nil
}

// endHeldWrites makes headConn send the bytes that it has held since the last Read (holdWrites), so that the end of the answer takes one
// write: after io.EOF, together with the end of the body, which fasthttp writes next; after an error, at once.
func (p *BodyStream) endHeldWrites() {
	switch {
	case p.headConn == nil || p.headConn.heldWrites == nil: // nothing is held
	case p.err == io.EOF: //nolint:errorlint // as fasthttp compares
		p.headConn.releaseWithNextWrite()
	default:
		_ = p.headConn.sendHeld() // the connection ends anyway
	}
}

// panicked logs the panic v of the source, and returns it as an error. doing says what the source was called for.
func (p *BodyStream) panicked(doing string, v any) error {
	p.log.Error("edge: panic while "+doing, zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return fmt.Errorf("edge: panic while %s: %v", doing, v)
}
