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

// fill reads the bytes that have arrived; event says whether they end a data event. Events are
// passed on whole, unless they are too large and come in pieces: a client could not tell an event
// that broke off from the next one.
func (f *Forward) fill() (event bool, err error) {
	buf := readPool.Get().(*[8 << 10]byte)
	defer readPool.Put(buf)
	err = f.receive(buf[:])
	f.unread, event = f.appendEvents(f.unread)
	if err == nil {
		err = f.reader.Err()
	}
	return event, err
}

// appendEvents appends the events that have come.
func (f *Forward) appendEvents(dst []byte) (_ []byte, event bool) {
	for {
		e, ok := f.reader.Next()
		if !ok {
			return dst, event
		}
		dst = append(dst, e.Raw...)
		if e.Kind == sse.KindData {
			f.events++
		}
		event = event || e.Kind != sse.KindComment
	}
}

// receive reads what has arrived, and waits for it as long as the peer may be
// silent.
func (f *Forward) receive(buf []byte) error {
	if wait := f.reader.Wait(time.Now()); wait != f.idle {
		f.idle = wait
		f.resp.SetIdle(wait)
	}
	n, err := f.resp.Read(buf)
	f.reader.Feed(buf[:n], time.Now())
	return err
}

// ContentType of the answer that is streamed.
func (f *Forward) ContentType() []byte { return f.resp.ContentType() }

// Cached is how many prompt tokens the peer found in a cache; -1: it did not say.
func (f *Forward) Cached() int { return f.cached }

// Events is how many data events came so far; that is about the number of tokens.
func (f *Forward) Events() int { return f.events }

// FirstAt is when the first event came.
func (f *Forward) FirstAt() time.Time { return f.firstAt }

// Read returns the events that have come, and waits only if there are none.
// If the peer is lost, it returns an error event and then ErrPeerLost, so that the client's connection
// is closed. Unlike other error events of a chat, this one has no [DONE] behind it.
func (f *Forward) Read(p []byte) (int, error) {
	if err := f.await(); err != nil {
		return 0, err
	}
	k := copy(p, f.unread)
	f.unread = f.unread[:copy(f.unread, f.unread[k:])]
	return k, nil
}

// Pending is how much more Read has without waiting.
func (f *Forward) Pending() int { return len(f.unread) }

// Next returns all events that have come, as Read does. They are valid until the next call of any method.
func (f *Forward) Next() ([]byte, error) {
	if err := f.await(); err != nil {
		return nil, err
	}
	events := f.unread
	f.unread = f.unread[:0]
	return events, nil
}

// Ended says that nothing comes behind the events that were read.
func (f *Forward) Ended() bool { return f.reader.Done() && len(f.unread) == 0 }

// await waits until there are events to return.
func (f *Forward) await() error {
	for len(f.unread) == 0 {
		if f.readErr != nil {
			return f.readErr
		}
		f.more()
	}
	return nil
}

// more reads the next arrival, or notes that nothing more comes.
func (f *Forward) more() {
	if f.reader.Done() { // even if the connection has failed
		f.readErr = io.EOF
		return
	}
	if _, err := f.fill(); err != nil {
		f.broke()
	}
}

// broke adds an error event for the client, if the answer is not whole.
func (f *Forward) broke() {
	if f.reader.Done() {
		return
	}
	f.readErr = ErrPeerLost
	if f.reader.Torn() {
		f.unread = append(f.unread, sse.BlankLine...)
	}
	f.unread = sse.ErrorEvent(f.unread, "the region that served the request was lost; send the request again", "server_error", "peer_lost")
}

// Flow returns the peer's response for a caller that reads it by itself until GoBack, with Wait and
// Arrive; nil: Next has to be called first.
func (f *Forward) Flow() *engine.Response {
	if f.readErr != nil || f.resp.Arrived() {
		return nil
	}
	f.unread = nil
	return f.resp
}

// Wait begins a wait for the peer, and says how long it may last; 0: for ever.
func (f *Forward) Wait(now time.Time) time.Duration { return f.reader.Wait(now) }

// Arrive takes in data of the peer's answer, and appends the whole events to dst.
func (f *Forward) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	f.reader.Feed(data, now)
	if dst, _ = f.appendEvents(dst); f.reader.Done() {
		return dst, sse.Whole
	}
	return dst, sse.Runs
}

// Err is why nothing more is taken from the peer; nil: it may go on.
func (f *Forward) Err() error { return f.reader.Err() }

// GoBack has Next read the response again. It returns events first.
func (f *Forward) GoBack(events []byte, _ sse.End) {
	if f.unread = events; f.reader.Err() != nil {
		f.broke()
	}
}

// finish closes the response. In a goroutine, it waits a short time for the end of the body, because
// the connection can then be used again. The client's answer does not wait for that.
func (f *Forward) finish() {
	n := f.node
	n.mu.Lock()
	wait := f.reader != nil && f.reader.Done() && !f.resp.Ended() && n.ctx.Err() == nil
	if wait {
		n.running.Go(func() {
			defer f.resp.Close()
			var buf [1 << 10]byte
			for f.reader.Err() == nil && f.receive(buf[:]) == nil {
			}
		})
	}
	n.mu.Unlock()
	if !wait {
		f.resp.Close()
	}
}

// Close ends the forward, however far it was read.
func (f *Forward) Close() {
	outcome := OutcomeOK
	switch {
	case f.reader == nil: // the answer came in one piece
	case f.Lost():
		outcome = OutcomeLost
	case !f.reader.Done():
		outcome = OutcomeGone
	}
	f.End(outcome)
	f.finish()
}

// Lost says whether the peer was lost in the middle, before the client left.
func (f *Forward) Lost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.clientLeft && errors.Is(f.readErr, ErrPeerLost)
}

// Whole says whether all of the answer was read.
func (f *Forward) Whole() bool { return f.reader == nil || f.reader.Done() }
