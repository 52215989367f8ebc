// Package sse reads a decode engine's event stream for a client. It cuts the bytes into events,
// counts the generated tokens, and removes members that evenkeel, but not the client, asked for.
// For a client that did not ask for a stream it joins the events into one answer.
//
// The package is pure: bytes in, bytes out; no I/O, clock, goroutine or log.
package sse

import "bytes"

// DefaultMaxEvent bounds one event, in bytes. The token ids of a prompt of a million tokens take
// about 7 MB.
const DefaultMaxEvent = 8 << 20

// maxKeptBuffer, in bytes, is the largest empty buffer that is kept. Only a rare event needs a
// larger one.
const maxKeptBuffer = 4 << 10

// Kind says whether an event carries data, ends the stream, or cannot be read.
type Kind uint8

// The kinds of event.
const (
	KindData    Kind = iota
	KindComment      // only comments, id:, retry:, or a superfluous blank line
	KindDone
	// a piece of an event that exceeds the size limit: forward it unchanged, do not parse it
	KindOpaque
)

// Event is one block of the stream, its closing blank line included.
type Event struct {
	Raw  []byte // as the engine sent it
	Data []byte // values of several data lines are joined by \n
	Kind Kind

	dataAt int // offset of Data in Raw; 0: Data was joined and is not a part of Raw
}

// Framer cuts a byte stream into events at blank lines. Lines end in LF, CRLF or a lone CR. The
// zero value is not ready: use NewFramer.
type Framer struct {
	max          int
	buf          []byte // the argument of Feed while bufIsCallers is true, else a part of ownBuf
	ownBuf       []byte // for an event of which only a part has come
	bufIsCallers bool
	scratch      []byte // for joined Data of events that were returned since the last Feed

	// Offsets in buf. An event or a line may have begun earlier, in pieces that were returned.
	eventStart     int
	lineStart      int
	lineSearchedTo int // the current line has no CR or LF before this offset
	// no LF up to here; kept, because each lone CR would otherwise cost another search
	lfSearchedTo int

	emittedBytes       int  // bytes of this event that were returned as opaque pieces
	lineHasEmittedPart bool // so the line is not blank
	afterCR            bool // the previous line of this event ended in a lone CR

	dataLines       int // of the current event so far
	dataAt, dataLen int // of the value of its first data line; dataAt counts from eventStart
}

// NewFramer returns a framer that takes events of up to maxEvent bytes; DefaultMaxEvent if it is
// not positive.
func NewFramer(maxEvent int) *Framer {
	if maxEvent <= 0 {
		maxEvent = DefaultMaxEvent
	}
	return &Framer{max: maxEvent}
}

// Events yields the events of a stream that has come as a whole. It leaves out a last event that
// lacks its blank line.
func Events(text []byte) func(yield func(Event) bool) {
	return func(yield func(Event) bool) {
		f := NewFramer(len(text)) // so that no event is too large
		f.Feed(text)
		for e, ok := f.Next(); ok && yield(e); e, ok = f.Next() {
		}
	}
}

// Feed copies only what belongs to an unfinished event, so p must not change until Next returns
// false. Slices of earlier events are no longer valid after Feed.
func (f *Framer) Feed(p []byte) {
	f.copyUnfinished()
	f.scratch = f.scratch[:0]
	if len(f.buf) == 0 {
		if cap(f.ownBuf) > maxKeptBuffer {
			f.ownBuf = nil
		}
		f.buf, f.bufIsCallers = p, true
		return
	}
	f.buf = append(f.buf, p...)
	f.ownBuf = f.buf // append may have moved the bytes
}

// copyUnfinished copies an unfinished event to the framer's own memory, because the caller may
// reuse its slice.
func (f *Framer) copyUnfinished() {
	unfinished := f.buf[f.eventStart:]
	if len(unfinished) > 0 && f.eventStart == 0 && !f.bufIsCallers {
		return // copied already; a copy at each Feed would take time quadratic in its length
	}
	f.lineStart -= f.eventStart
	f.lineSearchedTo -= f.eventStart
	// it may still be the offset of the LF before eventStart
	f.lfSearchedTo = max(0, f.lfSearchedTo-f.eventStart)
	f.eventStart = 0
	if len(unfinished) == 0 {
		f.buf, f.bufIsCallers = nil, false
		return
	}
	f.ownBuf = append(f.ownBuf[:0], unfinished...) // unfinished may be a part of ownBuf itself
	f.buf, f.bufIsCallers = f.ownBuf, false
}

// Next returns the next complete event; false: none has come. Its slices are valid until the next
// Feed. An event that is larger than the limit comes in pieces of KindOpaque, which may begin and
// end anywhere in a line.
func (f *Framer) Next() (Event, bool) {
	for {
		end, next, hasEnd := f.lineEnd()
		if !hasEnd {
			return f.takePiece() // a piece if the event is already too large
		}
		blank := end == f.lineStart && !f.lineHasEmittedPart
		if !blank && !f.comesInPieces() { // the data of an event that comes in pieces is not read
			f.recordDataLine(end)
		}
		f.lineStart, f.lineSearchedTo, f.lineHasEmittedPart = next, next, false
		if blank {
			return f.takeEvent(next), true
		}
	}
}

