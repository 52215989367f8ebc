package sse

import (
	"errors"
	"time"
)

// These errors say why a Reader reads no more from an engine.
var (
	// ErrSilent says that no data event came within Limits.First or Limits.Gap. Comments or a part of an event may have come.
	ErrSilent = errors.New("the engine sent no event in time")
	// ErrTooMuch says that the answer has more bytes than Limits.Bytes.
	ErrTooMuch = errors.New("the engine sent more bytes than its answer may have")
	// ErrTail says that the body did not end soon after [DONE]. The answer is complete.
	ErrTail = errors.New("the engine did not end its stream behind [DONE]")
)

// tailTime and tailBytes bound how long a Reader waits for the end of the body after [DONE], and how many bytes
// it reads until then. It waits because only a connection whose body has ended can be used again.
const (
	tailTime  = 250 * time.Millisecond
	tailBytes = 64 << 10
)

// Limits bound what an engine may send for one answer. Zero means no bound, except for Event.
type Limits struct {
	Event int           // most bytes of one event; 0: DefaultMaxEvent; a larger event comes in pieces of KindOpaque
	Bytes int64         // most bytes of the whole stream, including comments and line ends
	First time.Duration // longest wait for the first data event
	Gap   time.Duration // longest wait between two data events with content
}

// Reader cuts an engine's stream into events as a Framer does, and checks that the engine keeps to its Limits.
// It has no clock: the caller that reads the socket calls Wait before it waits and Feed when bytes came.
//
// The time limits run from one data event to the next. A comment, or a part of an event, shows that the connection is alive, but not
// that the answer makes progress.
type Reader struct {
	framer Framer
	limits Limits

	bytes        int64         // bytes of the events returned; after [DONE], only the bytes that came after it
	silentFor    time.Duration // time spent in waits since the last data event with content
	silentBefore time.Duration // the value of silentFor when the last data event came; see resumeWaitForFirst
	waitBegan    time.Time     // when the current wait began; zero: there is no wait
	sawData      bool          // a data event has come that counts for Limits.First; see resumeWaitForFirst
	done         bool          // [DONE] or another last event came
	torn         bool          // the last event returned is a piece of an event, but not its last piece
	err          error
}

// NewReader returns a reader without limits; Reset sets them.
func NewReader() *Reader { return &Reader{framer: Framer{max: DefaultMaxEvent}} }

// Reset makes the reader ready for another stream and reuses its memory.
func (r *Reader) Reset(l Limits) {
	f := r.framer
	f.max = l.Event
	if f.max <= 0 {
		f.max = DefaultMaxEvent
	}
	f.Reset()
	*r = Reader{framer: f, limits: l}
}

// Wait records that a wait for bytes begins now, and returns how long the wait may last; 0: for ever. Once this time is
// over, Err returns ErrSilent or ErrTail. The time between a Feed and the next Wait does not count, because the proxy
// spends it on a client that may read slowly.
func (r *Reader) Wait(now time.Time) time.Duration {
	if r.waitBegan.IsZero() {
		r.waitBegan = now
	}
	limit := r.waitLimit()
	if limit <= 0 {
		return 0
	}
	timeLeft := limit - r.silentFor - now.Sub(r.waitBegan)
	if timeLeft <= 0 {
		r.failTimedOut()
	}
	return max(timeLeft, 1) // a result of 0 would mean that the wait may last for ever
}

// Pause ends the current wait before bytes have come. The time until the next Wait does not count. The proxy calls it when it stops
// reading from the engine, because it must first write an SSE keep-alive comment to a client that reads slowly.
func (r *Reader) Pause(now time.Time) {
	if !r.waitBegan.IsZero() {
		r.silentFor += now.Sub(r.waitBegan)
		r.waitBegan = time.Time{}
	}
}

// waitLimit is how long the reader may wait for the first event, for the next event, or after [DONE] for the end of the body; 0: for ever.
func (r *Reader) waitLimit() time.Duration {
	switch {
	case r.done:
		return tailTime
	case r.sawData:
		return r.limits.Gap
	}
	return r.limits.First
}

