package engine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

const (
	maxChunk   = 1 << 30 // most bytes of one chunk; a larger size is taken for garbage
	maxLine    = 4 << 10 // most bytes of one line between chunks
	maxTrailer = 1 << 16 // most bytes of all trailer lines together
)

// part says to which part of a chunked body a byte belongs.
type part uint8

const (
	sizeLine part = iota
	chunkData
	chunkEnd // the CRLF after a chunk's data
	trailer
	bodyEnded // the whole body was read
)

// chunked finds the data in the bytes of a chunked body. It does not store these bytes. While a line arrives in pieces, it keeps
// only what the line means so far.
type chunked struct {
	next         part // the part to which the next byte belongs
	dataLeft     int  // data bytes of this chunk that have not arrived
	trailerBytes int  // bytes of trailer lines so far
	err          error

	lineLength int   // bytes of this line so far, without its CRLF
	afterCR    bool  // the last byte was a CR, and only an LF may follow
	hasDigits  bool  // the size line has at least one digit
	digitsOver bool  // a space after the digits has come, so no digit may follow
	ext        bool  // the extension of the size line, which is ignored, has begun
	size       int64 // the size that the digits so far mean, at most maxChunk+1
}

// step reads p, the next bytes of the body, up to the end of the next piece of data. data is this piece, a part of p of at most limit
// bytes; it is empty if p ends before any data. used is how many bytes of p were read. step returns io.EOF after the last chunk and the
// trailers. Once it has returned an error, each further call returns this error.
func (c *chunked) step(p []byte, limit int) (data []byte, used int, err error) {
	for c.err == nil {
		if c.next == chunkData {
			n := min(len(p)-used, limit, c.dataLeft)
			data, used = p[used:used+n], used+n
			if c.dataLeft -= n; c.dataLeft == 0 {
				c.next = chunkEnd
			}
			return data, used, nil
		}
		if c.next == bodyEnded {
			return nil, used, io.EOF
		}
		if used == len(p) { // the line goes on in bytes that have not arrived
			return nil, used, nil
		}
		c.err = c.lineByte(p[used])
		used++
	}
	return nil, used, c.err
}

// lineByte reads the next byte of a line. It refuses an LF without a CR, and a CR without an LF: if evenkeel and another program
// disagree about line ends, they also disagree about where an answer ends.
func (c *chunked) lineByte(b byte) error {
	switch {
	case c.afterCR != (b == '\n'): // an LF must come right after a CR, and nowhere else
		return fmt.Errorf("%w: bad line end between chunks", ErrMalformed)
	case b == '\n': // the line is complete; what is known about it is cleared for the next line
		err := c.lineEnd()
		c.lineLength, c.afterCR, c.hasDigits, c.digitsOver, c.ext, c.size = 0, false, false, false, false, 0
		return err
	case b == '\r':
		c.afterCR = true
		return nil
	}
	if c.lineLength++; c.lineLength > maxLine {
		return fmt.Errorf("%w: a chunk's size or trailer line is over %d bytes", ErrTooLarge, maxLine)
	}
	switch c.next {
	case sizeLine:
		return c.sizeByte(b)
	case chunkEnd: // only a line end may come here
		return fmt.Errorf("%w: a chunk is longer than its size line says", ErrMalformed)
	default: // trailer lines are only counted, not used
		if c.trailerBytes++; c.trailerBytes > maxTrailer {
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
		return nil
	}
}

var errChunkSize = fmt.Errorf("%w: bad chunk size", ErrMalformed)

// sizeByte reads one byte of a size line, which is a hexadecimal size, then optional spaces, then an optional extension that begins
// with a semicolon.
func (c *chunked) sizeByte(b byte) error {
	digit := int64(-1) // -1: b is no digit
	letter := b | 0x20 // b in lower case, if it is a letter
	switch {
	case b >= '0' && b <= '9':
		digit = int64(b - '0')
	case letter >= 'a' && letter <= 'f':
		digit = int64(letter-'a') + 10
	}
	switch {
	case c.ext: // bytes of an extension are ignored
	case b == ';':
		c.ext = true
	case b == ' ' || b == '\t':
		if !c.hasDigits { // a size line must not begin with a space
			return errChunkSize
		}
		c.digitsOver = true
	case digit < 0 || c.digitsOver:
		return errChunkSize
	default:
		c.hasDigits = true
		c.size = min(c.size<<4+digit, maxChunk+1) // bounded, so that many digits cannot overflow the size
	}
	return nil
}

// lineEnd moves to the part that follows a complete line. After a size line, this is the data, or the trailers if the size is 0.
func (c *chunked) lineEnd() error {
	switch c.next {
	case sizeLine:
		switch {
		case !c.hasDigits:
			return errChunkSize
		case c.size > maxChunk:
			return fmt.Errorf("%w: a chunk over %d bytes", ErrMalformed, maxChunk)
		}
		c.next, c.dataLeft = chunkData, int(c.size)
		if c.dataLeft == 0 { // a chunk of size 0 is the last one
			c.next = trailer
		}
	case chunkEnd:
		c.next = sizeLine
	default: // a trailer line
		if c.lineLength == 0 { // an empty line ends the trailers and the body
			c.next = bodyEnded
		} else if c.trailerBytes += len("\r\n"); c.trailerBytes > maxTrailer { // lineByte has counted the other bytes of the line
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
	}
	return nil
}

// read reads data from br into p; n is the number of bytes. It waits only until it has some data. It does not wait for the CRLF after a
// chunk, because an engine may send this CRLF only with its next event. If the connection is closed before the end of the body, the error
// is io.ErrUnexpectedEOF.
func (c *chunked) read(br *bufio.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		mustWait := c.next != bodyEnded && c.err == nil && br.Buffered() == 0
		if mustWait {
			if n > 0 { // the caller gets this data now, without waiting for more
				break
			}
			if _, err = br.Peek(1); err != nil {
				return 0, cutOff(err)
			}
		}
		var copied int
		copied, err = c.readBuffered(br, p[n:])
		n += copied
	}
	return n, err
}

// readBuffered copies to p the next piece of data that is in br's buffer already, so it never waits. With an empty p it reads only the
// lines before the next data.
func (c *chunked) readBuffered(br *bufio.Reader, p []byte) (n int, err error) {
	b, _ := br.Peek(br.Buffered()) // no error is possible, because all these bytes are buffered
	data, used, err := c.step(b, len(p))
	n = copy(p, data)
	_, _ = br.Discard(used) // Discard cannot fail, because these bytes are buffered
	return n, err
}

// readFraming reads the lines between chunks that have arrived, up to the next data, and reports whether the body has ended. It neither
// blocks nor loses data.
func (c *chunked) readFraming(br *bufio.Reader) (ended bool) {
	if c.next != chunkData && br.Buffered() > 0 {
		_, _ = c.readBuffered(br, nil) // c stores an error, and the next read returns it
	}
	return c.next == bodyEnded
}

// cutOff turns io.EOF into io.ErrUnexpectedEOF, for a connection that ended before the body was complete.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
