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
	// Pause says that the wait for the engine ends now, because the client takes no bytes, and nothing is read until it does.
	Pause(now time.Time)
	// Arrive processes data of the response, and appends the bytes for the client to dst. The returned sse.End says
	// whether the answer has ended. If it has, only the end of the body is still to be read.
	Arrive(dst, data []byte, now time.Time) ([]byte, sse.End)
	// Err returns why the stream accepts no more data of the engine; nil: it still accepts data.
	Err() error

	// LeaveLoop is called when the loop has passed the stream to a goroutine. The next call of Next returns these events. end is the
	// first end that Arrive reported in the loop's last read; NotEnded: there was none.
	LeaveLoop(events []byte, end sse.End)
	// Close releases what the request holds, such as slots and memory, however the answer ended.
	Close()
	// Panicked is called instead of Close if the code that drives the stream panics with v.
	Panicked(v any)
}

// Values of the argument write of loop.Loop.Add.
const (
	forReading = false
	forWriting = true
)

// A pump carries one streamed answer. Its methods run on the goroutine that drives the stream, or on the loop while the loop drives it.
type pump struct {
	Stream
	client    *edge.Hijacked
	keepAlive *edge.KeepAlive  // sends comments to the client while the engine is silent; nil: no comments are sent
	resp      *engine.Response // the response from which the loop reads, or has read last

	loop           *loop.Loop
	handovers      int         // how often the loop has passed the stream to a goroutine; a callback from an earlier handover does nothing
	engineWatch    *loop.Watch // the watch of the engine's socket; nil: a goroutine drives the stream
	engineDeadline time.Time   // until when the engine may be silent; zero: for ever
	clientWatch    *loop.Watch // the watch of the client's socket while the client takes no bytes; nil: the client takes bytes
	unsent         []byte      // bytes that the client has not taken
}

// Start takes over the client's connection from fasthttp when the handler has returned, and carries the answer. It
// returns false if there are no loops, or if the connection cannot be taken over.
func Start(ctx *fasthttp.RequestCtx, log *zap.Logger, loops *loop.Set, s Stream) bool {
	l := loops.Next()
	return l != nil && edge.Hijack(ctx, log, func(o *edge.Hijacked) {
		p := &pump{Stream: s, client: o, keepAlive: o.KeepAlive(), loop: l}
		p.guard(p.driveBlocking)
	})
}

// driveBlocking drives the stream with blocking calls, until its end or until the loop can take it over.
func (p *pump) driveBlocking() {
	for {
		events, err := p.nextEvents()
		if errors.Is(err, io.EOF) { // the events sent before were the last ones, so the client still lacks the end of the body
			const last = true
			p.end(p.client.Send(nil, last))
			return
		}
		if err == nil {
			err = p.client.Send(events, p.Ended())
		}
		if err != nil || p.Ended() {
			p.end(err)
			return
		}
		if p.passToLoop() {
			return // the loop drives the stream now
		}
	}
}

// end releases what the request holds, and ends the use of the client's connection. err is why the client lacks a part of the answer; nil:
// the client has all of it.
func (p *pump) end(err error) {
	p.Close()
	isWhole := err == nil
	p.client.End(isWhole)
}

// nextEvents waits for events. During a long wait, comments are sent to the client.
func (p *pump) nextEvents() ([]byte, error) {
	if p.commentAfter() > 0 {
		p.keepAlive.StartTimer()
		defer p.keepAlive.StopTimer()
	}
	return p.Next()
}

// commentAfter is the time without an event after which the client gets a comment; 0: it gets none, for example because the comment would
// stand inside an event.
func (p *pump) commentAfter() time.Duration {
	if p.keepAlive == nil || p.Torn() {
		return 0
	}
	return p.keepAlive.Interval()
}

// guard calls f, and ends the stream if f panics: the client gets no more bytes, and its connection is closed.
func (p *pump) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			p.Panicked(v)
			p.endIncomplete()
		}
	}()
	f()
}

// endIncomplete ends the use of the client's connection without a whole answer, so that the connection is closed.
func (p *pump) endIncomplete() {
	const whole = false
	p.client.End(whole)
}

