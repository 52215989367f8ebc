// Package pump carries a streamed answer from its engine's socket to its client's socket. As long as bytes only
// flow, an event loop drives the stream: each time bytes arrive, it reads once and writes once to the client. In all
// other cases (the end, an engine that fails or is silent, a drain, a client that leaves) a goroutine takes over.
// The goroutine drives the same stream with blocking calls, and may pass it back to the loop.
package pump

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/loop"
	"evenkeel/sse"
)

// A Stream is an answer under way. At any time, either the loop or one goroutine owns it. After passing it on, the
// previous owner must not touch it.
type Stream interface {
	// Next waits for events and returns all that have come. io.EOF means the end of the answer. The events are
	// valid until the next call of any method.
	Next() (events []byte, err error)
	// Ended says that the events which Next has returned were the last ones.
	Ended() bool
	// Torn says that the client has only a part of the last event.
	Torn() bool
	// Flow returns the engine's response, from which the loop then reads, and drops the stream's buffers. It
	// returns nil if the goroutine must keep the stream.
	Flow() *engine.Response

	// Wait says that a wait for the engine begins now, and returns how long it may last; 0: for ever.
	Wait(now time.Time) time.Duration
	// Pause says that the wait for the engine ends now, because nothing is read until the client has taken a comment.
	Pause(now time.Time)
	// Arrive processes data of the response, and appends the bytes for the client to dst. The returned sse.End says
	// whether the answer has ended. If it has, only the end of the body is still to be read.
	Arrive(dst, data []byte, now time.Time) ([]byte, sse.End)
	// Err returns why the stream accepts no more data of the engine; nil: it does.
	Err() error

	// GoBack ends the loop's part. The next call of Next returns these events. end is the last one that Arrive returned.
	GoBack(events []byte, end sse.End)
	// Close gives back what the request holds, however it ended.
	Close()
	// Panicked is called instead of Close if the code that drives the stream panics with v.
	Panicked(v any)
}

type pump struct {
	Stream
	out  *edge.Hijacked
	keep *edge.KeepAlive  // sends comments to the client while the engine is silent; nil: no comments are sent
	resp *engine.Response // the response from which the loop reads, or has read last

	loop  *loop.Loop
	turns int         // how often the loop has passed the stream to a goroutine; a callback with another number is out of date
	in    *loop.Watch // the watch of the engine's socket; nil: a goroutine drives the stream
	until time.Time   // until when the engine may be silent; zero: for ever
	room  *loop.Watch // the watch of the client's socket while the client takes no bytes; nil: the client takes bytes
	rest  []byte      // bytes that the client has not taken
}

// Start takes over the client's connection from fasthttp when the handler has returned, and carries the answer. It
// returns false if there are no loops, or if the connection cannot be taken over.
func Start(ctx *fasthttp.RequestCtx, log *zap.Logger, loops *loop.Set, s Stream) bool {
	l := loops.Next()
	return l != nil && edge.Hijack(ctx, log, func(o *edge.Hijacked) {
		p := &pump{Stream: s, out: o, keep: o.KeepAlive(), loop: l}
		p.guard(p.carry)
	})
}

// carry drives the stream with blocking calls, until its end or until the loop can take it over.
func (p *pump) carry() {
	for {
		events, err := p.next()
		if err == nil {
			err = p.out.Send(events, p.Ended())
		}
		if err == nil && !p.Ended() {
			if p.lift() {
				return // the loop drives the stream now
			}
			continue
		}
		if errors.Is(err, io.EOF) { // the answer has ended after the events that were sent last
			err = p.out.Send(nil, true)
		}
		p.Close()
		p.out.End(err == nil)
		return
	}
}

// next waits for events. During a long wait, comments are sent to the client.
func (p *pump) next() ([]byte, error) {
	if p.silence() > 0 {
		p.keep.StartTimer()
		defer p.keep.StopTimer()
	}
	return p.Next()
}

// silence is the time without an event after which the client gets a comment; 0: it gets none, for example because the comment would
// stand inside an event.
func (p *pump) silence() time.Duration {
	if p.keep == nil || p.Torn() {
		return 0
	}
	return p.keep.Interval()
}

// guard calls f, and ends the stream if f panics.
func (p *pump) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			p.Panicked(v)
			p.out.End(false)
		}
	}()
	f()
}

