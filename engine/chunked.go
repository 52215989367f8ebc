package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

const (
	maxChunk   = 1 << 30 // bytes; a larger size line is taken for garbage
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

// chunked reads a chunked body. It hands out what has arrived and never waits
// for more once it has something, not even for the CRLF behind a chunk: the
// last token of an event must not wait for the next one. A connection closed
// anywhere before the end is io.ErrUnexpectedEOF.
type chunked struct {
	br       *bufio.Reader
	next     part
	left     int // data bytes of this chunk not yet handed out
	trailers int // bytes of trailer lines so far
}

// Read returns io.EOF only behind the last chunk and its trailers.
func (c *chunked) Read(p []byte) (n int, err error) {
	for n < len(p) && err == nil && (n == 0 || c.arrived()) {
		var k int
		k, err = c.step(p[n:])
		n += k
	}
	return n, err
}

// settle takes the framing that has arrived and reports whether the body is
// over. It neither blocks nor drops data.
func (c *chunked) settle() bool {
	for c.next != nothing && c.next != chunkData && c.arrived() {
		if _, err := c.step(nil); err != nil {
			break
		}
	}
	return c.next == nothing
}

// step takes one part, blocking when it has not arrived.
func (c *chunked) step(p []byte) (int, error) {
	switch c.next {
	case sizeLine:
		line, err := c.line()
		if err != nil {
			return 0, err
		}
		if c.left, err = parseSize(line); err != nil {
			return 0, err
		}
		c.next = chunkData
		if c.left == 0 {
			c.next = trailer
		}
		return 0, nil
	case chunkData:
		n, err := c.br.Read(p[:min(len(p), c.left)])
		if c.left -= n; c.left == 0 {
			c.next = chunkEnd
		}
		return n, cutOff(err)
	case chunkEnd:
		line, err := c.line()
		if err != nil {
			return 0, err
		}
		if len(line) != 0 {
			return 0, fmt.Errorf("%w: a chunk is longer than its size line says", ErrMalformed)
		}
		c.next = sizeLine
		return 0, nil
	case trailer:
		line, err := c.line()
		if err != nil {
			return 0, err
		}
		if len(line) == 0 {
			c.next = nothing
			return 0, io.EOF
		}
		if c.trailers += len(line); c.trailers > maxTrailer {
			return 0, fmt.Errorf("%w: trailers over %d bytes", ErrTooLarge, maxTrailer)
		}
		return 0, nil
	default:
		return 0, io.EOF
	}
}

// line returns the next line without its CRLF. A bare LF or CR is refused: two
// readers that differ about line ends differ about where an answer ends.
func (c *chunked) line() ([]byte, error) {
	b, err := c.br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, fmt.Errorf("%w: a chunk's size or trailer line is over %d bytes", ErrTooLarge, c.br.Size())
	}
	if err != nil {
		return nil, cutOff(err)
	}
	end := len(b) - 2
	if end < 0 || bytes.IndexByte(b, '\r') != end {
		return nil, fmt.Errorf("%w: bad line end between chunks", ErrMalformed)
	}
	return b[:end], nil
}

// arrived reports whether the next step would return without waiting.
func (c *chunked) arrived() bool {
	b, _ := c.br.Peek(c.br.Buffered()) // of what is buffered: cannot fail
	switch c.next {
	case chunkData:
		return len(b) > 0
	case nothing:
		return true
	default:
		return bytes.IndexByte(b, '\n') >= 0
	}
}

// parseSize reads the hexadecimal size; extensions behind it are ignored.
func parseSize(line []byte) (int, error) {
	digits, _, _ := bytes.Cut(line, []byte{';'})
	size, err := strconv.ParseUint(string(bytes.TrimRight(digits, " \t")), 16, 64) // does not allocate: the text does not escape
	switch {
	case size > maxChunk: // also where it does not fit into 64 bits
		return 0, fmt.Errorf("%w: a chunk over %d bytes", ErrMalformed, maxChunk)
	case err != nil:
		return 0, fmt.Errorf("%w: bad chunk size", ErrMalformed)
	}
	return int(size), nil
}

// cutOff turns an end of the connection into the error it is here.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
