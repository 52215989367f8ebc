// Package sse reads a decode engine's event stream for a client. It cuts
// the bytes into events, counts the generated tokens, and removes members that
// evenkeel, but not the client, asked the engine for. For a client that did not ask for
// a stream it joins the events into one answer.
//
// The package is pure: bytes in, bytes out; no I/O, clock, goroutine or log.
package sse

import "bytes"

// DefaultMaxEvent bounds one event, in bytes. One event can carry the token ids of a prompt of a million tokens, about 7 MB.
const DefaultMaxEvent = 8 << 20

// maxKeptBuffer is the size in bytes of the largest buffer that is kept while it is empty. A larger one was needed only for a rare large
// event, for example one with the token ids of a long prompt.
const maxKeptBuffer = 4 << 10

// Kind says whether an event carries data, ends the stream, or cannot be read.
type Kind uint8

// The kinds of event. Only an event of KindData has data to parse.
const (
	KindData    Kind = iota // the event has at least one data line
	KindComment             // the event has no data line: only comments, id:, retry:, or a superfluous blank line
	KindDone                // the data line is [DONE], which ends the stream
	KindOpaque              // a piece of an event that exceeds the size limit: forward it unchanged, do not parse it
)

// Event is one block of the stream, its closing blank line included.
type Event struct {
	Raw  []byte // the bytes of the event as the engine sent them
	Data []byte // the value of its data line; the values of several data lines are joined by \n
	Kind Kind

	dataAt int // offset of Data in Raw; 0: Data was joined from several lines and is not a part of Raw
}

// Framer cuts a byte stream into events at blank lines. How the network split the bytes makes no difference.
// Lines end in LF, CRLF or a lone CR. The zero value is not ready: use NewFramer.
type Framer struct {
	max          int
	buf          []byte // the bytes to cut: the argument of Feed while bufIsCallers is true, else a part of ownBuf
	ownBuf       []byte // memory of the framer for an event of which only a part has come
	bufIsCallers bool
	scratch      []byte // memory for the Data of events with several data lines that were returned since the last Feed

	// These are offsets in buf:
	eventStart     int // where the current event starts, or the part of it that Next has not returned as pieces
	lineStart      int // where the current line starts, or the part of it that Next has not returned as pieces
	lineSearchedTo int // the current line has no line end, CR or LF, before this offset
	lfSearchedTo   int // no LF from lineSearchedTo up to here; kept, because each lone CR would otherwise cost another search for it

	emittedBytes       int  // bytes of this event that were returned already, as opaque pieces
	lineHasEmittedPart bool // some bytes of the current line were returned already, so the line is not blank
	afterCR            bool // the previous line of this event ended in a lone CR

	dataLines       int // data lines of the current event so far
	dataAt, dataLen int // offset (from eventStart) and length of the value of its first data line
}

// NewFramer returns a framer that takes events of up to maxEvent bytes;
// DefaultMaxEvent if it is not positive.
func NewFramer(maxEvent int) *Framer {
	if maxEvent <= 0 {
		maxEvent = DefaultMaxEvent
	}
	return &Framer{max: maxEvent}
}

// Events yields the events of a stream that has come as a whole. It leaves out a last event that lacks its blank line.
func Events(text []byte) func(yield func(Event) bool) {
	return func(yield func(Event) bool) {
		f := NewFramer(len(text)) // with this limit, no event is too large
		f.Feed(text)
		for e, ok := f.Next(); ok && yield(e); e, ok = f.Next() {
		}
	}
}

// Feed takes in the bytes p. It copies only what belongs to an unfinished event, so p must not change until Next returns false. Slices
// of earlier events are no longer valid after Feed.
func (f *Framer) Feed(p []byte) {
	f.copyUnfinished()        // buf is now empty, or the beginning of an unfinished event in the framer's own memory
	f.scratch = f.scratch[:0] // forgets the Data of events that were returned since the last Feed
	if len(f.buf) == 0 {      // no event is unfinished, so p itself can be cut
		if cap(f.ownBuf) > maxKeptBuffer {
			f.ownBuf = nil
		}
		f.buf, f.bufIsCallers = p, true
		return
	}
	f.buf = append(f.buf, p...) // p continues the unfinished event
	f.ownBuf = f.buf            // append may have moved the bytes to new memory
}

// copyUnfinished copies the beginning of an unfinished event to the start of the framer's own memory, because the caller may reuse its
// slice. Without an unfinished event it only forgets that slice.
func (f *Framer) copyUnfinished() {
	unfinished := f.buf[f.eventStart:]
	if len(unfinished) > 0 && f.eventStart == 0 && !f.bufIsCallers {
		return // the event is there already; copying it again at each Feed would take time quadratic in its length
	}
	// From now on, all offsets count from the start of the unfinished event.
	f.lineStart -= f.eventStart
	f.lineSearchedTo -= f.eventStart
	f.lfSearchedTo = max(0, f.lfSearchedTo-f.eventStart) // it may still be the offset of the LF before eventStart
	f.eventStart = 0
	if len(unfinished) == 0 {
		f.buf, f.bufIsCallers = nil, false
		return
	}
	f.ownBuf = append(f.ownBuf[:0], unfinished...) // unfinished may be a part of ownBuf itself; it then moves to the front
	f.buf, f.bufIsCallers = f.ownBuf, false
}

