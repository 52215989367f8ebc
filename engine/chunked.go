package engine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

const (
	maxChunk   = 1 << 30 // bytes; a larger size line is taken for garbage
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

// chunked finds the data in the bytes of a chunked body. It keeps no byte of them: a line
// that has come in part is remembered by what it said so far.
type chunked struct {
	next     part
	left     int // data bytes of this chunk that have not come
	trailers int // bytes of trailer lines so far
	err      error

	line   int   // bytes of this line so far, without its CRLF
	cr     bool  // the last byte was a CR, and only an LF may follow
	digits bool  // a size line has a digit
	behind bool  // its digits are over
	ext    bool  // its extension has begun, which means nothing to us
	size   int64 // what its digits say, maxChunk+1 at most
}

// step goes through the bytes up to the next data, of which it returns at most so many bytes,
// and tells how many bytes it has used. io.EOF comes behind the last chunk and its trailers.
// An error stays.
func (c *chunked) step(p []byte, most int) (data []byte, used int, err error) {
	for c.err == nil {
		if c.next == chunkData {
			n := min(len(p)-used, most, c.left)
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
		c.err = c.byte(p[used])
		used++
	}
	return nil, used, c.err
}

// byte reads the next byte of a line. A bare LF or CR is refused: two readers that differ
// about line ends differ about where an answer ends.
func (c *chunked) byte(b byte) error {
	switch {
	case c.cr != (b == '\n'):
		return fmt.Errorf("%w: bad line end between chunks", ErrMalformed)
	case b == '\n':
		err := c.lineEnd()
		c.line, c.cr, c.digits, c.behind, c.ext, c.size = 0, false, false, false, false, 0
		return err
	case b == '\r':
		c.cr = true
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

// sizeByte reads a byte of a hexadecimal size, or of what stands behind it.
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
		c.behind = true
	case digit < 0 || c.behind:
		return errChunkSize
	default:
		c.digits = true
		c.size = min(c.size<<4+digit, maxChunk+1)
	}
	return nil
}

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

// read reads data from br. It hands out what has arrived and never waits for more once it
// has something, not even for the CRLF behind a chunk: the last token of an event must not
// wait for the next one. A connection closed anywhere before the end is
// io.ErrUnexpectedEOF.
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
		var k int
		k, err = c.buffered(br, p[n:])
		n += k
	}
	return n, err
}

// buffered reads data of what br has already.
func (c *chunked) buffered(br *bufio.Reader, p []byte) (n int, err error) {
	b, _ := br.Peek(br.Buffered()) // cannot fail
	data, used, err := c.step(b, len(p))
	n = copy(p, data)
	_, _ = br.Discard(used) // of what is there
	return n, err
}

// settle goes through the framing that has arrived and reports whether the body is over. It
// neither blocks nor drops data.
func (c *chunked) settle(br *bufio.Reader) bool {
	if c.next != chunkData && br.Buffered() > 0 {
		_, _ = c.buffered(br, nil) // an error stays for the next read
	}
	return c.next == nothing
}

// cutOff turns an end of the connection into the error it is here.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
