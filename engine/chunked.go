package engine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

const (
	maxChunk   = 1 << 30 // a larger size is taken for garbage
	maxLine    = 4 << 10 // bytes of one line between chunks
	maxTrailer = 1 << 16 // bytes of all trailer lines
)

// part is the part of a chunked body to which a byte belongs.
type part uint8

const (
	sizeLine part = iota
	chunkData
	chunkEnd // the CRLF after a chunk's data
	trailer
	bodyEnded
)

// chunked finds the data in a chunked body. It does not store bytes: of a line that arrives in
// pieces, it keeps only the meaning.
type chunked struct {
	next         part // of the next byte
	dataLeft     int  // of this chunk, not arrived
	trailerBytes int  // so far
	err          error

	lineLength int   // without its CRLF
	afterCR    bool  // only an LF may follow
	hasDigits  bool  // of the size line
	digitsOver bool  // after a space no digit may follow
	ext        bool  // the extension of the size line, which is ignored, has begun
	size       int64 // by the digits so far, at most maxChunk+1
}

// step reads p up to the end of the next piece of data. data is this piece, a part of p of at most
// limit bytes; empty: p ends before any. used is how many bytes of p were read. It returns io.EOF
// after the trailers. An error is returned again by each further call.
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

// lineByte refuses an LF without a CR, and a CR without an LF: if evenkeel and another program
// disagree about line ends, they also disagree about where an answer ends.
func (c *chunked) lineByte(b byte) error {
	switch {
	case c.afterCR != (b == '\n'):
		return fmt.Errorf("%w: bad line end between chunks", ErrMalformed)
	case b == '\n':
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
	default: // trailers are only counted
		if c.trailerBytes++; c.trailerBytes > maxTrailer {
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
		return nil
	}
}

var errChunkSize = fmt.Errorf("%w: bad chunk size", ErrMalformed)

// sizeByte reads a size line: a hexadecimal size, optional spaces, and an optional extension that
// begins with a semicolon.
func (c *chunked) sizeByte(b byte) error {
	digit := int64(-1)
	letter := b | 0x20 // lower case, if it is a letter
	switch {
	case b >= '0' && b <= '9':
		digit = int64(b - '0')
	case letter >= 'a' && letter <= 'f':
		digit = int64(letter-'a') + 10
	}
	switch {
	case c.ext:
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
		c.size = min(c.size<<4+digit, maxChunk+1) // many digits must not overflow
	}
	return nil
}

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
		if c.dataLeft == 0 { // the last chunk
			c.next = trailer
		}
	case chunkEnd:
		c.next = sizeLine
	default:
		if c.lineLength == 0 { // an empty line ends the body
			c.next = bodyEnded
		} else if c.trailerBytes += len("\r\n"); c.trailerBytes > maxTrailer {
			// lineByte has counted the other bytes.
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
	}
	return nil
}

// read waits only until it has some data. It does not wait for the CRLF after a chunk, because an
// engine may send this only with its next event. If the connection ends before the body, the error
// is io.ErrUnexpectedEOF.
func (c *chunked) read(br *bufio.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		mustWait := c.next != bodyEnded && c.err == nil && br.Buffered() == 0
		if mustWait {
			if n > 0 { // the caller gets this data now
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

// readBuffered takes only what is in br's buffer, so it never waits. With an empty p it reads only
// the lines before the next data.
func (c *chunked) readBuffered(br *bufio.Reader, p []byte) (n int, err error) {
	b, _ := br.Peek(br.Buffered()) // no error: all is buffered
	data, used, err := c.step(b, len(p))
	n = copy(p, data)
	_, _ = br.Discard(used) // no error: all is buffered
	return n, err
}

// readFraming reads the lines that have arrived, up to the next data, without blocking.
func (c *chunked) readFraming(br *bufio.Reader) (ended bool) {
	if c.next != chunkData && br.Buffered() > 0 {
		_, _ = c.readBuffered(br, nil) // the next read returns the error
	}
	return c.next == bodyEnded
}

// cutOff is for a connection that ended before the body.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
