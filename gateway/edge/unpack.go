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

// Encodings are the content codings that a body may have, in the form of the header Accept-Encoding.
const Encodings = "gzip, zstd"

// maxWindow bounds how far back a zstd body may refer, in bytes. The decoder must hold as much memory. RFC 9659 sets this bound for HTTP.
const maxWindow = 8 << 20

// A coding is one way in which a body may be compressed.
type coding struct {
	look    func(packed []byte) (says announced, err error)            // reads the announced sizes
	open    func(packed []byte, says announced) (io.ReadCloser, error) // returns a reader of the content
	explain func(err error) error                                      // turns an error of the decoder into an error for the client
}

// announced has the sizes that a compressed body states in its own header or trailer. They may be wrong.
type announced struct {
	bytes  uint64 // size of the content; 0: not stated
	window uint64 // bytes of content that the decoder keeps to refer back to; 0: gzip, whose window is small
}

var (
	gzips = coding{lookGzip, openGzip, explainGzip}
	zstds = coding{lookZstd, openZstd, explainZstd}
)

// Unpack returns the content of a compressed body, or a refusal. most bounds the content, in bytes. The reservation is charged for the
// content before its memory is allocated, so a small body cannot expand into memory that is not charged. At the end, the part of the
// reservation for the compressed body is given back.
func Unpack(h *fasthttp.RequestHeader, packed []byte, reservation *Reservation, most int) ([]byte, *Refusal) {
	c, ok := codingOf(h)
	switch {
	case !ok:
		return nil, &Refusal{fasthttp.StatusUnsupportedMediaType, "unsupported_encoding",
			"the body has a Content-Encoding that is not read here; send the body without one, or with one of: " + Encodings}
	case c == nil: // the body is not compressed
		return packed, nil
	}
	before := reservation.give(0) // what it holds, for the compressed body
	says, err := c.look(packed)
	if err != nil {
		return nil, badEncoding(err)
	}
	// What zstd's decoder allocates beside the content (klauspost/compress 1.20.1, frameDec.reset).
	beside := int(min(2*says.window, says.window+1<<20))
	if !reservation.Acquire(beside) {
		return nil, &refusedBodies
	}
	r, err := c.open(packed, says)
	if err != nil {
		return nil, badEncoding(c.explain(err))
	}
	room := max(smallBody, 8*len(packed)) // a guess, for a size that is not stated
	if says.bytes > 0 {
		room = int(min(says.bytes, math.MaxInt32))
	}
	plain, err := unpackAll(r, reservation, min(room, most), most)
	_ = r.Close() // the Close of neither decoder returns an error
	switch {
	case errors.Is(err, errBodyTooLarge):
		return nil, &Refusal{fasthttp.StatusRequestEntityTooLarge, "body_too_large",
			"the request body is limited to " + strconv.Itoa(most) + " bytes after decoding; send less"}
	case errors.Is(err, errNoRoom):
		return nil, &refusedBodies
	case err != nil:
		return nil, badEncoding(c.explain(err))
	}
	reservation.give(before + int64(beside))
	return plain, nil
}

func badEncoding(err error) *Refusal {
	return &Refusal{fasthttp.StatusBadRequest, "bad_encoding", "the body is not what its Content-Encoding says: " + err.Error()}
}

// unpackAll reads the whole content, of at most `most` bytes. Its buffer begins with room bytes.
func unpackAll(r io.Reader, reservation *Reservation, room, most int) ([]byte, error) {
	if !reservation.Acquire(room) {
		return nil, errNoRoom
	}
	buf := make([]byte, 0, room)
	for {
		var one [1]byte // for a full buffer: only if one more byte comes, the buffer must grow
		into := buf[len(buf):cap(buf)]
		if len(into) == 0 {
			into = one[:]
		}
		n, err := r.Read(into)
		if n > 0 && len(buf) == cap(buf) {
			if len(buf) == most {
				return nil, errBodyTooLarge
			}
			larger := min(most, max(smallBody, 4*len(buf)))
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

// codingOf returns the coding of a body; nil: it is not compressed. ok is false for an unknown coding, or for more than one.
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

// gunzips is a pool of decoders. Decoders in the pool hold no body.
var gunzips = sync.Pool{New: func() any { return new(gunzip) }}

type gunzip struct {
	gzip.Reader
	src bytes.Reader
}

func openGzip(packed []byte, _ announced) (io.ReadCloser, error) {
	z := gunzips.Get().(*gunzip)
	z.src.Reset(packed)
	if err := z.Reset(&z.src); err != nil {
		_ = z.Close()
		return nil, err
	}
	return z, nil
}

func (z *gunzip) Close() error {
	z.src.Reset(nil)
	gunzips.Put(z)
	return nil
}

// lookGzip reads the size of the content from the last four bytes. If a body has several gzip streams, the size may be too small, because
// the four bytes belong to the last stream only.
func lookGzip(packed []byte) (says announced, err error) {
	const mostRatio = 1032 // the best compression ratio of deflate, which bounds a size that is wrong
	if n := len(packed); n >= 4 {
		says.bytes = min(uint64(binary.LittleEndian.Uint32(packed[n-4:])), mostRatio*uint64(n))
	}
	return says, nil
}

func explainGzip(err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the gzip data is cut off")
	case errors.Is(err, gzip.ErrChecksum):
		return errors.New("the gzip data has a wrong checksum")
	}
	return errors.New("it is not valid gzip data")
}

var errWindow = errors.New("its zstd window is larger than 8 MiB, which no sender may use over HTTP; compress at a lower level")

// lookZstd reads the head of the first frame. The decoder refuses later frames with a larger window.
func lookZstd(packed []byte) (says announced, err error) {
	var h zstd.Header
	switch err := h.Decode(packed); {
	case err != nil:
		return says, explainZstd(err)
	case h.Skippable: // a skippable frame says nothing about the frames after it
		return announced{window: maxWindow}, nil
	case h.HasFCS:
		says.bytes = h.FrameContentSize
	}
	window := h.WindowSize
	if h.SingleSegment {
		window = h.FrameContentSize
	}
	if window > maxWindow {
		return says, errWindow
	}
	says.window = max(window, zstd.MinWindowSize) // the decoder accepts no lower bound
	return says, nil
}

func openZstd(packed []byte, says announced) (io.ReadCloser, error) {
	z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(says.window))
	if err != nil {
		return nil, err
	}
	return z.IOReadCloser(), nil
}

func explainZstd(err error) error {
	switch {
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