// lift passes the stream to the loop; false: the goroutine keeps the stream.
func (p *pump) lift() bool {
	if p.out.ClearWriteDeadline() != nil { // the connection is closed
		return false
	}
	resp := p.Flow()
	if resp == nil {
		return false
	}
	turn := p.turns
	p.resp = resp
	fd, ok := resp.Detach(func() { p.loop.Post(func() { p.touched(turn) }) })
	if !ok {
		return false
	}
	// From here on, the loop owns the stream, and touched may even have passed it to another goroutine.
	if p.loop.Post(func() { p.enter(fd, turn) }) {
		return true
	}
	p.loop.Close() // waits until the loop, which is closed already, has called what was posted before
	if turn != p.turns {
		return true // touched has passed the stream to another goroutine
	}
	resp.Reattach(nil)
	return false
}

// enter runs on the loop and begins to watch the engine's socket.
func (p *pump) enter(fd, turn int) {
	defer p.recovered()
	if turn != p.turns {
		return // touched has passed the stream to a goroutine already
	}
	in, err := p.loop.Add(fd, p, false)
	if err != nil {
		p.pass(readResult{})
		return
	}
	p.in = in
	p.await(time.Now())
}

// touched runs on the loop after an abort or a drain, or after the client has left. It passes the stream to a goroutine, which finds out
// the cause. turn is the value of p.turns when the loop got the stream.
func (p *pump) touched(turn int) {
	if turn == p.turns {
		p.pass(readResult{})
	}
}

// await begins the wait for more bytes of the engine. The loop calls Expired when a comment is due or the engine was silent for too long.
func (p *pump) await(now time.Time) {
	wait := p.Wait(now)
	p.until = time.Time{}
	if wait > 0 {
		p.until = now.Add(wait)
	}
	silence := p.silence()
	if silence > 0 && (wait <= 0 || silence < wait) { // the comment is due first
		wait = silence
	}
	if wait > 0 {
		p.in.Wake(now.Add(wait))
	}
}

// readResult is the result of one read from the engine, or the reason why the loop passes the stream to a goroutine.
type readResult struct {
	end    sse.End
	frame  []byte // edge.ChunkRoom empty bytes, and then the bytes for the client
	failed error  // the error of the engine's socket
	over   bool   // the body has ended, or is malformed
	gone   bool   // nothing can be written to the client any more
}

// perTurn is how many bytes the loop reads for one stream before it handles its other streams. Without this bound, an
// engine that sends faster than the loop reads would delay all other streams.
const perTurn = 256 << 10

// Ready is called when one of the two sockets is ready: it reads bytes of the engine, or writes to a client that takes bytes again.
func (p *pump) Ready(w *loop.Watch, ended bool, now time.Time) {
	defer p.recovered()
	if w != p.in { // the client's socket
		p.flush(now)
		return
	}
	for read := 0; p.in != nil && p.room == nil; { // until the stream is passed on, or the client takes no more
		if read >= perTurn {
			p.in.Again(ended)
			return
		}
		buf := p.loop.Buffer[:]
		n, err := p.in.Read(buf)
		if err != nil {
			r := readResult{failed: err}
			if errors.Is(err, io.EOF) {
				r.failed = nil // the goroutine reads it again, and decides whether the answer is complete
			}
			p.pass(r)
			return
		}
		if n == 0 { // no bytes are left in the socket
			return
		}
		p.arrive(buf[:n], now)
		read += n
		if n < len(buf) && !ended { // the socket is empty; if it has ended, one more read tells how
			return
		}
	}
}

// arrive processes the bytes of one read. It sends the result to the client, or passes the stream to a goroutine if the answer has ended.
func (p *pump) arrive(b []byte, now time.Time) {
	r := p.unpack(b, now)
	if r.end != sse.NotEnded || r.over || p.Err() != nil {
		p.pass(r)
		return
	}
	p.send(r.frame, now)
}

// send writes a frame to the client (see readResult.frame), and begins the wait for more bytes of the engine.
func (p *pump) send(frame []byte, now time.Time) {
	if len(frame) > edge.ChunkRoom {
		frame = p.out.Frame(frame)
		n, err := p.out.TryWrite(frame, now)
		if err != nil {
			p.pass(readResult{gone: true})
			return
		}
		if n < len(frame) {
			p.Pause(now)
			p.block(frame[n:])
			return
		}
	}
	p.await(now)
}