// passToLoop passes the stream to the loop, and returns true. It returns false if the goroutine keeps the stream: the client's connection
// or the stream does not allow it, or the loop is closed.
//
// The loop calls posted functions later, when it may have passed the stream to another goroutine. So each of them gets the value that
// p.handovers had here, and does nothing if p.handovers has grown since.
func (p *pump) passToLoop() bool {
	if p.client.ClearWriteDeadline() != nil { // the connection is closed
		return false
	}
	resp := p.Flow() // the stream's response, from which the loop may read
	if resp == nil { // the answer has ended, or bytes of it wait to be read
		return false
	}
	handover := p.handovers
	p.resp = resp
	fd, detached := resp.Detach(func() { p.loop.Post(func() { p.interrupt(handover) }) })
	if !detached { // for example because the connection uses TLS
		return false
	}
	// From here on, a loop that is not closed owns the stream, and interrupt may even have passed it to another goroutine.
	if p.loop.Post(func() { p.startOnLoop(fd, handover) }) {
		return true
	}
	// The loop is closed, but interrupt may have been posted before that. Close waits until the loop has called all that was posted and
	// has ended. Only the loop changes p.handovers, so this goroutine may read it then.
	p.loop.Close()
	if handover != p.handovers { // interrupt has passed the stream to another goroutine
		return true
	}
	resp.Reattach(nil) // this goroutine reads on; nil: no read of the socket has failed
	return false
}

// startOnLoop runs on the loop and begins to watch the engine's socket.
func (p *pump) startOnLoop(fd, handover int) {
	defer p.recoverOnLoop()
	if handover != p.handovers { // interrupt has passed the stream to a goroutine already
		return
	}
	watch, err := p.loop.Add(fd, p, forReading)
	if err != nil { // the goroutine can read without a watch
		p.passWithoutRead()
		return
	}
	p.engineWatch = watch
	p.awaitEngine(time.Now())
}

// interrupt runs on the loop after an abort or a drain, or after the client has left. It passes the stream to a goroutine, which finds out
// the cause. handover is the value of p.handovers when the loop got the stream.
func (p *pump) interrupt(handover int) {
	if handover == p.handovers {
		p.passWithoutRead()
	}
}

// awaitEngine begins the wait for more bytes of the engine. The loop calls Expired when a comment is due or the engine was silent for too
// long.
func (p *pump) awaitEngine(now time.Time) {
	p.engineDeadline = time.Time{}
	if wait := p.Wait(now); wait > 0 { // 0: for ever
		p.engineDeadline = now.Add(wait)
	}
	wakeAt := p.engineDeadline
	if after := p.commentAfter(); after > 0 { // 0: no comment
		if commentAt := now.Add(after); wakeAt.IsZero() || commentAt.Before(wakeAt) {
			wakeAt = commentAt
		}
	}
	p.engineWatch.WakeAt(wakeAt) // zero: nothing is due, and the time of an earlier wait must not count
}

// readResult is the result of one read from the engine, or the reason why the loop passes the stream to a goroutine.
type readResult struct {
	end        sse.End
	frame      []byte // edge.ChunkRoom empty bytes, and then the bytes for the client
	readErr    error  // the error of the last read from the engine's socket
	bodyEnded  bool   // the body has ended, or is malformed
	clientGone bool   // nothing can be written to the client any more
}

// maxReadPerTurn is how many bytes the loop reads for one stream before it handles its other streams. Without this bound, an
// engine that sends faster than the loop reads would delay all other streams.
const maxReadPerTurn = 256 << 10

// Ready is called when one of the two sockets is ready: it reads bytes of the engine, or writes to a client that takes bytes again.
func (p *pump) Ready(w *loop.Watch, ended bool, now time.Time) {
	defer p.recoverOnLoop()
	if w != p.engineWatch { // the client's socket is ready
		p.writeUnsent(now)
		return
	}
	for read := 0; p.engineWatch != nil && p.clientWatch == nil; { // until the stream is passed on, or the client takes no more
		if read >= maxReadPerTurn {
			p.engineWatch.CallAgain(ended)
			return
		}
		buf := p.loop.Buffer[:]
		n, err := p.engineWatch.Read(buf)
		if err != nil {
			r := readResult{readErr: err}
			if errors.Is(err, io.EOF) {
				r.readErr = nil // the goroutine reads the end again, and decides whether the answer is complete
			}
			p.passToGoroutine(r)
			return
		}
		if n == 0 { // no bytes are left in the socket
			return
		}
		p.processBytes(buf[:n], now)
		read += n
		isEmptyNow := n < len(buf)
		if isEmptyNow && !ended { // if the socket has ended, one more read tells how
			return
		}
	}
}

