package geo

import (
	"errors"
	"io"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/sse"
)

var readPool = sync.Pool{New: func() any { return new([8 << 10]byte) }}

// readEvents waits for bytes and appends whole events to unread; one that is too large comes in
// pieces. A client could not separate a broken event from the next one. event: one of them is no
// comment. An error may come together with an event.
func (f *Forward) readEvents() (event bool, err error) {
	buf := readPool.Get().(*[8 << 10]byte)
	defer readPool.Put(buf)
	err = f.readBytes(buf[:])
	f.unread, event = f.appendEvents(f.unread)
	if err == nil {
		err = f.reader.Err()
	}
	return event, err
}

func (f *Forward) appendEvents(dst []byte) (_ []byte, event bool) {
	for {
		e, ok := f.reader.Next()
		if !ok {
			return dst, event
		}
		if e.Kind == sse.KindComment {
			dst = sse.AppendComments(dst, e)
			continue
		}
		dst = append(dst, e.Raw...)
		if e.Kind == sse.KindData {
			f.events++
		}
		event = true
	}
}

func (f *Forward) readBytes(buf []byte) error {
	if wait := f.reader.Wait(time.Now()); wait != f.idle {
		f.idle = wait
		f.resp.SetIdle(wait)
	}
	n, err := f.resp.Read(buf)
	f.reader.Feed(buf[:n], time.Now())
	return err
}

// ContentType is that of the streamed answer.
func (f *Forward) ContentType() []byte { return f.resp.ContentType() }

// Cached is the number of prompt tokens from the peer's cache; -1: not reported.
func (f *Forward) Cached() int { return f.cached }

// Events counts data events, which are about as many as tokens.
func (f *Forward) Events() int { return f.events }

// FirstAt is when the first event came; zero: none has.
func (f *Forward) FirstAt() time.Time { return f.firstAt }

// Read waits only if no events have arrived. If the peer is lost, it returns an error event, and
// then ErrPeerLost, so that the client's connection is closed. This event has no [DONE] after it.
func (f *Forward) Read(p []byte) (int, error) {
	if err := f.awaitEvents(); err != nil {
		return 0, err
	}
	n := copy(p, f.unread)
	// The rest moves to the front, so that the memory is used again.
	f.unread = f.unread[:copy(f.unread, f.unread[n:])]
	return n, nil
}

// Pending is how many bytes Read can return without waiting.
func (f *Forward) Pending() int { return len(f.unread) }

// Next returns all events that have arrived. They are valid until the next call of any method.
func (f *Forward) Next() ([]byte, error) {
	if err := f.awaitEvents(); err != nil {
		return nil, err
	}
	events := f.unread
	f.unread = f.unread[:0]
	return events, nil
}

// Ended reports whether all events of a complete answer were read.
func (f *Forward) Ended() bool { return f.reader.Done() && len(f.unread) == 0 }

// Torn says that only a part of the last event was returned.
func (f *Forward) Torn() bool { return f.reader.Torn() }

func (f *Forward) awaitEvents() error {
	for len(f.unread) == 0 {
		if f.readErr != nil {
			return f.readErr
		}
		f.readMore()
	}
	return nil
}

// readMore appends events to unread. If the answer breaks off, it appends an error event for the
// client.
func (f *Forward) readMore() {
	if f.reader.Done() { // the answer is complete, even if the connection fails afterwards
		f.readErr = io.EOF
		return
	}
	if _, err := f.readEvents(); err != nil {
		f.appendLostEvent() // no effect if the answer is complete now
	}
}

func (f *Forward) appendLostEvent() {
	if f.reader.Done() {
		return
	}
	f.readErr = ErrPeerLost
	if f.reader.Torn() { // the client has a part of an event, which must end first
		f.unread = append(f.unread, sse.BlankLine...)
	}
	f.unread = sse.ErrorEvent(f.unread, "the region that served the request was lost; send the request again", "server_error", "peer_lost")
}

// Flow returns the response for a caller that reads it itself, with Wait and Arrive, until
// LeaveLoop. nil: the answer has ended, or bytes have arrived, so that Next must be called first.
// The caller must have read all pending events.
func (f *Forward) Flow() *engine.Response {
	if f.readErr != nil || f.resp.Arrived() {
		return nil
	}
	f.unread = nil // it would keep memory that is not used until LeaveLoop
	return f.resp
}

// Wait begins a wait for the peer, and returns its limit; 0: none.
func (f *Forward) Wait(now time.Time) time.Duration { return f.reader.Wait(now) }

// Arrive adds bytes of the answer, and appends whole events to dst.
func (f *Forward) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	f.reader.Feed(data, now)
	if dst, _ = f.appendEvents(dst); f.reader.Done() {
		return dst, sse.Complete
	}
	return dst, sse.NotEnded
}

// Err is why the answer is not read any further.
func (f *Forward) Err() error { return f.reader.Err() }

// LeaveLoop ends the reading by the caller of Flow. Next returns first the events that the client
// has not got yet, then an error event if the answer cannot be read further.
func (f *Forward) LeaveLoop(events []byte, _ sse.End) {
	if f.unread = events; f.reader.Err() != nil {
		f.appendLostEvent()
	}
}

// closeResponse: if only the end of the body is missing, a goroutine waits for it, because the
// connection can then be used again.
func (f *Forward) closeResponse() {
	ps := f.peers
	ps.mu.Lock()
	onlyEndMissing := f.reader != nil && f.reader.Done() && !f.resp.Ended()
	// No goroutine begins after Peers.Close, which waits for all of them.
	waitsForEnd := onlyEndMissing && ps.ctx.Err() == nil
	if waitsForEnd {
		ps.running.Go(func() {
			defer f.resp.Close()
			var buf [1 << 10]byte
			for f.reader.Err() == nil && f.readBytes(buf[:]) == nil { // reads on towards the end
			}
		})
	}
	ps.mu.Unlock()
	if !waitsForEnd {
		f.resp.Close()
	}
}

// Close ends the forward, even if the answer was not read to the end.
func (f *Forward) Close() {
	outcome := OutcomeOK
	switch {
	case f.reader == nil: // no stream
	case f.Lost():
		outcome = OutcomeLost
	case !f.reader.Done(): // the caller stopped, because the client left
		outcome = OutcomeGone
	}
	f.End(outcome)
	f.closeResponse()
}

// Lost reports a loss in the middle of the answer, before the client left.
func (f *Forward) Lost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.clientLeft && errors.Is(f.readErr, ErrPeerLost)
}

// Whole reports whether the answer was read to its end.
func (f *Forward) Whole() bool { return f.reader == nil || f.reader.Done() }
