package engine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

const (
	maxChunk   = 1 << 30 // bytes; a larger size is taken for garbage
	maxLine    = 4 << 10 // bytes of a line between chunks
	maxTrailer = 1 << 16 // bytes of all trailer lines together
)

// part is what comes next in a chunked body.
type part uint8

const (
	sizeLine part = iota
	chunkData
	chunkEnd // the CRLF behind a chunk's data
	trailer
	nothing // the whole body was read
)

// chunked finds the data in the bytes of a chunked body. It keeps none of these bytes: of a line that has arrived in
// part, it keeps only what the line has said so far.
type chunked struct {
	next     part
	left     int // data bytes of this chunk that have not arrived
	trailers int // bytes of trailer lines so far
	err      error

	line       int   // bytes of this line so far, without its CRLF
	afterCR    bool  // the last byte was a CR, and only an LF may follow
	digits     bool  // the size line has at least one digit
	digitsOver bool  // the digits of the size line are over
	ext        bool  // the extension of the size line has begun; it is ignored
	size       int64 // the size by the digits so far, at most maxChunk+1
}

// step goes through p, bytes of the body as they arrived, up to the next data. It returns at most limit bytes of data,
// and how many bytes of p it has used. It returns io.EOF after the last chunk and its trailers. After an error it
// returns the same error again.
func (c *chunked) step(p []byte, limit int) (data []byte, used int, err error) {
	for c.err == nil {
		if c.next == chunkData {
			n := min(len(p)-used, limit, c.left)
			data, used = p[used:used+n], used+n
			if c.left -= n; c.left == 0 {
				c.next = chunkEnd
			}
			return data, used, nil
		}
		if c.next == nothing {
			return nil, used, io.EOF
		}
		if used == len(p) {
			return nil, used, nil
		}
		c.err = c.lineByte(p[used])
		used++
	}
	return nil, used, c.err
}

// lineByte reads the next byte of a line. A bare LF or CR is refused, because two readers that differ about line ends
// differ about where an answer ends.
func (c *chunked) lineByte(b byte) error {
	switch {
	case c.afterCR != (b == '\n'):
		return fmt.Errorf("%w: bad line end between chunks", ErrMalformed)
	case b == '\n':
		err := c.lineEnd()
		c.line, c.afterCR, c.digits, c.digitsOver, c.ext, c.size = 0, false, false, false, false, 0
		return err
	case b == '\r':
		c.afterCR = true
		return nil
	}
	if c.line++; c.line > maxLine {
		return fmt.Errorf("%w: a chunk's size or trailer line is over %d bytes", ErrTooLarge, maxLine)
	}
	switch c.next {
	case sizeLine:
		return c.sizeByte(b)
	case chunkEnd:
		return fmt.Errorf("%w: a chunk is longer than its size line says", ErrMalformed)
	default:
		if c.trailers++; c.trailers > maxTrailer {
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
		return nil
	}
}

var errChunkSize = fmt.Errorf("%w: bad chunk size", ErrMalformed)

// sizeByte reads one byte of a size line: of the hexadecimal size, or of what follows it.
func (c *chunked) sizeByte(b byte) error {
	digit := int64(-1)
	switch {
	case b >= '0' && b <= '9':
		digit = int64(b - '0')
	case b|0x20 >= 'a' && b|0x20 <= 'f':
		digit = int64(b|0x20-'a') + 10
	}
	switch {
	case c.ext:
	case b == ';':
		c.ext = true
	case b == ' ' || b == '\t':
		if !c.digits {
			return errChunkSize
		}
		c.digitsOver = true
	case digit < 0 || c.digitsOver:
		return errChunkSize
	default:
		c.digits = true
		c.size = min(c.size<<4+digit, maxChunk+1)
	}
	return nil
}

// lineEnd goes on to what follows a line that is over: after a size line the data, or the trailers if the size is 0.
func (c *chunked) lineEnd() error {
	switch c.next {
	case sizeLine:
		switch {
		case !c.digits:
			return errChunkSize
		case c.size > maxChunk:
			return fmt.Errorf("%w: a chunk over %d bytes", ErrMalformed, maxChunk)
		}
		c.next, c.left = chunkData, int(c.size)
		if c.left == 0 {
			c.next = trailer
		}
	case chunkEnd:
		c.next = sizeLine
	default:
		if c.line == 0 {
			c.next = nothing
		} else if c.trailers += len("\r\n"); c.trailers > maxTrailer {
			return fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
	}
	return nil
}

// read reads data from br. It returns what has arrived, and never waits for more once it has some data, not even for
// the CRLF behind a chunk: the last token of an event must not wait for the next event. If the connection is closed
// anywhere before the end, the error is io.ErrUnexpectedEOF.
func (c *chunked) read(br *bufio.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		if c.next != nothing && c.err == nil && br.Buffered() == 0 {
			if n > 0 {
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

// readBuffered reads data that is in br's buffer already.
func (c *chunked) readBuffered(br *bufio.Reader, p []byte) (n int, err error) {
	b, _ := br.Peek(br.Buffered()) // it cannot fail: it asks for buffered bytes only
	data, used, err := c.step(b, len(p))
	n = copy(p, data)
	_, _ = br.Discard(used) // these bytes are in the buffer
	return n, err
}

// settle goes through the framing bytes that have arrived, and reports whether the body is over. It neither blocks
// nor drops data.
func (c *chunked) settle(br *bufio.Reader) bool {
	if c.next != chunkData && br.Buffered() > 0 {
		_, _ = c.readBuffered(br, nil) // c keeps an error for the next read
	}
	return c.next == nothing
}

// cutOff turns io.EOF into io.ErrUnexpectedEOF: where it is called, the body is not over.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
