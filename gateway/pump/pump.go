// Package pump carries a streamed answer from its engine's socket to its client's socket. In the normal case an event loop drives the
// stream: each arrival is one read from the engine and one write to the client. Everything else (the end, an engine that fails or is
// silent, a drain, a client that leaves) is handled by a goroutine, which drives the same stream with blocking calls, and may pass it back
// to the loop.
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

// A Stream is an answer under way. At any time, either the loop or one goroutine owns it. After the owner has passed it on, it must not
// touch it any more.
type Stream interface {
	// Next waits for events and returns all that have come. At the end of the answer it returns io.EOF. The events are valid until the
	// next call of any method.
	Next() (events []byte, err error)
	// Ended says that the events that Next has returned are the last ones.
	Ended() bool
	// Torn says that the client has only a part of the last event.
	Torn() bool
	// Flow returns the engine's response from which the answer is made, and drops the stream's buffers. It returns nil if a goroutine must
	// go on driving the stream.
	Flow() *engine.Response

	// Wait begins the wait for the engine, and returns how long it may last; 0: for ever.
	Wait(now time.Time) time.Duration
	// Arrive takes in data of the response, and appends to dst the bytes for the client. Once it has returned an end, it ignores further
	// data.
	Arrive(dst, data []byte, now time.Time) ([]byte, sse.End)
	// Err is the error that ends the answer, so that the loop must not read on; nil: there is none.
	Err() error

	// GoBack prepares the stream for a goroutine, after the loop has driven it. Next then returns these events first, and goes on as end
	// requires.
	GoBack(events []byte, end sse.End)
	// Close settles the request, however it ended.
	Close()
	// Panicked replaces Close if the code that drove the stream panicked.
	Panicked(v any)
}

type pump struct {
	Stream
	out  *edge.Outlet
	keep *edge.KeepAlive  // sends SSE comments to the client while the engine is silent; nil: the client gets none
	resp *engine.Response // the engine's response that the loop reads, or read last

	loop  *loop.Loop
	leave int         // how many times the loop has passed the stream to a goroutine, so that touched can ignore a call that came too late
	in    *loop.Watch // the watch of the engine's socket; nil: a goroutine drives the stream
	until time.Time   // the engine must send something before this time; zero: it may be silent for ever
	room  *loop.Watch // the watch of the client's socket, while the client is blocked
	rest  []byte      // bytes that the blocked client has not taken
}

// Start takes the client's connection from fasthttp once the handler of ctx has returned, and then carries the answer. It returns false if
// there are no loops, or if the connection cannot be taken.
func Start(ctx *fasthttp.RequestCtx, log *zap.Logger, loops *loop.Set, s Stream) bool {
	l := loops.Next()
	return l != nil && edge.Release(ctx, log, func(o *edge.Outlet) {
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
				return
			}
			continue
		}
		if errors.Is(err, io.EOF) {
			err = p.out.Send(nil, true)
		}
		p.Close()
		p.out.End(err == nil)
		return
	}
}

// next waits for events. If the wait is long, the client gets comments.
func (p *pump) next() ([]byte, error) {
	if p.silence() > 0 {
		p.keep.Wait()
		defer p.keep.Over()
	}
	return p.Next()
}

// silence is the time without an event after which the client gets a comment; 0: it gets none, for example because the comment would
// stand inside an event.
func (p *pump) silence() time.Duration {
	if p.keep == nil || p.Torn() {
		return 0
	}
	return p.keep.Silence()
}

// guard ends the stream if f panics.
func (p *pump) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			p.Panicked(v)
			p.out.End(false)
		}
	}()
	f()
}

// lift passes the stream to the loop; false: the stream stays with the goroutine.
func (p *pump) lift() bool {
	if p.out.Smooth() != nil {
		return false
	}
	resp := p.Flow()
	if resp == nil {
		return false
	}
	turn := p.leave
	p.resp = resp
	fd, ok := resp.Lift(func() { p.loop.Post(func() { p.touched(turn) }) })
	if !ok {
		return false
	}
	// From here on, p must not be used if Post succeeds: the loop owns the stream, and touched may already have passed it to another
	// goroutine.
	if !p.loop.Post(func() { p.enter(fd, turn) }) {
		resp.Lower(nil)
		return false
	}
	return true
}

// enter runs on the loop and begins to watch the engine's socket.
func (p *pump) enter(fd, turn int) {
	defer p.recovered()
	if turn != p.leave {
		return // touched has passed the stream back already
	}
	in, err := p.loop.Add(fd, p, false)
	if err != nil {
		p.pass(arrival{})
		return
	}
	p.in = in
	p.await(time.Now())
}

// touched runs on the loop after an abort, a drain, or a client that left. It passes the stream to a goroutine, which finds out the cause.
func (p *pump) touched(turn int) {
	if turn == p.leave {
		p.pass(arrival{})
	}
}

// await begins the wait for the engine.
func (p *pump) await(now time.Time) {
	wait := p.Wait(now)
	p.until = time.Time{}
	if wait > 0 {
		p.until = now.Add(wait)
	}
	if silence := p.silence(); silence > 0 && (wait <= 0 || silence < wait) {
		wait = silence
	}
	if wait > 0 {
		p.in.Wake(now.Add(wait))
	}
}

// arrival is what one read brought, or why the loop passes the stream on.
type arrival struct {
	end    sse.End
	frame  []byte // bytes for the client, behind edge.ChunkRoom bytes
	failed error  // the socket's error
	over   bool   // no more is read: the body has ended, or is malformed
	gone   bool   // nothing can be written to the client any more
}

