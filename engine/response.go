package engine

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// Response is an engine's answer whose head was read. Only the goroutine
// that called Do may use it. The slices that it returns are valid until Close.
type Response struct {
	call     *Call
	conn     *conn // the connection that has the body; nil after Close
	status   int
	mayReuse bool // the connection may be used again if the body ends cleanly
	body     body
	err      error // the first error of Read, which later Reads return again
}

// open prepares the response whose head c has read. mayReuse says that the connection may be used again after the body.
func (r *Response) open(k *Call, c *conn, method string, mayReuse bool) {
	r.call, r.conn, r.status, r.mayReuse = k, c, c.head.StatusCode(), mayReuse
	r.body.open(c.br, method, &c.head)
}

// StatusCode returns the HTTP status, 200 or above, even after Close.
func (r *Response) StatusCode() int { return r.status }

// ContentType returns the header Content-Type as the engine sent it.
func (r *Response) ContentType() []byte { return r.Header("Content-Type") }

// Header returns the first value of a header, whose name may be in upper or lower case; nil: there is none.
func (r *Response) Header(name string) []byte {
	if r.conn == nil {
		return nil
	}
	return r.conn.head.Peek(name)
}

// SetIdle sets how long each later Read may wait for bytes; zero: for ever. It removes the deadline of SetDeadline, but not the one that
// Call.Disconnect has set. The first Read after SetIdle waits for up to d, a later one for 3/4 of d to d: the connection moves the deadline
// of its socket only when less than 3/4 of d is left, because that costs time. A caller that waits for an event must call SetIdle with the
// time that is left before each Read, because keep-alive comments may come before the event.
func (r *Response) SetIdle(d time.Duration) {
	if r.conn == nil { // the response is closed
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if !r.conn.halfClosed { // after Call.Disconnect its own deadline stays
		r.conn.readDeadline = noDeadline // only idleLimit bounds the Reads from now on
	}
	r.conn.idleLimit = d
	r.conn.setDeadlineAtNextRead()
}

// SetDeadline makes all later Reads fail from the time t on, however many bytes have come by then. A later SetIdle removes the deadline.
// After Call.Disconnect, SetDeadline does nothing, because the deadline of Disconnect stays.
func (r *Response) SetDeadline(t time.Time) {
	if r.conn == nil { // the response is closed
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if !r.conn.halfClosed { // Call.Disconnect was not called
		r.conn.readDeadline = t
		r.conn.setDeadlineAtNextRead() // no Read waits now, because only one goroutine uses the response
	}
}

// Read waits for at least one byte and returns the bytes that have arrived. io.EOF means that the whole body was read. If the body
// breaks off, Read returns an *Error that wraps io.ErrUnexpectedEOF. If the engine marks the end of the body only by closing the
// connection, Read cannot distinguish the two and returns io.EOF.
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

// Reused says that the connection had served an earlier request, so the time until the head does not include dialling.
func (r *Response) Reused() bool { return r.conn != nil && r.conn.reused }

// Arrived says that the next Read returns data without waiting.
func (r *Response) Arrived() bool { return r.conn != nil && r.err == nil && r.body.hasData() }

// Ended says that nothing more can be read: the body is complete, or it broke off.
func (r *Response) Ended() bool { return r.conn == nil || r.err != nil || r.body.isComplete() }

// ReadAll returns the rest of the body. If it has more than limit bytes, ReadAll returns an *Error that wraps ErrTooLarge.
func (r *Response) ReadAll(limit int) ([]byte, error) { return r.ReadInto(nil, limit) }

// ReadInto returns the rest of the body, as ReadAll does. It stores the body in buf, or in a new buffer if buf is too small.
func (r *Response) ReadInto(buf []byte, limit int) ([]byte, error) {
	if r.conn != nil && r.body.framing == byLength && r.body.bytesLeft > limit { // by its Content-Length, so that nothing need be read
		return nil, r.failTooLarge(limit)
	}
	// The new buffer has one byte more than the body, so that the read that finds the end needs no larger one. It has at most 1 MiB and
	// one byte, because a Content-Length may be wrong.
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
			buf = append(buf, 0)[:len(buf)] // append grows the buffer, which is full
		}
	}
}

// ReadUpTo returns at most limit bytes of the rest of the body, and ignores errors. It is for an engine's error message, where a part
// is better than nothing.
func (r *Response) ReadUpTo(limit int) []byte {
	beginning, _ := io.ReadAll(io.LimitReader(r, int64(limit))) // after an error, the bytes before it are still useful
	return beginning
}

// expectedLength returns how many bytes of the body are left, by its Content-Length; without one, it returns a guess.
func (r *Response) expectedLength() int {
	if r.body.framing == byLength {
		return r.body.bytesLeft
	}
	return 4 << 10
}

// failTooLarge makes this and all later reads fail, because the body has more than limit bytes, and returns the error.
func (r *Response) failTooLarge(limit int) error {
	r.err = r.call.newError(PhaseBody, r.conn, fmt.Errorf("%w of %d bytes", ErrTooLarge, limit))
	return r.err
}

// Close ends the response. It never blocks and may be called more than once. Unless the whole body was read, it closes the
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
