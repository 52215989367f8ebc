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

// Encodings are the content codings that a body may have, as the header Accept-Encoding of an answer lists them.
const Encodings = "gzip, zstd"

// maxWindow bounds how far a zstd body may refer back, and so the memory for that. A sender over HTTP must stay within it (RFC 9659).
const maxWindow = 8 << 20

// A coding is one way in which a body may be packed.
type coding struct {
	look func(packed []byte) (says announced, err error)
	open func(packed []byte, says announced) (io.ReadCloser, error)
	told func(err error) error // what a client is told of an error
}

// announced is what a packed body says of itself. It may be wrong.
type announced struct {
	bytes  uint64 // of its content; 0: it does not say
	window uint64 // bytes that it refers back to, if the decoder keeps them beside the content
}

var (
	gzips = coding{lookGzip, openGzip, toldGzip}
	zstds = coding{lookZstd, openZstd, toldZstd}
)

// Unpack returns a body without its content coding, or says why it refuses it. The memory of what comes out is
// charged before it is taken, and what the packed body took is given back then. So it does not
// matter how much smaller than its content a body is.
func Unpack(h *fasthttp.RequestHeader, packed []byte, charge *Charge, most int) ([]byte, *Refusal) {
	c, ok := codingOf(h)
	switch {
	case !ok:
		return nil, &Refusal{fasthttp.StatusUnsupportedMediaType, "unsupported_encoding",
			"the body has a Content-Encoding that is not read here; send the body without one, or with one of: " + Encodings}
	case c == nil:
		return packed, nil
	}
	before := charge.give(0)
	says, err := c.look(packed)
	if err != nil {
		return nil, badEncoding(err)
	}
	beside := int(min(2*says.window, says.window+1<<20)) // as zstd's decoder allocates (klauspost/compress 1.20.1, frameDec.reset)
	if !charge.Acquire(beside) {
		return nil, &refusedBodies
	}
	r, err := c.open(packed, says)
	if err != nil {
		return nil, badEncoding(c.told(err))
	}
	room := max(smallBody, 8*len(packed))
	if says.bytes > 0 {
		room = int(min(says.bytes, math.MaxInt32))
	}
	plain, err := unpackAll(r, charge, min(room, most), most)
	_ = r.Close() // there was no error that it could tell
	switch {
	case errors.Is(err, errBodyTooLarge):
		return nil, &Refusal{fasthttp.StatusRequestEntityTooLarge, "body_too_large",
			"the request body is limited to " + strconv.Itoa(most) + " bytes after decoding; send less"}
	case errors.Is(err, errNoRoom):
		return nil, &refusedBodies
	case err != nil:
		return nil, badEncoding(c.told(err))
	}
	charge.give(before + int64(beside))
	return plain, nil
}

func badEncoding(err error) *Refusal {
	return &Refusal{fasthttp.StatusBadRequest, "bad_encoding", "the body is not what its Content-Encoding says: " + err.Error()}
}

// unpackAll reads up to most bytes to the end, at first into a buffer of room bytes.
func unpackAll(r io.Reader, charge *Charge, room, most int) ([]byte, error) {
	if !charge.Acquire(room) {
		return nil, errNoRoom
	}
	buf := make([]byte, 0, room)
	for {
		var one [1]byte // is there more?
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
			if !charge.Acquire(larger - len(buf)) {
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

// codingOf is how to decode a body; nil: as it is. A body that was encoded twice is not read.
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

// gunzips are used again and again. Between two bodies they hold neither.
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

// lookGzip believes the last four bytes, but not beyond what deflate can reach. They may be wrong where several streams follow each other.
func lookGzip(packed []byte) (says announced, err error) {
	const mostRatio = 1032
	if n := len(packed); n >= 4 {
		says.bytes = min(uint64(binary.LittleEndian.Uint32(packed[n-4:])), mostRatio*uint64(n))
	}
	return says, nil
}

func toldGzip(err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the gzip data is cut off")
	case errors.Is(err, gzip.ErrChecksum):
		return errors.New("the gzip data has a wrong checksum")
	}
	return errors.New("it is not valid gzip data")
}

var errWindow = errors.New("its zstd window is larger than 8 MiB, which no sender may use over HTTP; compress at a lower level")

// lookZstd reads the head of the first frame. What follows it may not have a larger window.
func lookZstd(packed []byte) (says announced, err error) {
	var h zstd.Header
	switch err := h.Decode(packed); {
	case err != nil:
		return says, toldZstd(err)
	case h.Skippable: // it says nothing of the frames behind it
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
	says.window = max(window, zstd.MinWindowSize)
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

func toldZstd(err error) error {
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
