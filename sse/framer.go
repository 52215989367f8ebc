// Package sse reads a decode engine's event stream for a client: it cuts
// the bytes into events, counts the tokens that were generated, removes
// what evenkeel asked the engine for but the client did not, and assembles
// the answer of a client that did not ask for a stream.
//
// The package is pure: bytes in, bytes out; no I/O, clock, goroutine or log.
package sse

import "bytes"

// DefaultMaxEvent bounds one event. The token ids of a prompt of a million
// tokens come in one event of about 7 MB.
const DefaultMaxEvent = 8 << 20

// keepBuffer is the largest buffer kept once it is empty: the one event that
// carried a long prompt's token ids does not stay in memory with its stream.
const keepBuffer = 4 << 10

// Kind says what an event holds.
type Kind uint8

// The kinds of event.
const (
	KindData    Kind = iota // at least one data line
	KindComment             // no data line: comments, id:, retry:, or a blank line too many
	KindDone                // data: [DONE]
	KindOpaque              // a piece of an event beyond the size cap: forward as is, do not parse
)

// Event is one block of the stream, its closing blank line included.
type Event struct {
	Raw  []byte // the bytes of the event as they came
	Data []byte // the value of its data line; several are joined by \n
	Kind Kind

	at int // where Data starts in Raw; 0: it was joined, and is not in Raw in one piece
}

// Framer cuts a byte stream into events at blank lines, however the bytes were
// split on their way. Lines end in LF, CRLF or a lone CR. The zero value is
// not ready: use NewFramer.
type Framer struct {
	max     int
	buf     []byte // what is being framed: the caller's bytes while lent, else a part of own
	own     []byte // the memory for an event that has come in part
	lent    bool
	scratch []byte // joined data of the events returned since the last Feed

	start int // the event being read starts here in buf
	line  int // its current line starts here
	scan  int // bytes of the line before here hold no line end
	lf    int // bytes from scan up to here hold no LF; to look at them again for each line that ends in CR would take quadratic time

	handed  int  // bytes of this event already returned as opaque pieces
	midLine bool // some of these bytes belong to the current line, which is thus not blank
	afterCR bool // the previous line of this event ended in a lone CR

	dataLines       int // how many data lines this event has so far
	dataAt, dataLen int // the value of its first data line; dataAt counts from start
}

// NewFramer returns a framer that takes events of up to maxEvent bytes;
// DefaultMaxEvent if it is not positive.
func NewFramer(maxEvent int) *Framer {
	if maxEvent <= 0 {
		maxEvent = DefaultMaxEvent
	}
	return &Framer{max: maxEvent}
}

// Events yields the events of a text that is complete.
func Events(text []byte) func(yield func(Event) bool) {
	return func(yield func(Event) bool) {
		f := NewFramer(len(text))
		f.Feed(text)
		for e, ok := f.Next(); ok && yield(e); e, ok = f.Next() {
		}
	}
}

// Feed takes bytes in. They are framed where they are, and p must not change until
// Next returns false; only the beginning of an event that has not ended is copied.
// Slices of earlier events are no longer valid.
func (f *Framer) Feed(p []byte) {
	f.settle()
	f.scratch = f.scratch[:0]
	if len(f.buf) == 0 {
		if cap(f.own) > keepBuffer {
			f.own = nil
		}
		f.buf, f.lent = p, true
		return
	}
	f.buf = append(f.buf, p...)
	f.own = f.buf
}

// settle moves the beginning of an unfinished event to the start of our own memory.
func (f *Framer) settle() {
	rest := f.buf[f.start:]
	if len(rest) > 0 && f.start == 0 && !f.lent {
		return // the event is at the start already; to copy it at each Feed would cost the square of its length
	}
	f.line -= f.start
	f.scan -= f.start
	f.lf = max(0, f.lf-f.start)
	f.start = 0
	if len(rest) == 0 {
		f.buf, f.lent = nil, false
		return
	}
	f.own = append(f.own[:0], rest...) // a rest in our own memory moves within it
	f.buf, f.lent = f.own, false
}

