// Package pump carries a streamed answer from its engine's socket to its client's socket. While
// bytes only flow, an event loop drives the stream. In all other cases (the end, an engine that
// fails or is silent, a drain, a client that leaves) a goroutine takes over with blocking calls,
// and may pass the stream back.
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

// A Stream is an answer under way. Either the loop or one goroutine owns it; the previous owner
// must not touch it.
type Stream interface {
	// Next waits for events. io.EOF means the end of the answer. The events are valid until the next
	// call of any method.
	Next() (events []byte, err error)
	// Ended says that Next has returned the last events.
	Ended() bool
	Torn() bool
	// Flow returns the engine's response, from which the loop then reads, and drops the stream's
	// buffers; nil: the goroutine must keep the stream.
	Flow() *engine.Response

	// Wait begins a wait for the engine, and returns how long it may last; 0: for ever.
	Wait(now time.Time) time.Duration
	// Pause ends the wait, because the client takes no bytes: nothing is read until it does.
	Pause(now time.Time)
	// Arrive processes data, and appends the bytes for the client to dst. After the end, only the end
	// of the body is still to be read.
	Arrive(dst, data []byte, now time.Time) ([]byte, sse.End)
	// Err returns why the stream accepts no more data.
	Err() error

	// LeaveLoop gives the next call of Next these events. end is the first end that Arrive reported in
	// the loop's last read.
	LeaveLoop(events []byte, end sse.End)
	// Close releases what the request holds, however the answer ended.
	Close()
	// Panicked is called instead of Close if the code that drives the stream panics with v.
	Panicked(v any)
}

// Values of the argument write of loop.Loop.Add.
const (
	forReading = false
	forWriting = true
)

// Its methods run on the goroutine that drives the stream, or on the loop.
type pump struct {
	Stream
	client    *edge.Hijacked
	keepAlive *edge.KeepAlive  // nil: no comments for a silent engine
	resp      *engine.Response // the response from which the loop reads, or has read last

	loop           *loop.Loop
	handovers      int         // passes to a goroutine; a callback from an earlier one does nothing
	engineWatch    *loop.Watch // the watch of the engine's socket; nil: a goroutine drives the stream
	engineDeadline time.Time   // until when the engine may be silent; zero: for ever
	clientWatch    *loop.Watch // nil: the client takes bytes
	unsent         []byte      // bytes that the client has not taken
}

// Start takes over the client's connection when the handler has returned. It returns false if there
// are no loops, or if the connection cannot be taken over.
func Start(ctx *fasthttp.RequestCtx, log *zap.Logger, loops *loop.Set, s Stream) bool {
	l := loops.Next()
	return l != nil && edge.Hijack(ctx, log, func(o *edge.Hijacked) {
		p := &pump{Stream: s, client: o, keepAlive: o.KeepAlive(), loop: l}
		p.guard(p.driveBlocking)
	})
}

func (p *pump) driveBlocking() {
	for {
		events, err := p.nextEvents()
		if errors.Is(err, io.EOF) { // the client still lacks the end of the body
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
			return
		}
	}
}

// err is nil if the client has the whole answer.
func (p *pump) end(err error) {
	p.Close()
	isWhole := err == nil
	p.client.End(isWhole)
}

func (p *pump) nextEvents() ([]byte, error) {
	if p.commentAfter() > 0 {
		p.keepAlive.StartTimer()
		defer p.keepAlive.StopTimer()
	}
	return p.Next()
}

// commentAfter is 0 if no comment may be sent, for example because it would stand inside an event.
func (p *pump) commentAfter() time.Duration {
	if p.keepAlive == nil || p.Torn() {
		return 0
	}
	return p.keepAlive.Interval()
}

func (p *pump) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			p.Panicked(v)
			p.endIncomplete()
		}
	}()
	f()
}

func (p *pump) endIncomplete() {
	const whole = false
	p.client.End(whole)
}