// unpack removes the HTTP transfer coding from the bytes of the engine, and gives the data to the stream.
func (p *pump) unpack(b []byte, now time.Time) readResult {
	var r readResult
	out := p.loop.Out[:0]
	out = append(out, make([]byte, edge.ChunkRoom)...)
	for len(b) > 0 && !r.over {
		data, used, err := p.resp.Unframe(b)
		b = b[used:]
		if len(data) > 0 {
			var end sse.End
			if out, end = p.Arrive(out, data, now); r.end == sse.NotEnded { // the first end counts
				r.end = end
			}
		}
		r.over = err != nil
	}
	r.frame = out
	if p.loop.Out = out[:0]; cap(out) > 4*len(p.loop.Buffer) {
		p.loop.Out = nil // one huge event must not keep this much memory
	}
	return r
}

// block keeps the bytes that the client did not take. Until the client has taken them, nothing is read from the engine.
func (p *pump) block(rest []byte) {
	p.rest = append([]byte(nil), rest...)
	err := p.in.Pause()
	if err == nil {
		err = p.out.Socket(func(fd int) { p.room, err = p.loop.Add(fd, p, true) })
	}
	if err != nil || p.room == nil { // nil: Add has failed
		p.pass(readResult{})
		return
	}
	p.in.Wake(p.out.GiveUpAt()) // Expired then gives the client up
}

// flush writes to a client that takes bytes again. Once the client has all of them, it lets the loop read from the engine again.
func (p *pump) flush(now time.Time) {
	n, err := p.out.TryWrite(p.rest, now)
	p.rest = p.rest[n:]
	if len(p.rest) > 0 && err == nil { // the client is still blocked
		return
	}
	p.unblock()
	if err != nil || p.in.Resume() != nil {
		p.pass(readResult{gone: err != nil})
		return
	}
	p.rest = nil
	p.await(now)
}

// unblock ends the watch of the client's socket.
func (p *pump) unblock() {
	if p.room == nil {
		return
	}
	room := p.room
	p.room = nil
	if p.out.Socket(func(int) { room.Remove() }) != nil {
		room.Forget() // the socket is closed, so its descriptor may already belong to another socket
	}
}

// Expired is called when a wait for the engine or for the client has lasted long. It sends a comment to the client, passes a stream whose
// engine is silent to a goroutine, or gives up a client that does not take its answer.
func (p *pump) Expired(_ *loop.Watch, now time.Time) {
	defer p.recovered()
	if p.room == nil { // the wait is for the engine
		engineLate := !p.until.IsZero() && !now.Before(p.until)
		if engineLate || p.silence() <= 0 { // the goroutine decides what becomes of the stream
			p.pass(readResult{})
			return
		}
		p.send(append(make([]byte, edge.ChunkRoom), p.keep.Comment()...), now)
		return
	}
	if by := p.out.GiveUpAt(); by.IsZero() || by.After(now) { // the client still has time
		p.in.Wake(by)
		return
	}
	p.out.GiveUp(now)
	p.pass(readResult{gone: true})
}

// pass passes the stream, with the result of the last read, to a new goroutine.
func (p *pump) pass(r readResult) {
	p.depart()
	if len(r.frame) > edge.ChunkRoom {
		r.frame = append([]byte(nil), r.frame[edge.ChunkRoom:]...) // a copy, because the loop uses the frame's memory again
	} else {
		r.frame = nil
	}
	untaken := p.rest
	p.rest = nil
	go p.guard(func() { p.goBack(r, untaken) })
}

// goBack runs in the new goroutine, and continues where the loop has stopped. untaken is what the client has not taken.
func (p *pump) goBack(r readResult, untaken []byte) {
	p.resp.Reattach(r.failed)
	gone := r.gone
	if !gone && len(untaken) > 0 {
		gone = p.out.WriteRest(untaken) != nil
	}
	if gone {
		p.Close()
		p.out.End(false)
		return
	}
	p.GoBack(r.frame, r.end)
	p.carry()
}

// depart ends the loop's watches of the stream's sockets.
func (p *pump) depart() {
	p.turns++
	p.unblock()
	if p.in != nil {
		p.in.Remove()
		p.in = nil
	}
}

// recovered is deferred by code that runs on the loop. If the code panics, a goroutine ends the stream, and the loop goes on.
func (p *pump) recovered() {
	v := recover()
	if v == nil {
		return
	}
	v = fmt.Sprintf("%v, on a loop: %s", v, debug.Stack())
	p.depart()
	go p.guard(func() {
		p.resp.Reattach(nil)
		panic(v)
	})
}