// Next returns the next complete event. Its slices are valid until the next Feed.
// An event that grows beyond the cap comes out in pieces of KindOpaque, so that
// a client still gets it.
func (f *Framer) Next() (Event, bool) {
	for {
		end, next, ok := f.lineEnd()
		if !ok {
			return f.piece()
		}
		blank := end == f.line && !f.midLine
		if !blank && f.handed == 0 {
			f.keepLine(end)
		}
		f.line, f.scan, f.midLine = next, next, false
		if blank {
			return f.cut(next), true
		}
	}
}

// Buffered is how many bytes of an unfinished event have come, those returned
// as opaque pieces included. If the stream ends and it is not 0, it was cut off.
func (f *Framer) Buffered() int { return f.handed + f.held() }

// held is how many bytes have come and are in no event yet.
func (f *Framer) held() int { return len(f.buf) - f.start }

// Reset makes the framer ready for another stream.
func (f *Framer) Reset() {
	own, scratch := f.own[:0], f.scratch[:0]
	if cap(own) > keepBuffer {
		own = nil
	}
	if cap(scratch) > keepBuffer {
		scratch = nil
	}
	*f = Framer{max: f.max, own: own, scratch: scratch}
}

// lineEnd finds where the current line ends and the next one starts.
// A CR that is the last byte so far may be half a CRLF and waits for the next,
// unless it follows a lone CR: then lines of this stream end so, and waiting
// would hold back every event until the one after it.
func (f *Framer) lineEnd() (end, next int, ok bool) {
	limit := len(f.buf)
	f.lf = max(f.lf, f.scan)
	lf := bytes.IndexByte(f.buf[f.lf:], '\n')
	if lf >= 0 {
		limit = f.lf + lf
	}
	f.lf = limit
	cr := bytes.IndexByte(f.buf[f.scan:limit], '\r')
	switch i := f.scan + cr; {
	case cr < 0 && lf < 0:
		f.scan = limit
		return 0, 0, false
	case cr < 0:
		f.afterCR = false
		return limit, limit + 1, true
	case i == f.line && f.afterCR && !f.midLine:
		return i, i + 1, true
	case i+1 == len(f.buf):
		f.scan = i
		return 0, 0, false
	case f.buf[i+1] == '\n':
		f.afterCR = false
		return i, i + 2, true
	default:
		f.afterCR = true
		return i, i + 1, true
	}
}

// keepLine remembers the current line if it is a data line.
func (f *Framer) keepLine(end int) {
	value, ok := dataLine(f.buf[f.line:end])
	if !ok {
		return
	}
	if f.dataLines == 0 {
		f.dataAt, f.dataLen = end-len(value)-f.start, len(value)
	}
	f.dataLines++
}

// cut returns the event that ends at next, and starts another there.
func (f *Framer) cut(next int) Event {
	raw := f.buf[f.start:next:next]
	e := Event{Raw: raw, Kind: KindComment}
	switch {
	case f.handed+len(raw) > f.max: // also if the event came in one read: how its bytes were split must not matter
		e.Kind = KindOpaque
	case f.dataLines == 1:
		e.Kind, e.at = KindData, f.dataAt
		e.Data = raw[f.dataAt : f.dataAt+f.dataLen : f.dataAt+f.dataLen]
	case f.dataLines > 1:
		from := len(f.scratch)
		f.scratch = appendDataLines(f.scratch, raw)
		e.Kind, e.Data = KindData, f.scratch[from:len(f.scratch):len(f.scratch)]
	}
	if e.Kind == KindData && isDone(e.Data) {
		e.Kind = KindDone
	}
	f.start, f.handed, f.dataLines, f.afterCR = next, 0, 0, false
	return e
}

// piece returns what there is of an event that is already too large.
func (f *Framer) piece() (Event, bool) {
	end := len(f.buf)
	if f.scan < end {
		end = f.scan // a CR that waits for its LF
	}
	if f.Buffered() <= f.max || end == f.start {
		if f.lent {
			f.settle()
		}
		return Event{}, false
	}
	e := Event{Raw: f.buf[f.start:end:end], Kind: KindOpaque}
	f.midLine = f.midLine || end > f.line
	f.handed += end - f.start
	f.start, f.line, f.scan, f.dataLines = end, end, end, 0
	return e, true
}