// passToLoop returns false if the goroutine keeps the stream.
//
// The loop calls posted functions later, when it may have passed the stream to another goroutine,
// so each of them does nothing if p.handovers has grown since.
func (p *pump) passToLoop() bool {
	if p.client.ClearWriteDeadline() != nil { // closed
		return false
	}
	resp := p.Flow()
	if resp == nil { // the answer has ended, or bytes of it wait to be read
		return false
	}
	handover := p.handovers
	p.resp = resp
	fd, detached := resp.Detach(func() { p.loop.Post(func() { p.interrupt(handover) }) })
	if !detached { // for example TLS
		return false
	}
	// From here on, interrupt may even have passed the stream to another goroutine.
	if p.loop.Post(func() { p.startOnLoop(fd, handover) }) {
		return true
	}
	// Interrupt may have been posted before the loop closed. Close waits until the loop has called all
	// that was posted; only the loop changes p.handovers, so this goroutine may read it then.
	p.loop.Close()
	if handover != p.handovers { // passed to another goroutine by interrupt
		return true
	}
	resp.Reattach(nil) // this goroutine reads on; no read has failed
	return false
}

func (p *pump) startOnLoop(fd, handover int) {
	defer p.recoverOnLoop()
	if handover != p.handovers {
		return
	}
	watch, err := p.loop.Add(fd, p, forReading)
	if err != nil { // the goroutine needs no watch
		p.passWithoutRead()
		return
	}
	p.engineWatch = watch
	p.awaitEngine(time.Now())
}

// interrupt runs after an abort or a drain, or when the client has left. The goroutine finds out
// which. handover is the value of p.handovers when the loop got the stream.
func (p *pump) interrupt(handover int) {
	if handover == p.handovers {
		p.passWithoutRead()
	}
}

// The loop calls Expired when a comment is due or the engine was silent for too long.
func (p *pump) awaitEngine(now time.Time) {
	p.engineDeadline = time.Time{}
	if wait := p.Wait(now); wait > 0 {
		p.engineDeadline = now.Add(wait)
	}
	wakeAt := p.engineDeadline
	if after := p.commentAfter(); after > 0 {
		if commentAt := now.Add(after); wakeAt.IsZero() || commentAt.Before(wakeAt) {
			wakeAt = commentAt
		}
	}
	p.engineWatch.WakeAt(wakeAt) // zero also ends the time of an earlier wait
}

type readResult struct {
	end        sse.End
	frame      []byte // edge.ChunkRoom empty bytes, and then the bytes for the client
	readErr    error  // the error of the last read from the engine's socket
	bodyEnded  bool   // the body has ended, or is malformed
	clientGone bool
}

// maxReadPerTurn bounds what the loop reads for one stream before its others, in bytes, which an
// engine that sends faster than the loop reads would delay.
const maxReadPerTurn = 256 << 10

func (p *pump) Ready(w *loop.Watch, ended bool, now time.Time) {
	defer p.recoverOnLoop()
	if w != p.engineWatch {
		p.writeUnsent(now)
		return
	}
	for read := 0; p.engineWatch != nil && p.clientWatch == nil; {
		// The stream may be passed on, or the client may take no more.
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
		if n == 0 {
			return
		}
		p.processBytes(buf[:n], now)
		read += n
		isEmptyNow := n < len(buf)
		if isEmptyNow && !ended { // if it has ended, one more read tells how
			return
		}
	}
}

func (p *pump) processBytes(b []byte, now time.Time) {
	r := p.unpack(b, now)
	hasEnded := r.end != sse.NotEnded || r.bodyEnded
	if hasEnded || p.Err() != nil {
		p.passToGoroutine(r)
		return
	}
	p.sendFrame(r.frame, now)
}

func (p *pump) sendFrame(frame []byte, now time.Time) {
	if len(frame) > edge.ChunkRoom {
		frame = p.client.Frame(frame) // an HTTP chunk, whose head goes into the room
		n, err := p.client.TryWrite(frame, now)
		if err != nil {
			p.passToGoroutine(readResult{clientGone: true})
			return
		}
		if n < len(frame) {
			p.Pause(now) // the engine's time limit does not run meanwhile
			p.awaitClient(frame[n:])
			return
		}
	}
	p.awaitEngine(now)
}

// The frame is valid until the loop's next read.
func (p *pump) unpack(b []byte, now time.Time) readResult {
	var r readResult
	out := p.loop.Out[:0]
	out = append(out, make([]byte, edge.ChunkRoom)...) // for the head of the chunk
	for len(b) > 0 && !r.bodyEnded {
		data, used, err := p.resp.Unframe(b)
		b = b[used:]
		if len(data) > 0 {
			var end sse.End
			if out, end = p.Arrive(out, data, now); r.end == sse.NotEnded { // the first end counts
				r.end = end
			}
		}
		r.bodyEnded = err != nil // io.EOF or malformed; the goroutine reads the same error again
	}
	r.frame = out
	if p.loop.Out = out[:0]; cap(out) > 4*len(p.loop.Buffer) {
		p.loop.Out = nil // one huge event must not keep this much memory
	}
	return r
}