// Buffered returns how many bytes of an unfinished event have come, including those returned as
// opaque pieces. If it is not 0 when the stream ends, the stream was cut off.
func (f *Framer) Buffered() int { return f.emittedBytes + f.unreturned() }

func (f *Framer) comesInPieces() bool { return f.emittedBytes > 0 }

func (f *Framer) unreturned() int { return len(f.buf) - f.eventStart }

// Reset keeps the size limit, and buffers of up to maxKeptBuffer bytes.
func (f *Framer) Reset() {
	*f = Framer{max: f.max, ownBuf: emptied(f.ownBuf), scratch: emptied(f.scratch)}
}

func emptied(buf []byte) []byte {
	if cap(buf) > maxKeptBuffer {
		return nil
	}
	return buf[:0]
}

// lineEnd finds where the current line ends; ok is false if the end has not come. A CR that is the
// last byte so far may be half of a CRLF, so lineEnd waits for the next byte. It does not wait for
// a blank line after a line that ended in a lone CR: this stream does not use CRLF, and waiting
// would delay each event until the next one.
func (f *Framer) lineEnd() (end, next int, ok bool) {
	lfAt, hasLF := f.findLF()
	cr := bytes.IndexByte(f.buf[f.lineSearchedTo:lfAt], '\r')
	crAt := f.lineSearchedTo + cr
	isBlank := cr >= 0 && crAt == f.lineStart && !f.lineHasEmittedPart
	switch {
	case cr < 0 && !hasLF:
		f.lineSearchedTo = len(f.buf)
		return 0, 0, false
	case cr < 0:
		f.afterCR = false
		return lfAt, lfAt + 1, true
	case isBlank && f.afterCR:
		return crAt, crAt + 1, true
	case crAt+1 == len(f.buf): // a lone CR, or half of a CRLF
		f.lineSearchedTo = crAt
		return 0, 0, false
	case f.buf[crAt+1] == '\n':
		f.afterCR = false
		return crAt, crAt + 2, true
	default:
		f.afterCR = true
		return crAt, crAt + 1, true
	}
}

// findLF does not search again where an earlier call has, which may be several lines ahead if lines
// end in a lone CR.
func (f *Framer) findLF() (lfAt int, found bool) {
	f.lfSearchedTo = max(f.lfSearchedTo, f.lineSearchedTo) // an earlier LF ended an earlier line
	distance := bytes.IndexByte(f.buf[f.lfSearchedTo:], '\n')
	if distance < 0 {
		f.lfSearchedTo = len(f.buf)
		return len(f.buf), false
	}
	f.lfSearchedTo += distance
	return f.lfSearchedTo, true
}

func (f *Framer) recordDataLine(end int) {
	value, ok := dataLine(f.buf[f.lineStart:end])
	if !ok {
		return
	}
	if f.dataLines == 0 {
		f.dataAt, f.dataLen = end-len(value)-f.eventStart, len(value)
	}
	f.dataLines++
}

func (f *Framer) takeEvent(next int) Event {
	raw := f.buf[f.eventStart:next:next]
	e := Event{Raw: raw, Kind: KindComment}
	switch {
	// even if it came in one read: how the network split the bytes must make no difference
	case f.emittedBytes+len(raw) > f.max:
		e.Kind = KindOpaque
	case f.dataLines == 1:
		e.Kind, e.dataAt = KindData, f.dataAt
		e.Data = raw[f.dataAt : f.dataAt+f.dataLen : f.dataAt+f.dataLen]
	case f.dataLines > 1:
		from := len(f.scratch)
		f.scratch = appendDataLines(f.scratch, raw)
		e.Kind, e.Data = KindData, f.scratch[from:len(f.scratch):len(f.scratch)]
	}
	if e.Kind == KindData && isDone(e.Data) {
		e.Kind = KindDone
	}
	f.eventStart, f.emittedBytes, f.dataLines, f.afterCR = next, 0, 0, false
	return e
}

// takePiece returns the bytes of an unfinished event that is already too large. If there are none,
// it copies the event, because the caller of Feed may reuse its slice.
func (f *Framer) takePiece() (Event, bool) {
	end := len(f.buf)
	if f.lineSearchedTo < end { // the last byte is a CR, which may be half of a CRLF
		end = f.lineSearchedTo
	}
	tooLarge := f.Buffered() > f.max
	if !tooLarge || end == f.eventStart {
		if f.bufIsCallers {
			f.copyUnfinished()
		}
		return Event{}, false
	}
	e := Event{Raw: f.buf[f.eventStart:end:end], Kind: KindOpaque}
	f.lineHasEmittedPart = f.lineHasEmittedPart || end > f.lineStart
	f.emittedBytes += end - f.eventStart
	f.eventStart, f.lineStart, f.lineSearchedTo, f.dataLines = end, end, end, 0
	return e, true
}