// processBytes processes the bytes of one read. It sends the result to the client, or passes the stream to a goroutine if the answer has
// ended.
func (p *pump) processBytes(b []byte, now time.Time) {
	r := p.unpack(b, now)
	hasEnded := r.end != sse.NotEnded || r.bodyEnded
	if hasEnded || p.Err() != nil {
		p.passToGoroutine(r)
		return
	}
	p.sendFrame(r.frame, now)
}

// sendFrame writes a frame to the client (see readResult.frame), and begins the wait for more bytes of the engine.
func (p *pump) sendFrame(frame []byte, now time.Time) {
	if len(frame) > edge.ChunkRoom { // the frame has bytes for the client
		frame = p.client.Frame(frame) // an HTTP chunk: the line with the chunk's size goes into the room before the bytes
		n, err := p.client.TryWrite(frame, now)
		if err != nil {
			p.passToGoroutine(readResult{clientGone: true})
			return
		}
		if n < len(frame) { // the client's socket is full
			p.Pause(now) // the engine's time limit does not run while nothing is read from it
			p.awaitClient(frame[n:])
			return
		}
	}
	p.awaitEngine(now)
}

// unpack removes the HTTP transfer coding from the bytes of the engine, and gives the data to the stream. The result has the bytes for the
// client in a frame, which is valid until the loop's next read.
func (p *pump) unpack(b []byte, now time.Time) readResult {
	var r readResult
	out := p.loop.Out[:0]                              // the loop's scratch memory
	out = append(out, make([]byte, edge.ChunkRoom)...) // Frame writes the head of the chunk there
	for len(b) > 0 && !r.bodyEnded {
		data, used, err := p.resp.Unframe(b)
		b = b[used:]
		if len(data) > 0 {
			var end sse.End
			if out, end = p.Arrive(out, data, now); r.end == sse.NotEnded { // if several ends are reported, the first one counts
				r.end = end
			}
		}
		r.bodyEnded = err != nil // complete (io.EOF) or malformed; the goroutine that takes over reads the same error again
	}
	r.frame = out
	if p.loop.Out = out[:0]; cap(out) > 4*len(p.loop.Buffer) {
		p.loop.Out = nil // one huge event must not keep this much memory
	}
	return r
}

// awaitClient keeps the bytes that the client did not take, and watches the client's socket. Until the client has taken all of them,
// nothing is read from the engine. So engineWatch has no other use meanwhile, and serves as the timer of the client: it calls Expired when
// the client has taken nothing for too long. If the sockets cannot be watched so, awaitClient passes the stream to a goroutine.
func (p *pump) awaitClient(rest []byte) {
	p.unsent = append([]byte(nil), rest...) // a copy, because the loop uses the memory of rest again
	err := p.engineWatch.Pause()
	if err == nil {
		err = p.client.Socket(func(fd int) { p.clientWatch, _ = p.loop.Add(fd, p, forWriting) })
	}
	if err != nil || p.clientWatch == nil { // nil: Add has failed
		p.passWithoutRead() // the goroutine writes p.unsent with blocking calls
		return
	}
	p.engineWatch.WakeAt(p.client.GiveUpAt()) // Expired gives the client up at this time
}

// writeUnsent writes to a client that takes bytes again. Once the client has all of them, it lets the loop read from the engine again.
func (p *pump) writeUnsent(now time.Time) {
	n, err := p.client.TryWrite(p.unsent, now)
	p.unsent = p.unsent[n:]
	if len(p.unsent) > 0 && err == nil { // the client is still blocked
		return
	}
	p.stopClientWatch()
	if err != nil {
		p.passToGoroutine(readResult{clientGone: true})
		return
	}
	p.unsent = nil // the client has all of it
	if p.engineWatch.Resume() != nil {
		p.passWithoutRead() // the goroutine reads on without a watch
		return
	}
	p.awaitEngine(now)
}