// Until the client has taken all, nothing is read from the engine. So engineWatch has no other use
// meanwhile, and serves as the timer of the client.
func (p *pump) awaitClient(rest []byte) {
	p.unsent = append([]byte(nil), rest...) // the loop uses the memory of rest again
	err := p.engineWatch.Pause()
	if err == nil {
		err = p.client.Socket(func(fd int) { p.clientWatch, _ = p.loop.Add(fd, p, forWriting) })
	}
	if err != nil || p.clientWatch == nil { // Add has failed
		p.passWithoutRead() // the goroutine writes p.unsent
		return
	}
	p.engineWatch.WakeAt(p.client.GiveUpAt())
}

func (p *pump) writeUnsent(now time.Time) {
	n, err := p.client.TryWrite(p.unsent, now)
	p.unsent = p.unsent[n:]
	if len(p.unsent) > 0 && err == nil {
		return
	}
	p.stopClientWatch()
	if err != nil {
		p.passToGoroutine(readResult{clientGone: true})
		return
	}
	p.unsent = nil
	if p.engineWatch.Resume() != nil {
		p.passWithoutRead() // the goroutine needs no watch
		return
	}
	p.awaitEngine(now)
}

func (p *pump) stopClientWatch() {
	if p.clientWatch == nil {
		return
	}
	watch := p.clientWatch
	p.clientWatch = nil
	if p.client.Socket(func(int) { watch.Remove() }) != nil {
		watch.Forget() // its descriptor may already belong to another socket
	}
}

func (p *pump) Expired(_ *loop.Watch, now time.Time) {
	defer p.recoverOnLoop()
	if p.clientWatch != nil {
		p.clientExpired(now)
		return
	}
	p.engineExpired(now)
}

// If the engine is not late, a comment is due.
func (p *pump) engineExpired(now time.Time) {
	engineLate := !p.engineDeadline.IsZero() && !now.Before(p.engineDeadline)
	if engineLate {
		p.passWithoutRead()
		return
	}
	// sendFrame needs room for the head of the chunk.
	frame := append(make([]byte, edge.ChunkRoom), p.keepAlive.Comment()...)
	p.sendFrame(frame, now)
}

// The client may have got more time since the wait began.
func (p *pump) clientExpired(now time.Time) {
	giveUpAt := p.client.GiveUpAt() // zero: never
	if giveUpAt.IsZero() || giveUpAt.After(now) {
		p.engineWatch.WakeAt(giveUpAt)
		return
	}
	p.client.GiveUp(now)
	p.passToGoroutine(readResult{clientGone: true})
}

func (p *pump) passWithoutRead() { p.passToGoroutine(readResult{}) }

func (p *pump) passToGoroutine(r readResult) {
	p.leaveLoop()
	if len(r.frame) > edge.ChunkRoom {
		// The loop uses the frame's memory again.
		r.frame = append([]byte(nil), r.frame[edge.ChunkRoom:]...)
	} else {
		r.frame = nil
	}
	unsent := p.unsent
	p.unsent = nil
	go p.guard(func() { p.continueBlocking(r, unsent) })
}

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
	p.LeaveLoop(r.frame, r.end)
	p.driveBlocking()
}

// Callbacks that were posted before do nothing from now on.
func (p *pump) leaveLoop() {
	p.handovers++
	p.stopClientWatch()
	if p.engineWatch != nil {
		p.engineWatch.Remove()
		p.engineWatch = nil
	}
}

// After a panic a goroutine ends the stream, because this may block, and the loop goes on.
func (p *pump) recoverOnLoop() {
	v := recover()
	if v == nil {
		return
	}
	v = fmt.Sprintf("%v, on a loop: %s", v, debug.Stack()) // of the first panic
	p.leaveLoop()
	go p.guard(func() {
		p.resp.Reattach(nil) // no read has failed
		panic(v)             // for guard, which ends the stream
	})
}