// Next returns the next complete event; false: none has come. Its slices are valid until the next Feed. An event that is larger
// than the limit comes in pieces of KindOpaque. A piece may begin and end anywhere in a line.
func (f *Framer) Next() (Event, bool) {
	for {
		end, next, hasEnd := f.lineEnd()
		if !hasEnd { // the line is not complete, and neither is the event
			return f.takePiece() // a piece of the event if it is already too large, else nothing
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

// Buffered returns how many bytes of an unfinished event have come, including those returned
// as opaque pieces. If it is not 0 when the stream ends, the stream was cut off.
func (f *Framer) Buffered() int { return f.emittedBytes + f.unreturned() }

// comesInPieces says whether Next has returned a piece of the current event already: the bytes from eventStart on are only its rest.
func (f *Framer) comesInPieces() bool { return f.emittedBytes > 0 }

// unreturned returns how many bytes of the unfinished event have come that Next has not returned as opaque pieces.
func (f *Framer) unreturned() int { return len(f.buf) - f.eventStart }

// Reset makes the framer ready for another stream. It keeps the size limit, and it keeps buffers of up to maxKeptBuffer bytes.
func (f *Framer) Reset() {
	*f = Framer{max: f.max, ownBuf: emptied(f.ownBuf), scratch: emptied(f.scratch)}
}

// emptied returns an empty buffer with the memory of buf; nil if that is larger than maxKeptBuffer.
func emptied(buf []byte) []byte {
	if cap(buf) > maxKeptBuffer {
		return nil
	}
	return buf[:0]
}

// lineEnd finds where the current line ends and the next one starts; ok is false if the end has not come yet.
// A CR that is the last byte so far may be half of a CRLF, so lineEnd waits for the next byte. It does not wait for a blank line
// after a line that ended in a lone CR: this stream does not use CRLF, and waiting would delay each event until the next one.
func (f *Framer) lineEnd() (end, next int, ok bool) {
	lfAt, hasLF := f.findLF()
	cr := bytes.IndexByte(f.buf[f.lineSearchedTo:lfAt], '\r') // the line may end in a CR before the first LF
	crAt := f.lineSearchedTo + cr
	isBlank := cr >= 0 && crAt == f.lineStart && !f.lineHasEmittedPart
	switch {
	case cr < 0 && !hasLF: // neither a CR nor an LF has come
		f.lineSearchedTo = len(f.buf)
		return 0, 0, false
	case cr < 0: // the line ends in an LF
		f.afterCR = false
		return lfAt, lfAt + 1, true
	case isBlank && f.afterCR: // a blank line after a line that ended in a lone CR
		return crAt, crAt + 1, true
	case crAt+1 == len(f.buf): // a lone CR, or the first half of a CRLF whose LF has not come
		f.lineSearchedTo = crAt
		return 0, 0, false
	case f.buf[crAt+1] == '\n': // the line ends in a CRLF
		f.afterCR = false
		return crAt, crAt + 2, true
	default: // the line ends in a lone CR
		f.afterCR = true
		return crAt, crAt + 1, true
	}
}

// findLF returns the offset of the first LF from lineSearchedTo on; found is false, and the offset is len(f.buf), if none has come. Where
// an earlier call has searched already, which may be several lines ahead if lines end in a lone CR, it does not search again.
func (f *Framer) findLF() (lfAt int, found bool) {
	f.lfSearchedTo = max(f.lfSearchedTo, f.lineSearchedTo) // an LF before lineSearchedTo ended an earlier line
	distance := bytes.IndexByte(f.buf[f.lfSearchedTo:], '\n')
	if distance < 0 {
		f.lfSearchedTo = len(f.buf)
		return len(f.buf), false
	}
	f.lfSearchedTo += distance
	return f.lfSearchedTo, true
}

// recordDataLine counts the current line, which ends at end, if it is a data line. Of the event's first data line it also records where the
// value is.
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

// takeEvent returns the event that ends at next, where the following event starts. Of an event that is larger than the limit, it returns
// the last piece.
func (f *Framer) takeEvent(next int) Event {
	raw := f.buf[f.eventStart:next:next]
	e := Event{Raw: raw, Kind: KindComment}
	switch {
	case f.emittedBytes+len(raw) > f.max: // too large, even if it came in one read: how the network split the bytes must make no difference
		e.Kind = KindOpaque
	case f.dataLines == 1:
		e.Kind, e.dataAt = KindData, f.dataAt
		e.Data = raw[f.dataAt : f.dataAt+f.dataLen : f.dataAt+f.dataLen]
	case f.dataLines > 1: // the values are joined in other memory than raw
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

// takePiece returns the bytes of an unfinished event that is already too large, as far as Next has not returned them yet. If there are no
// such bytes, takePiece returns false, and copies the unfinished event, because the caller of Feed may reuse its slice.
func (f *Framer) takePiece() (Event, bool) {
	end := len(f.buf)
	if f.lineSearchedTo < end { // the last byte is a CR, which may be half of a CRLF
		end = f.lineSearchedTo // leaves the CR for the next call
	}
	tooLarge := f.Buffered() > f.max
	if !tooLarge || end == f.eventStart {
		if f.bufIsCallers { // the caller may change its slice from now on
			f.copyUnfinished()
		}
		return Event{}, false
	}
	e := Event{Raw: f.buf[f.eventStart:end:end], Kind: KindOpaque}
	f.lineHasEmittedPart = f.lineHasEmittedPart || end > f.lineStart // end > lineStart: the piece ends within a line
	f.emittedBytes += end - f.eventStart
	f.eventStart, f.lineStart, f.lineSearchedTo, f.dataLines = end, end, end, 0 // the rest of the event begins here
	return e, true
}
