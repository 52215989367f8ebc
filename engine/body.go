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
	case length == -1: // fasthttp gives -1 for a chunked body, and -2 for one with neither a length nor chunks
		b.framing = byChunks
	case length >= 0:
		b.framing, b.bytesLeft = byLength, length
	default:
		b.framing = byClose
	}
}

// Read returns io.EOF at the end of a complete body, and io.ErrUnexpectedEOF if the body was cut off.
func (b *body) Read(p []byte) (int, error) {
	switch b.framing {
	case byChunks:
		return b.chunks.read(b.br, p)
	case byLength:
		if b.bytesLeft == 0 {
			return 0, io.EOF
		}
		n, err := b.br.Read(p[:min(len(p), b.bytesLeft)])
		if b.bytesLeft -= n; b.bytesLeft == 0 {
			return n, io.EOF
		}
		return n, cutOff(err)
	case byClose:
		return b.br.Read(p)
	default:
		return 0, io.EOF
	}
}

// hasData reports whether a Read would return data without waiting.
func (b *body) hasData() bool {
	if b.framing == byChunks && (b.chunks.readFraming(b.br) || b.chunks.next != chunkData) {
		return false // the body has ended, or the next byte that arrives belongs to a line between chunks
	}
	return b.framing != noBody && b.br.Buffered() > 0
}

// isComplete reports whether the whole body was read from the connection. It does not wait for bytes that have not arrived.
func (b *body) isComplete() bool {
	switch b.framing {
	case byChunks:
		return b.chunks.readFraming(b.br)
	case byLength:
		return b.bytesLeft == 0
	default:
		return b.framing == noBody
	}
}
