package edge

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/valyala/fasthttp"
)

// Encodings lists the content codings of request bodies, as for Accept-Encoding.
const Encodings = "gzip, zstd"

// maxWindow is how far back a zstd body may refer, in bytes, because the decoder must keep as many
// in memory. RFC 9659 sets this bound for HTTP.
const maxWindow = 8 << 20

type coding struct {
	readSizes   func(packed []byte) (sizes statedSizes, err error) // as the body states them
	open        func(packed []byte, sizes statedSizes) (io.ReadCloser, error)
	clientError func(err error) error // for the client
}

// statedSizes are in the body's own header or trailer, and may be wrong.
type statedSizes struct {
	bytes  uint64 // bytes of the decompressed content; 0: not stated
	window uint64 // that the decoder must keep, in bytes; 0: gzip, whose window is small
}

var (
	gzips = coding{gzipSizes, openGzip, gzipError}
	zstds = coding{zstdSizes, openZstd, zstdError}
)

// Unpack returns the content of a body of at most maxBytes, decompressed, or a refusal. The
// reservation is charged before memory is allocated, so a small body cannot expand into memory that
// is not charged. At the end, only the content stays charged. After a refusal, the caller releases
// the whole reservation.
func Unpack(h *fasthttp.RequestHeader, packed []byte, reservation *Reservation, maxBytes int) ([]byte, *Refusal) {
	c, ok := codingOf(h)
	switch {
	case !ok:
		return nil, &Refusal{fasthttp.StatusUnsupportedMediaType, "unsupported_encoding",
			"the body has a Content-Encoding that is not read here; send the body without one, or with one of: " + Encodings}
	case c == nil:
		return packed, nil
	}
	packedMemory := reservation.held()
	sizes, err := c.readSizes(packed)
	if err != nil {
		return nil, badEncoding(err)
	}
	// zstd's decoder also allocates twice the window, or a window and 1 MiB if that is less
	// (klauspost/compress 1.20.1, frameDec.reset).
	windowMemory := int(min(2*sizes.window, sizes.window+1<<20))
	if !reservation.Acquire(windowMemory) {
		return nil, &noRoomForBody
	}
	r, err := c.open(packed, sizes)
	if err != nil {
		return nil, badEncoding(c.clientError(err))
	}
	bufSize := max(smallBody, 8*len(packed)) // a guess, if the size is not stated
	if sizes.bytes > 0 {
		bufSize = int(min(sizes.bytes, math.MaxInt32)) // the client may state any number
	}
	content, err := unpackAll(r, reservation, min(bufSize, maxBytes), maxBytes)
	_ = r.Close() // never fails
	switch {
	case errors.Is(err, errBodyTooLarge):
		return nil, &Refusal{fasthttp.StatusRequestEntityTooLarge, "body_too_large",
			"the request body is limited to " + strconv.Itoa(maxBytes) + " bytes after decoding; send less"}
	case errors.Is(err, errNoRoom):
		return nil, &noRoomForBody
	case err != nil:
		return nil, badEncoding(c.clientError(err))
	}
	reservation.releaseSome(packedMemory + int64(windowMemory))
	return content, nil
}

// The client sees the text of err.
func badEncoding(err error) *Refusal {
	return &Refusal{fasthttp.StatusBadRequest, "bad_encoding", "the body is not what its Content-Encoding says: " + err.Error()}
}

// unpackAll begins with a buffer of bufSize bytes.
func unpackAll(r io.Reader, reservation *Reservation, bufSize, maxBytes int) ([]byte, error) {
	if !reservation.Acquire(bufSize) {
		return nil, errNoRoom
	}
	buf := make([]byte, 0, bufSize)
	for {
		var one [1]byte // if buf is full, so that it grows only for more content
		into := buf[len(buf):cap(buf)]
		if len(into) == 0 {
			into = one[:]
		}
		n, err := r.Read(into)
		if n > 0 && len(buf) == cap(buf) { // the byte in one is content
			if len(buf) == maxBytes {
				return nil, errBodyTooLarge
			}
			larger := min(maxBytes, max(smallBody, 4*len(buf)))
			if !reservation.Acquire(larger - len(buf)) {
				return nil, errNoRoom
			}
			buf = append(append(make([]byte, 0, larger), buf...), one[0])
		} else {
			buf = buf[:len(buf)+n]
		}
		switch {
		case errors.Is(err, io.EOF):
			return buf, nil
		case err != nil:
			return nil, err
		}
	}
}

