package sse

import (
	"errors"
	"time"
)

var (
	// ErrSilent says that no data event came within Limits.First or Limits.Gap. Comments or a part of
	// an event may have come.
	ErrSilent = errors.New("the engine sent no event in time")
	// ErrTooMuch says that the answer has more bytes than Limits.Bytes.
	ErrTooMuch = errors.New("the engine sent more bytes than its answer may have")
	// ErrTail says that the body did not end soon after [DONE]. The answer is complete.
	ErrTail = errors.New("the engine did not end its stream behind [DONE]")
)

// After [DONE], a Reader waits for the end of the body, because only then the connection can be
// used again. These bound the wait, and the bytes until then.
const (
	tailTime  = 250 * time.Millisecond
	tailBytes = 64 << 10
)

// Limits bound what an engine may send for one answer. 0: no bound, except for Event.
type Limits struct {
	// most bytes of one event; 0: DefaultMaxEvent; a larger one comes in pieces of KindOpaque
	Event int
	Bytes int64 // of the whole stream, including comments and line ends
	First time.Duration
	Gap   time.Duration // between two data events with content
}

// Reader cuts an engine's stream into events as a Framer does, and checks the Limits. It has no
// clock: the caller calls Wait before it waits and Feed when bytes came.
//
// The time limits run from one data event to the next. A comment, or a part of an event, shows that
// the connection is alive, but not that the answer makes progress.
type Reader struct {
	framer Framer
	limits Limits

	bytes        int64         // of events returned; after [DONE], bytes after it
	silentFor    time.Duration // spent in waits since the last data event with content
	silentBefore time.Duration // value of silentFor at the last data event
	waitBegan    time.Time     // zero: there is no wait
	sawData      bool          // that counts for Limits.First
	done         bool          // [DONE] or another last event came
	// the last event returned is a piece, but not the last piece, of an event
	torn bool
	err  error
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

// Wait records that a wait for bytes begins, and returns how long it may last; 0: for ever. After
// it, Err returns ErrSilent or ErrTail. The time between a Feed and the next Wait does not count:
// the proxy spends it on a client that may read slowly.
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
	return max(timeLeft, 1) // 0 would mean for ever
}

// Pause ends the current wait before bytes have come: the proxy stops reading, because it must
// first write a keep-alive comment to a slow client.
func (r *Reader) Pause(now time.Time) {
	if !r.waitBegan.IsZero() {
		r.silentFor += now.Sub(r.waitBegan)
		r.waitBegan = time.Time{}
	}
}

func (r *Reader) waitLimit() time.Duration {
	switch {
	case r.done:
		return tailTime
	case r.sawData:
		return r.limits.Gap
	}
	return r.limits.First
}

func (r *Reader) failTimedOut() {
	switch {
	case r.err != nil:
	case r.done:
		r.err = ErrTail
	default:
		r.err = ErrSilent
	}
}

// Feed takes in p, which must not change until Next returns false. The slices in earlier events are
// no longer valid.
func (r *Reader) Feed(p []byte, now time.Time) {
	r.Pause(now)
	if !r.done {
		r.framer.Feed(p)
		return
	}
	r.bytes += int64(len(p))
	if r.bytes > tailBytes && r.err == nil {
		r.err = ErrTail
	}
}

// Next returns the next complete event up to [DONE]. If there is none, Err says whether the caller
// may read more.
func (r *Reader) Next() (Event, bool) {
	if r.err != nil || r.done {
		return Event{}, false
	}
	e, found := r.framer.Next()
	if !found {
		switch limit := r.waitLimit(); {
		case r.failIfTooLarge(int64(r.framer.unreturned())): // an event that has not ended counts, too
		case limit > 0 && r.silentFor >= limit: // bytes have come, but no event that ends the wait
			r.failTimedOut()
		}
		return Event{}, false
	}
	if r.failIfTooLarge(int64(len(e.Raw))) {
		return Event{}, false
	}
	r.bytes += int64(len(e.Raw))
	r.torn = e.Kind == KindOpaque && r.framer.comesInPieces()
	switch {
	case e.Kind == KindDone:
		r.markEnd()
	// Neither a comment nor a piece that is not the last one ends the wait.
	case e.Kind == KindData, e.Kind == KindOpaque && !r.torn:
		r.sawData = true
		r.silentBefore, r.silentFor = r.silentFor, 0 // resumeWait undoes this
	}
	return e, true
}

// resumeWaitForFirst: nothing in the last event shows that the engine has computed anything.
func (r *Reader) resumeWaitForFirst() {
	r.sawData = false
	r.resumeWait()
}

// resumeWait: the last event had no content, so the wait goes on.
func (r *Reader) resumeWait() { r.silentFor = r.silentBefore }

// markEnd: the last event ends the answer, as [DONE] would.
func (r *Reader) markEnd() { r.done, r.bytes, r.silentFor = true, int64(r.framer.unreturned()), 0 }

func (r *Reader) failIfTooLarge(furtherBytes int64) (failed bool) {
	if r.limits.Bytes > 0 && r.bytes+furtherBytes > r.limits.Bytes {
		r.err = ErrTooMuch
		return true
	}
	return false
}

// Err returns why the reader stopped. After ErrSilent or ErrTooMuch the answer is not complete,
// after ErrTail it is.
func (r *Reader) Err() error { return r.err }

// Torn says whether only a part of the last event was returned so far. A client would read another
// event as a part of it.
func (r *Reader) Torn() bool { return r.torn }

// Done says whether [DONE] or another last event came.
func (r *Reader) Done() bool { return r.done }

// Buffered returns how many bytes of an unfinished event have come; see Framer.Buffered.
func (r *Reader) Buffered() int { return r.framer.Buffered() }
