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

// readEvents waits until bytes arrive, reads them, and appends whole events to unread. event reports whether one of these is not a
// comment; an error may come together with an event. Only whole events are passed on, because a client could not separate a broken
// event from the next one; an event that is too large comes in pieces.
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

// appendEvents appends the events that have arrived to dst, and counts the data events. event reports whether one of them is not a
// comment.
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

// readBytes waits until bytes arrive, at most as long as the peer may be silent, and reads them.
func (f *Forward) readBytes(buf []byte) error {
	if wait := f.reader.Wait(time.Now()); wait != f.idle { // the limit is set on the connection only when it changes
		f.idle = wait
		f.resp.SetIdle(wait)
	}
	n, err := f.resp.Read(buf)
	f.reader.Feed(buf[:n], time.Now())
	return err
}

// ContentType is the content type of the streamed answer.
func (f *Forward) ContentType() []byte { return f.resp.ContentType() }

// Cached is the number of prompt tokens that the peer found in a cache; -1: not reported.
func (f *Forward) Cached() int { return f.cached }

// Events is the number of data events so far, which is about the number of tokens.
func (f *Forward) Events() int { return f.events }

// FirstAt is when the first event came; zero: none has come yet.
func (f *Forward) FirstAt() time.Time { return f.firstAt }

// Read returns events that have arrived, and waits only if there are none. If the peer is lost, Read returns an error event,
// and then ErrPeerLost, so that the client's connection is closed. Unlike other error events of a chat, this event has no
// [DONE] after it.
func (f *Forward) Read(p []byte) (int, error) {
	if err := f.awaitEvents(); err != nil {
		return 0, err
	}
	n := copy(p, f.unread)
	f.unread = f.unread[:copy(f.unread, f.unread[n:])] // move what is not read yet to the front, so that the memory is used again
	return n, nil
}

// Pending is the number of bytes that Read can return without waiting.
func (f *Forward) Pending() int { return len(f.unread) }

// Next returns all events that have arrived, like Read. They are valid until the next call of any method.
func (f *Forward) Next() ([]byte, error) {
	if err := f.awaitEvents(); err != nil {
		return nil, err
	}
	events := f.unread
	f.unread = f.unread[:0]
	return events, nil
}

// Ended reports whether the answer is complete and all its events were read.
func (f *Forward) Ended() bool { return f.reader.Done() && len(f.unread) == 0 }

// Torn says that only a part of the last event was returned.
func (f *Forward) Torn() bool { return f.reader.Torn() }

// awaitEvents waits until there are events to return. At the end of the answer it returns readErr.
func (f *Forward) awaitEvents() error {
	for len(f.unread) == 0 {
		if f.readErr != nil {
			return f.readErr
		}
		f.readMore()
	}
	return nil
}

// readMore reads the events that arrive next into unread, or sets readErr to io.EOF after the end of the answer. If the answer breaks off,
// it appends an error event to unread, by which the client learns of the loss, and sets readErr to ErrPeerLost, which Read returns after
// this event.
func (f *Forward) readMore() {
	if f.reader.Done() { // the answer is complete, even if the connection fails afterwards
		f.readErr = io.EOF
		return
	}
	if _, err := f.readEvents(); err != nil {
		f.appendLostEvent() // also sets readErr; no effect if the answer is complete now
	}
}

// appendLostEvent ends the reading, and adds an error event for the client. If the answer is complete, it does nothing.
func (f *Forward) appendLostEvent() {
	if f.reader.Done() {
		return
	}
	f.readErr = ErrPeerLost
	if f.reader.Torn() { // the client has a part of an event, which must end before the error event
		f.unread = append(f.unread, sse.BlankLine...)
	}
	f.unread = sse.ErrorEvent(f.unread, "the region that served the request was lost; send the request again", "server_error", "peer_lost")
}

// Flow returns the peer's response for a caller that reads the response itself, with Wait and Arrive, until it calls LeaveLoop.
// nil: the answer has ended, or bytes of it have arrived already, so the caller must call Next first. Before Flow, the caller must have
// read all events that are pending.
func (f *Forward) Flow() *engine.Response {
	if f.readErr != nil || f.resp.Arrived() {
		return nil
	}
	f.unread = nil // it is empty, and would keep memory that is not used until LeaveLoop
	return f.resp
}

// Wait begins a wait for the peer, and returns its time limit; 0: no limit.
func (f *Forward) Wait(now time.Time) time.Duration { return f.reader.Wait(now) }

// Arrive adds bytes of the peer's answer, and appends the whole events to dst.
func (f *Forward) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	f.reader.Feed(data, now)
	if dst, _ = f.appendEvents(dst); f.reader.Done() {
		return dst, sse.Complete
	}
	return dst, sse.NotEnded
}

// Err is the reason why the peer's answer is not read any further; nil: it may be read further.
func (f *Forward) Err() error { return f.reader.Err() }

// LeaveLoop ends the reading by the caller that got the response from Flow, so that Next goes on with it. events are those that the client
// has not got yet: Next returns them first, and after them an error event if the answer cannot be read any further. The end that Arrive
// returned is not needed, because the reader of f knows whether the answer has ended.
func (f *Forward) LeaveLoop(events []byte, _ sse.End) {
	if f.unread = events; f.reader.Err() != nil {
		f.appendLostEvent()
	}
}

// closeResponse closes the response. If only the end of the body is missing, a goroutine waits for it, because the connection can then
// be used again. The client does not wait for this.
func (f *Forward) closeResponse() {
	ps := f.peers
	ps.mu.Lock()
	onlyEndMissing := f.reader != nil && f.reader.Done() && !f.resp.Ended()
	waitsForEnd := onlyEndMissing && ps.ctx.Err() == nil // no goroutine begins after Close of Peers, which waits for all of them
	if waitsForEnd {
		ps.running.Go(func() {
			defer f.resp.Close()
			var buf [1 << 10]byte
			for f.reader.Err() == nil && f.readBytes(buf[:]) == nil { // readBytes has an effect: it reads on towards the end
			}
		})
	}
	ps.mu.Unlock()
	if !waitsForEnd {
		f.resp.Close()
	}
}

// Close ends the forward and closes the response, even if the answer was not read to the end.
func (f *Forward) Close() {
	outcome := OutcomeOK
	switch {
	case f.reader == nil: // the answer was not streamed
	case f.Lost():
		outcome = OutcomeLost
	case !f.reader.Done(): // the caller stopped reading, because the client left
		outcome = OutcomeGone
	}
	f.End(outcome)
	f.closeResponse()
}

// Lost reports whether the peer was lost in the middle of the answer, before the client left.
func (f *Forward) Lost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.clientLeft && errors.Is(f.readErr, ErrPeerLost)
}

// Whole reports whether the answer was read to its end.
func (f *Forward) Whole() bool { return f.reader == nil || f.reader.Done() }