// codingOf returns nil for a body that is not compressed. ok is false if the coding is unknown, or
// not the only one.
func codingOf(h *fasthttp.RequestHeader) (c *coding, ok bool) {
	for _, line := range h.PeekAll(fasthttp.HeaderContentEncoding) {
		for name := range strings.SplitSeq(string(line), ",") {
			var next *coding
			switch strings.ToLower(strings.Trim(name, " \t")) {
			case "", "identity":
				continue
			case "gzip", "x-gzip": // RFC 9110, 8.4.1.3
				next = &gzips
			case "zstd":
				next = &zstds
			}
			if next == nil || c != nil {
				return nil, false
			}
			c = next
		}
	}
	return c, true
}

// A decoder in the pool refers to no body.
var gunzips = sync.Pool{New: func() any { return new(gunzip) }}

type gunzip struct {
	gzip.Reader
	src bytes.Reader
}

func openGzip(packed []byte, _ statedSizes) (io.ReadCloser, error) {
	z := gunzips.Get().(*gunzip)
	z.src.Reset(packed)
	if err := z.Reset(&z.src); err != nil {
		_ = z.Close()
		return nil, err
	}
	return z, nil
}

// Close returns the decoder to the pool.
func (z *gunzip) Close() error {
	z.src.Reset(nil)
	gunzips.Put(z)
	return nil
}

// gzipSizes reads the last four bytes. If a body consists of several gzip streams, they have only
// the last one's size.
func gzipSizes(packed []byte) (sizes statedSizes, err error) {
	const mostRatio = 1032 // the best ratio of deflate, which bounds a wrong size
	if n := len(packed); n >= 4 {
		sizes.bytes = min(uint64(binary.LittleEndian.Uint32(packed[n-4:])), mostRatio*uint64(n))
	}
	return sizes, nil
}

func gzipError(err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the gzip data is cut off")
	case errors.Is(err, gzip.ErrChecksum):
		return errors.New("the gzip data has a wrong checksum")
	}
	return errors.New("it is not valid gzip data")
}

var errWindow = errors.New("its zstd window is larger than 8 MiB, which no sender may use over HTTP; compress at a lower level")

// zstdSizes reads the header of the first frame. The decoder refuses later frames with a larger
// window.
func zstdSizes(packed []byte) (sizes statedSizes, err error) {
	var h zstd.Header
	switch err := h.Decode(packed); {
	case err != nil:
		return sizes, zstdError(err)
	case h.Skippable: // it does not say how large the next frames are
		return statedSizes{window: maxWindow}, nil
	case h.HasFCS:
		sizes.bytes = h.FrameContentSize
	}
	window := h.WindowSize
	if h.SingleSegment { // it states no window, because the decoder keeps the whole content
		window = h.FrameContentSize
	}
	if window > maxWindow {
		return sizes, errWindow
	}
	sizes.window = max(window, zstd.MinWindowSize) // the decoder accepts no smaller bound
	return sizes, nil
}

// The reader refuses a frame whose window is larger than the stated one.
func openZstd(packed []byte, sizes statedSizes) (io.ReadCloser, error) {
	z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(sizes.window))
	if err != nil {
		return nil, err
	}
	return z.IOReadCloser(), nil
}

func zstdError(err error) error {
	switch {
	// Either is for a window above that of the first frame (openZstd).
	case errors.Is(err, zstd.ErrDecoderSizeExceeded), errors.Is(err, zstd.ErrWindowSizeExceeded):
		return errors.New("a zstd frame has a larger window than the first; compress the body as one frame")
	case errors.Is(err, zstd.ErrUnknownDictionary):
		return errors.New("its zstd data needs a dictionary; compress without one")
	case errors.Is(err, zstd.ErrCRCMismatch):
		return errors.New("the zstd data has a wrong checksum")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the zstd data is cut off")
	}
	return errors.New("it is not valid zstd data")
}
