package edge

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
)

const (
	maxChunkLine = 256 // most bytes of a line with a chunk's size and its extensions
	// maxFraming bounds such lines in a body, in bytes beyond 16 per chunk and 2 per byte of data, as
	// in net/http.
	maxFraming = 16 << 10
)

// errChunked says what is wrong with a chunked body. The client sees the text.
type errChunked string

func (e errChunked) Error() string { return "edge: " + string(e) }

// Like parseHead, readChunks refuses framing that two parsers may read differently, and a body that
// consists mostly of framing.
func (u *upload) readChunks(br *bufio.Reader) error {
	framing := 0 // beyond what is free; see maxFraming
	for {
		line, err := chunkLine(br, maxChunkLine)
		if err != nil {
			return err
		}
		size, err := chunkSize(line)
		if err != nil {
			return err
		}
		if size == 0 {
			return readTrailer(br)
		}
		framing = max(0, framing+len(line)-16-2*size)
		if framing > maxFraming {
			return errChunked("the chunks have more framing than data")
		}
		if size > u.limit-len(u.buf) {
			return errBodyTooLarge
		}
		if err := u.copyFrom(br, size); err != nil {
			return err
		}
		var crlf [2]byte
		switch _, err := io.ReadFull(br, crlf[:]); {
		case err != nil:
			return unexpectedEOF(err)
		case string(crlf[:]) != "\r\n":
			return errChunked("a chunk does not end where its size says")
		}
	}
}

// chunkLine returns the next line without its CRLF, which counts in maxBytes. The line is valid
// until the next read from br.
func chunkLine(br *bufio.Reader, maxBytes int) ([]byte, error) {
	line, err := br.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull), len(line) > maxBytes:
		return nil, errChunked("a line between the chunks is too long")
	case err != nil:
		return nil, unexpectedEOF(err)
	case len(line) < len("\r\n") || line[len(line)-2] != '\r': // only an LF
		return nil, errChunked("a line between the chunks does not end in CRLF")
	}
	line = line[:len(line)-2]
	for _, b := range line {
		if b < ' ' && b != '\t' || b == 0x7f {
			return nil, errChunked("a line between the chunks contains a control character")
		}
	}
	return line, nil
}

// White space or an extension after the hex digits is ignored.
func chunkSize(line []byte) (int, error) {
	rest := bytes.TrimLeft(line, "0123456789abcdefABCDEF")
	digits := line[:len(line)-len(rest)]
	n, err := strconv.ParseUint(string(digits), 16, 60)
	if err != nil || len(digits) > 15 { // 60 bits; a longer number that fits has a useless leading 0
		return 0, errChunked("a chunk's size is not a number, or is too large")
	}
	isExtension := len(rest) > 0 && rest[0] == ';'
	isBlank := len(bytes.Trim(rest, " \t")) == 0
	if !isExtension && !isBlank {
		return 0, errChunked("a chunk's size is followed by something else than an extension")
	}
	return int(n), nil
}

// readTrailer drops the trailer. It refuses fields that frame, route or authorise a request,
// because another proxy may treat them as part of the head.
func readTrailer(br *bufio.Reader) error {
	for size := 0; ; {
		line, err := chunkLine(br, br.Size())
		if err != nil || len(line) == 0 {
			return err
		}
		if size += len(line) + len("\r\n"); size > br.Size() {
			return errChunked("the trailer is too long")
		}
		name, why := fieldName(line)
		switch {
		case why != "":
			return errChunked(why)
		case notInTrailer[string(bytes.ToLower(name))]:
			return errChunked("the trailer has a field that belongs in the head")
		}
	}
}

var notInTrailer = map[string]bool{
	"authorization": true, "connection": true, "content-encoding": true, "content-length": true, "content-range": true, "content-type": true, "cookie": true,
	"expect": true, "host": true, "keep-alive": true, "max-forwards": true, "proxy-authenticate": true, "proxy-authorization": true, "proxy-connection": true,
	"range": true, "te": true, "trailer": true, "transfer-encoding": true, "x-api-key": true,
	"x-forwarded-for": true, "x-forwarded-host": true, "x-forwarded-proto": true, "x-real-ip": true,
}
