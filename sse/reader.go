package sse

import (
	"errors"
	"time"
)

// These errors say why a Reader takes no more from an engine.
var (
	// ErrSilent says that no data event came in time, though other bytes may have come.
	ErrSilent = errors.New("the engine sent no event in time")
	// ErrTooMuch says that the answer has more bytes than it may have.
	ErrTooMuch = errors.New("the engine sent more bytes than its answer may have")
	// ErrTail says that the body did not end soon behind [DONE]. The answer is whole.
	ErrTail = errors.New("the engine did not end its stream behind [DONE]")
)

// tailTime and tailBytes bound how long a Reader waits for the end of a body behind [DONE], and how many bytes
// it reads there. The wait pays, because the connection to the engine can then be used again.
const (
	tailTime  = 250 * time.Millisecond
	tailBytes = 64 << 10
)

// Limits bound what an engine may send for one answer. Zero bounds nothing,
// except where a default is named.
type Limits struct {
	Event int           // bytes of one event (DefaultMaxEvent); a larger one comes in pieces of KindOpaque
	Bytes int64         // of the whole stream, comments and line ends included
	First time.Duration // until the first data event
	Gap   time.Duration // between two data events
}

// Reader cuts an engine's stream into events as a Framer does, and holds the
// engine to its Limits. It has no clock: the caller that reads the socket tells it
// when a wait begins and when bytes came, and asks how long the wait may take.
//
// Only a data event, as a whole, ends a wait. A comment, or the next byte of an
// event, shows that the connection lives, not that the answer goes on.
type Reader struct {
	framer Framer
	limits Limits

	bytes       int64         // bytes of the events returned; after [DONE], bytes that came behind it
	quiet       time.Duration // waited since the last data event
	quietBefore time.Duration // the value of quiet when the last data event came; see unheard
	since       time.Time     // when the present wait began; zero: there is no wait
	begun       bool          // a data event came
	done        bool          // [DONE] came
	torn        bool          // the last event returned is a piece, and not the last one of its event
	err         error
}

// NewReader returns a reader without limits; Reset sets them.
func NewReader() *Reader { return &Reader{framer: Framer{max: DefaultMaxEvent}} }

// Reset makes the reader ready for another stream; it keeps its memory.
func (r *Reader) Reset(l Limits) {
	f := r.framer
	if f.max = l.Event; f.max <= 0 {
		f.max = DefaultMaxEvent
	}
	f.Reset()
	*r = Reader{framer: f, limits: l}
}

// Wait records that a wait for bytes begins now, and returns how long it may last; 0:
// for ever. Once that time is over, Err returns ErrSilent or ErrTail. The time between a
// Feed and the next Wait belongs to the client, which may read slowly, and does
// not count.
func (r *Reader) Wait(now time.Time) time.Duration {
	if r.since.IsZero() {
		r.since = now
	}
	limit := r.limit()
	if limit <= 0 {
		return 0
	}
	left := limit - r.quiet - now.Sub(r.since)
	if left <= 0 {
		r.timeUp()
	}
	return max(left, 1)
}

// limit is how long the present wait may last: for the first event, for the next one, or for the end behind [DONE]; 0:
// for ever.
func (r *Reader) limit() time.Duration {
	switch {
	case r.done:
		return tailTime
	case r.begun:
		return r.limits.Gap
	}
	return r.limits.First
}

// timeUp sets err, because the present wait has lasted too long.
func (r *Reader) timeUp() {
	switch {
	case r.err != nil:
	case r.done:
		r.err = ErrTail
	default:
		r.err = ErrSilent
	}
}

// Feed takes the bytes that came by now. p must not change until Next returns false.
// Slices of earlier events are no longer valid.
func (r *Reader) Feed(p []byte, now time.Time) {
	if !r.since.IsZero() {
		r.quiet += now.Sub(r.since)
		r.since = time.Time{}
	}
	if !r.done {
		r.framer.Feed(p)
		return
	}
	if r.bytes += int64(len(p)); r.bytes > tailBytes && r.err == nil {
		r.err = ErrTail
	}
}

// Next returns the next complete event up to [DONE]; see Framer.Next. Once it
// has none, Err tells whether the engine may go on.
func (r *Reader) Next() (Event, bool) {
	if r.err != nil || r.done {
		return Event{}, false
	}
	e, ok := r.framer.Next()
	if !ok {
		switch limit := r.limit(); {
		case r.exceeds(int64(r.framer.held())):
		case limit > 0 && r.quiet >= limit:
			r.timeUp()
		}
		return Event{}, false
	}
	if r.exceeds(int64(len(e.Raw))) {
		return Event{}, false
	}
	r.bytes += int64(len(e.Raw))
	r.torn = e.Kind == KindOpaque && r.framer.handed > 0
	switch {
	case e.Kind == KindDone:
		r.finish()
	case e.Kind == KindData, e.Kind == KindOpaque && !r.torn: // the last piece
		r.begun, r.quiet, r.quietBefore = true, 0, r.quiet
	}
	return e, true
}

// unheard undoes that the event just returned has begun the answer, because nothing in it shows that
// the engine has computed anything. The wait for the first event goes on as if this event had not come.
func (r *Reader) unheard() { r.begun, r.quiet = false, r.quietBefore }

// finish says that the event just returned was the last, as [DONE] does.
func (r *Reader) finish() { r.done, r.bytes, r.quiet = true, int64(r.framer.held()), 0 }

// exceeds tells whether the answer would have more bytes than Limits.Bytes with so many bytes more, and sets err then.
func (r *Reader) exceeds(more int64) bool {
	if r.limits.Bytes > 0 && r.bytes+more > r.limits.Bytes {
		r.err = ErrTooMuch
		return true
	}
	return false
}

// Err is why nothing more is taken from this engine: ErrSilent or ErrTooMuch
// for an answer that is not whole, ErrTail for one that is; nil while it may go
// on.
func (r *Reader) Err() error { return r.err }

// Torn tells whether pieces of an event were returned and its end was not. A blank
// line must go out before another event, or a client reads both as one.
func (r *Reader) Torn() bool { return r.torn }

// Done tells whether [DONE] came.
func (r *Reader) Done() bool { return r.done }

// Buffered is how many bytes of an unfinished event have come; see
// Framer.Buffered.
func (r *Reader) Buffered() int { return r.framer.Buffered() }