// stopClientWatch ends the watch of the client's socket, if there is one.
func (p *pump) stopClientWatch() {
	if p.clientWatch == nil {
		return
	}
	watch := p.clientWatch
	p.clientWatch = nil
	if p.client.Socket(func(int) { watch.Remove() }) != nil {
		watch.Forget() // the socket is closed, so its descriptor may already belong to another socket
	}
}

// Expired is called when a wait for the engine or for the client has lasted until the time given to engineWatch.WakeAt.
func (p *pump) Expired(_ *loop.Watch, now time.Time) {
	defer p.recoverOnLoop()
	if p.clientWatch != nil { // the wait is for the client
		p.clientExpired(now)
		return
	}
	p.engineExpired(now)
}

// engineExpired ends a wait for the engine: it passes a stream whose engine was silent for too long to a goroutine, which decides what
// becomes of it. Otherwise a comment for the client is due, because awaitEngine waits for nothing else.
func (p *pump) engineExpired(now time.Time) {
	engineLate := !p.engineDeadline.IsZero() && !now.Before(p.engineDeadline) // zero: the engine may be silent for ever
	if engineLate {
		p.passWithoutRead()
		return
	}
	frame := append(make([]byte, edge.ChunkRoom), p.keepAlive.Comment()...) // sendFrame needs the room before the bytes
	p.sendFrame(frame, now)
}

// clientExpired gives up a client that does not take its answer. If the client has got more time since the wait began, the wait goes on;
// engineWatch only serves as its timer (see awaitClient).
func (p *pump) clientExpired(now time.Time) {
	giveUpAt := p.client.GiveUpAt()               // zero: never
	if giveUpAt.IsZero() || giveUpAt.After(now) { // the client still has time
		p.engineWatch.WakeAt(giveUpAt)
		return
	}
	p.client.GiveUp(now)
	p.passToGoroutine(readResult{clientGone: true})
}

// passWithoutRead passes the stream to a new goroutine when the loop has read nothing that is still to be processed. The goroutine writes
// p.unsent, which the client has not taken, and goes on with blocking calls.
func (p *pump) passWithoutRead() { p.passToGoroutine(readResult{}) }

// passToGoroutine passes the stream to a new goroutine, with the result of the last read and with p.unsent, which the client has not taken.
func (p *pump) passToGoroutine(r readResult) {
	p.leaveLoop()
	if len(r.frame) > edge.ChunkRoom { // after the room for the line with the chunk's size, there are bytes for the client
		r.frame = append([]byte(nil), r.frame[edge.ChunkRoom:]...) // a copy, because the loop uses the frame's memory again
	} else {
		r.frame = nil
	}
	unsent := p.unsent
	p.unsent = nil
	go p.guard(func() { p.continueBlocking(r, unsent) })
}

// continueBlocking runs in the new goroutine, and continues where the loop has stopped. It first writes unsent, which the client has not
// taken. If that fails, or the client is gone, it ends the stream.
func (p *pump) continueBlocking(r readResult, unsent []byte) {
	p.resp.Reattach(r.readErr)
	clientGone := r.clientGone
	if !clientGone && len(unsent) > 0 {
		clientGone = p.client.WriteRest(unsent) != nil
	}
	if clientGone {
		p.Close()
		p.endIncomplete()
		return
	}
	p.LeaveLoop(r.frame, r.end) // the stream gets back what the loop has read of it: the next call of Next returns these bytes
	p.driveBlocking()
}

// leaveLoop ends the loop's watches of the stream's sockets. Callbacks that were posted for this stream before do nothing from now on.
func (p *pump) leaveLoop() {
	p.handovers++
	p.stopClientWatch()
	if p.engineWatch != nil {
		p.engineWatch.Remove()
		p.engineWatch = nil
	}
}

// recoverOnLoop is deferred by code that runs on the loop. If the code panics, a goroutine ends the stream, because this may block, and the
// loop goes on.
func (p *pump) recoverOnLoop() {
	v := recover()
	if v == nil { // the code did not panic
		return
	}
	v = fmt.Sprintf("%v, on a loop: %s", v, debug.Stack()) // the stack of the first panic
	p.leaveLoop()
	go p.guard(func() {
		p.resp.Reattach(nil) // gives the socket back to the response; nil: no read has failed
		panic(v)             // guard catches it, as any panic of a goroutine, and ends the stream (Stream.Panicked)
	})
}
