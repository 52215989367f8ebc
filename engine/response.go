package engine

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// Response is an answer whose head was read. Only the goroutine that called Do may use it. Slices
// that it returns are valid until Close.
type Response struct {
	call     *Call
	conn     *conn // nil after Close
	status   int
	mayReuse bool // if the body ends cleanly
	body     body
	err      error // of Read, which later Reads return again
}

func (r *Response) open(k *Call, c *conn, method string, mayReuse bool) {
	r.call, r.conn, r.status, r.mayReuse = k, c, c.head.StatusCode(), mayReuse
	r.body.open(c.br, method, &c.head)
}

// StatusCode is 200 or above, even after Close.
func (r *Response) StatusCode() int { return r.status }

// ContentType is the header as the engine sent it.
func (r *Response) ContentType() []byte { return r.Header("Content-Type") }

// Header returns the first value of a header in any case; nil: there is none.
func (r *Response) Header(name string) []byte {
	if r.conn == nil {
		return nil
	}
	return r.conn.head.Peek(name)
}

// SetIdle sets how long each later Read may wait; zero: for ever. It removes the deadline of
// SetDeadline, but not that of Call.Disconnect. The first Read waits for up to d, a later one for
// 3/4 of d to d, because it costs time to move the socket's deadline. A caller that waits for an
// event must call SetIdle with the time left before each Read: keep-alive comments may come first.
func (r *Response) SetIdle(d time.Duration) {
	if r.conn == nil {
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if !r.conn.halfClosed { // after Call.Disconnect its own deadline stays
		r.conn.readDeadline = noDeadline // only idleLimit bounds later Reads
	}
	r.conn.idleLimit = d
	r.conn.setDeadlineAtNextRead()
}

// SetDeadline makes all Reads fail from t on, until a later SetIdle. After Call.Disconnect it does
// nothing.
func (r *Response) SetDeadline(t time.Time) {
	if r.conn == nil {
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if !r.conn.halfClosed {
		r.conn.readDeadline = t
		r.conn.setDeadlineAtNextRead() // no Read waits now, because only one goroutine uses the response
	}
}

// Read returns io.EOF after the whole body. If the body breaks off, it returns an *Error that wraps
// io.ErrUnexpectedEOF. If only the closing of the connection marks the end, the two cannot be told
// apart, and Read returns io.EOF.
func (r *Response) Read(p []byte) (int, error) {
	if r.conn == nil {
		return 0, fmt.Errorf("engine %s: read of a closed response: %w", r.call.target.ID, io.ErrClosedPipe)
	}
	if r.err != nil || len(p) == 0 {
		return 0, r.err
	}
	n, err := r.body.Read(p)
	if err == nil {
		return n, nil
	}
	if !errors.Is(err, io.EOF) {
		err = r.call.newError(PhaseBody, r.conn, err)
	}
	r.err = err
	return n, err
}

// Reused says that the time until the head includes no dialling.
func (r *Response) Reused() bool { return r.conn != nil && r.conn.reused }

// Arrived says that the next Read does not wait.
func (r *Response) Arrived() bool { return r.conn != nil && r.err == nil && r.body.hasData() }

// Ended says that the body is complete, or broke off.
func (r *Response) Ended() bool { return r.conn == nil || r.err != nil || r.body.isComplete() }

// ReadAll returns the rest of the body. Above limit bytes it returns an *Error that wraps
// ErrTooLarge.
func (r *Response) ReadAll(limit int) ([]byte, error) { return r.ReadInto(nil, limit) }

// ReadInto is ReadAll into buf, or into a new buffer if buf is too small.
func (r *Response) ReadInto(buf []byte, limit int) ([]byte, error) {
	// The Content-Length shows it, so that nothing need be read.
	if r.conn != nil && r.body.framing == byLength && r.body.bytesLeft > limit {
		return nil, r.failTooLarge(limit)
	}
	// One byte more than the body, so that the read that finds the end needs no larger buffer. At most
	// 1 MiB and one byte, because a Content-Length may be wrong.
	if size := min(r.expectedLength(), limit, 1<<20) + 1; cap(buf) < size {
		buf = make([]byte, 0, size)
	}
	buf = buf[:0]
	for {
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case len(buf) > limit:
			return nil, r.failTooLarge(limit)
		case errors.Is(err, io.EOF):
			return buf, nil
		case err != nil:
			return nil, err
		}
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)] // grows the full buffer
		}
	}
}

// ReadUpTo ignores errors: a part of an engine's error message is better than nothing.
func (r *Response) ReadUpTo(limit int) []byte {
	beginning, _ := io.ReadAll(io.LimitReader(r, int64(limit)))
	return beginning
}

// expectedLength guesses without a Content-Length.
func (r *Response) expectedLength() int {
	if r.body.framing == byLength {
		return r.body.bytesLeft
	}
	return 4 << 10
}

// failTooLarge makes later reads fail, too.
func (r *Response) failTooLarge(limit int) error {
	r.err = r.call.newError(PhaseBody, r.conn, fmt.Errorf("%w of %d bytes", ErrTooLarge, limit))
	return r.err
}

// Close never blocks, and may be called again. Unless the whole body was read, it closes the
// connection, which tells the engine to stop.
func (r *Response) Close() {
	if r.conn == nil {
		return
	}
	failed := r.err != nil && !errors.Is(r.err, io.EOF)
	mayReuse := r.mayReuse && !failed && r.body.isComplete()
	r.conn = nil
	r.body = body{}
	r.call.release(mayReuse)
}