// failTimedOut sets err to say that the current wait took too long, unless err is set already.
func (r *Reader) failTimedOut() {
	switch {
	case r.err != nil: // the first error stays
	case r.done: // the last event has come, and the wait was for the end of the body
		r.err = ErrTail
	default: // the wait was for an event
		r.err = ErrSilent
	}
}

// Feed takes in p, the bytes that came since the last Feed. p must not change until Next returns false. The slices in earlier events are no
// longer valid after Feed.
func (r *Reader) Feed(p []byte, now time.Time) {
	r.Pause(now) // ends the wait for these bytes, so that the time until the next Wait does not count as silence of the engine
	if !r.done {
		r.framer.Feed(p)
		return
	}
	r.bytes += int64(len(p)) // bytes after [DONE] are only counted
	if r.bytes > tailBytes && r.err == nil {
		r.err = ErrTail
	}
}

// Next returns the next complete event up to [DONE]. An event that is larger than Limits.Event comes in pieces of KindOpaque. The whole
// answer may have at most Limits.Bytes. If the second result is false, Err says whether the caller may read more from the engine.
func (r *Reader) Next() (Event, bool) {
	if r.err != nil || r.done {
		return Event{}, false
	}
	e, found := r.framer.Next()
	if !found {
		switch limit := r.waitLimit(); {
		case r.failIfTooLarge(int64(r.framer.unreturned())): // has set err; the bytes of an event that has not ended count, too
		case limit > 0 && r.silentFor >= limit: // bytes have come, but no event that ends the wait
			r.failTimedOut()
		}
		return Event{}, false
	}
	if r.failIfTooLarge(int64(len(e.Raw))) { // has set err
		return Event{}, false
	}
	r.bytes += int64(len(e.Raw))
	r.torn = e.Kind == KindOpaque && r.framer.comesInPieces() // the event goes on: e is one of its pieces, but not the last one
	switch {
	case e.Kind == KindDone:
		r.markEnd()
	// A comment does not end the wait for an event, and neither does a piece that is not the last one of its event.
	case e.Kind == KindData, e.Kind == KindOpaque && !r.torn:
		r.sawData = true
		r.silentBefore, r.silentFor = r.silentFor, 0 // if the event turns out to have no content, resumeWait lets the wait go on
	}
	return e, true
}

// resumeWaitForFirst makes the wait for the first event continue as if the event that Next returned last had not come, because nothing in
// this event shows that the engine has computed anything.
func (r *Reader) resumeWaitForFirst() {
	r.sawData = false
	r.resumeWait()
}

// resumeWait makes the wait for the next event continue as if the event that Next returned last had not come, because it has no content.
func (r *Reader) resumeWait() { r.silentFor = r.silentBefore }

// markEnd marks the event that Next returned last as the end of the answer, as [DONE] would be.
func (r *Reader) markEnd() { r.done, r.bytes, r.silentFor = true, int64(r.framer.unreturned()), 0 }

// failIfTooLarge sets err, and returns true, if the answer with so many further bytes is larger than Limits.Bytes.
func (r *Reader) failIfTooLarge(furtherBytes int64) (failed bool) {
	if r.limits.Bytes > 0 && r.bytes+furtherBytes > r.limits.Bytes {
		r.err = ErrTooMuch
		return true
	}
	return false
}

// Err returns why the reader stopped: ErrSilent or ErrTooMuch if the answer is not complete,
// ErrTail if it is; nil: it has not stopped.
func (r *Reader) Err() error { return r.err }

// Torn says whether only a part of the last event was returned so far. Before another event, the client must
// get a blank line, or it would read both as one event.
func (r *Reader) Torn() bool { return r.torn }

// Done says whether [DONE] or another last event came. After it, Next returns no more events.
func (r *Reader) Done() bool { return r.done }

// Buffered returns how many bytes of an unfinished event have come; see Framer.Buffered.
func (r *Reader) Buffered() int { return r.framer.Buffered() }