// perTurn is how many bytes are read from one engine before the loop turns to its other streams. Without this limit, an engine that sends
// faster than the proxy reads would hold up all other streams.
const perTurn = 256 << 10

// Ready reads from the engine's socket, or writes to the client's socket, when the loop reports that socket as ready.
func (p *pump) Ready(w *loop.Watch, ended bool, now time.Time) {
	defer p.recovered()
	if w != p.in {
		p.flush(now)
		return
	}
	for read := 0; p.in != nil && p.room == nil; {
		if read >= perTurn {
			p.in.Again(ended)
			return
		}
		buf := p.loop.Buffer[:]
		n, err := p.in.Read(buf)
		if err != nil {
			a := arrival{failed: err}
			if errors.Is(err, io.EOF) {
				a.failed = nil // the goroutine reads the EOF again, and decides what it means for the answer
			}
			p.pass(a)
			return
		}
		if n == 0 {
			return
		}
		p.arrive(buf[:n], now)
		read += n
		if n < len(buf) && !ended {
			return
		}
	}
}

// arrive takes in what one read brought, and passes it on to the client.
func (p *pump) arrive(b []byte, now time.Time) {
	a := p.unpack(b, now)
	if a.end != sse.Runs || a.over || p.Err() != nil {
		p.pass(a)
		return
	}
	p.send(a.frame, now)
}

// send writes the bytes behind edge.ChunkRoom to the client, and waits for more from the engine.
func (p *pump) send(frame []byte, now time.Time) {
	if len(frame) > edge.ChunkRoom {
		frame = p.out.Frame(frame)
		n, err := p.out.Try(frame, now)
		if err != nil {
			p.pass(arrival{gone: true})
			return
		}
		if n < len(frame) {
			p.block(frame[n:])
			return
		}
	}
	p.await(now)
}

// unpack removes the transfer coding from the bytes that have come, and has the stream take them in.
func (p *pump) unpack(b []byte, now time.Time) arrival {
	var a arrival
	out := p.loop.Out[:0]
	out = append(out, make([]byte, edge.ChunkRoom)...)
	for len(b) > 0 && !a.over {
		data, used, err := p.resp.Unframe(b)
		b = b[used:]
		if len(data) > 0 {
			var end sse.End
			if out, end = p.Arrive(out, data, now); a.end == sse.Runs {
				a.end = end
			}
		}
		a.over = err != nil
	}
	a.frame = out
	if p.loop.Out = out[:0]; cap(out) > 4*len(p.loop.Buffer) {
		p.loop.Out = nil // all streams of the loop share this buffer, so one large arrival must not keep its memory
	}
	return a
}

// block keeps the bytes that the client did not take, and stops reading from the engine until the client has taken them.
func (p *pump) block(rest []byte) {
	p.rest = append([]byte(nil), rest...)
	err := p.in.Pause()
	if err == nil {
		err = p.out.Socket(func(fd int) { p.room, err = p.loop.Add(fd, p, true) })
	}
	if err != nil || p.room == nil {
		p.pass(arrival{})
		return
	}
	p.in.Wake(p.out.Patience())
}

// flush writes to a client that has room again.
func (p *pump) flush(now time.Time) {
	n, err := p.out.Try(p.rest, now)
	if p.rest = p.rest[n:]; len(p.rest) > 0 && err == nil {
		return
	}
	p.unblock()
	if err != nil || p.in.Resume() != nil {
		p.pass(arrival{gone: err != nil})
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
		room.Forget() // the socket is closed, and its descriptor may belong to another socket
	}
}

// Expired gives up a client that does not take its answer, sends a comment, or passes a stream whose engine is silent to a goroutine.
func (p *pump) Expired(_ *loop.Watch, now time.Time) {
	defer p.recovered()
	if p.room == nil { // the client takes its bytes, so the wait was for the engine
		engineLate := !p.until.IsZero() && !now.Before(p.until)
		if p.silence() > 0 && !engineLate {
			p.send(append(make([]byte, edge.ChunkRoom), p.keep.Comment()...), now)
		} else {
			p.pass(arrival{})
		}
		return
	}
	if by := p.out.Patience(); by.IsZero() || by.After(now) {
		p.in.Wake(by)
		return
	}
	p.out.Cut(now)
	p.pass(arrival{gone: true})
}

// pass passes the stream to a goroutine, with the last arrival.
func (p *pump) pass(a arrival) {
	p.depart()
	if len(a.frame) > edge.ChunkRoom {
		a.frame = append([]byte(nil), a.frame[edge.ChunkRoom:]...) // a copy, because the loop uses its memory again
	} else {
		a.frame = nil
	}
	rest := p.rest
	p.rest = nil
	go p.guard(func() { p.goBack(a, rest) })
}

// goBack runs in a goroutine, and goes on where the loop has stopped.
func (p *pump) goBack(a arrival, rest []byte) {
	p.resp.Lower(a.failed)
	if a.gone || len(rest) > 0 && p.out.Finish(rest) != nil {
		p.Close()
		p.out.End(false)
		return
	}
	p.GoBack(a.frame, a.end)
	p.carry()
}

// depart ends the loop's watches of the stream.
func (p *pump) depart() {
	p.leave++
	p.unblock()
	if p.in != nil {
		p.in.Remove()
		p.in = nil
	}
}

// recovered ends the stream if its turn on the loop panics. The loop goes on.
func (p *pump) recovered() {
	v := recover()
	if v == nil {
		return
	}
	v = fmt.Sprintf("%v, on a loop: %s", v, debug.Stack())
	p.depart()
	go p.guard(func() {
		p.resp.Lower(nil)
		panic(v)
	})
}
