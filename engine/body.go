package engine

import (
	"bufio"
	"io"
	"net/http"

	"github.com/valyala/fasthttp"
)

// framing says how a reader recognises where a response body ends.
type framing uint8

const (
	noBody framing = iota
	byLength
	byChunks
	byClose // the engine closes the connection, so a body that was cut off looks complete
)

// body reads one response body. It hides from its caller how the engine marks the end of the body.
type body struct {
	framing   framing
	bytesLeft int // of byLength: bytes of the body that were not read yet
	chunks    chunked
	br        *bufio.Reader
}

// open prepares b for the body that follows head, and finds out from the head where the body ends.
func (b *body) open(br *bufio.Reader, method string, head *fasthttp.ResponseHeader) {
	*b = body{br: br}
	code, length := head.StatusCode(), head.ContentLength()
	switch {
	case method == http.MethodHead, code == http.StatusNoContent, code == http.StatusNotModified:
		// framing stays noBody.
	case length == -1:
		// fasthttp gives -1 for a chunked body, and -2 for one with neither a length nor chunks.
		b.framing = byChunks
	case length >= 0:
		b.framing, b.bytesLeft = byLength, length
	default:
		b.framing = byClose
	}
}

// Read returns io.EOF at the end of a complete body, and io.ErrUnexpectedEOF if the body was cut
// off.
func (b *body) Read(p []byte) (int, error) {
	switch b.framing {
	case byChunks:
		return b.chunks.read(b.br, p)
	case byLength:
		if b.bytesLeft == 0 {
			return 0, io.EOF
		}
		n, err := b.br.Read(p[:min(len(p), b.bytesLeft)])
		b.bytesLeft -= n
		if b.bytesLeft == 0 {
			return n, io.EOF
		}
		return n, cutOff(err)
	case byClose: // here io.EOF, the end of the connection, is also the end of the body
		return b.br.Read(p)
	default: // noBody
		return 0, io.EOF
	}
}

// hasData reports whether a Read would return data without waiting. Of a chunked body it reads the
// lines before the data that have arrived, because only the bytes after them are data.
func (b *body) hasData() bool {
	if b.framing == byChunks {
		ended := b.chunks.readFraming(b.br)
		// The next byte that arrives belongs to a line between chunks.
		if ended || b.chunks.next != chunkData {
			return false
		}
	}
	return b.framing != noBody && b.br.Buffered() > 0
}

// isComplete reports whether the whole body was read from the connection. Of a chunked body it
// reads the lines after the data, if they have arrived, but it does not wait for them. It is false
// for a body whose end only the closing of the connection shows.
func (b *body) isComplete() bool {
	switch b.framing {
	case byChunks:
		return b.chunks.readFraming(b.br)
	case byLength:
		return b.bytesLeft == 0
	default: // noBody or byClose
		return b.framing == noBody
	}
}
