package engine

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// Response is an engine's answer from its head on. It belongs to the goroutine
// that called Do; the slices it returns are valid until Close.
type Response struct {
	call   *Call
	conn   *conn // nil once closed
	status int
	keep   bool // the connection may be used again if the body ends cleanly
	body   body
	err    error // of the last Read; it stays
}

func (r *Response) open(k *Call, c *conn, method string, keep bool) {
	r.call, r.conn, r.status, r.keep = k, c, c.head.StatusCode(), keep
	r.body.open(c.br, method, &c.head)
}

// StatusCode is the HTTP status, 200 or above. It is also known after Close.
func (r *Response) StatusCode() int { return r.status }

// ContentType is the header of that name as the engine sent it.
func (r *Response) ContentType() []byte { return r.Header("Content-Type") }

// Header returns the first value of a header in any case, nil if there is none.
func (r *Response) Header(name string) []byte {
	if r.conn == nil {
		return nil
	}
	return r.conn.head.Peek(name)
}

// SetIdle changes how long each later Read may wait for bytes; zero: for ever. A caller that waits for something
// rarer than bytes (the first data event among keep-alive comments) sets the rest of its wait before each Read. A
// Read without SetIdle right before it waits between 3/4 of d and d.
func (r *Response) SetIdle(d time.Duration) {
	if r.conn == nil {
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	r.conn.idle, r.conn.deadlineSet = d, time.Time{}
	if !r.conn.leaving {
		r.conn.readBy = time.Time{}
	}
}

// SetDeadline ends all later Reads at the time t, however many bytes come before. A later SetIdle takes it back.
func (r *Response) SetDeadline(t time.Time) {
	if r.conn == nil {
		return
	}
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if !r.conn.leaving {
		r.conn.readBy, r.conn.deadlineSet = t, time.Time{}
	}
}

// Read waits for the first byte and returns what has arrived. io.EOF means that the whole body was read. A body that
// breaks off is an *Error around io.ErrUnexpectedEOF. (If the engine marks the end only by closing, the two cannot be
// told apart.)
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

// Reused says that the connection had served a request before, so that the time until the head has no dialling in it.
func (r *Response) Reused() bool { return r.conn != nil && r.conn.reused }

// Arrived says that the next Read returns data without waiting.
func (r *Response) Arrived() bool { return r.conn != nil && r.err == nil && r.body.arrived() }

// Ended says that nothing more can be read: the body is complete, or it broke off.
func (r *Response) Ended() bool { return r.conn == nil || r.err != nil || r.body.finished() }

// ReadAll returns the rest of the body, or an *Error around ErrTooLarge if the rest is more than limit bytes.
func (r *Response) ReadAll(limit int) ([]byte, error) { return r.ReadInto(nil, limit) }

// ReadInto is ReadAll into buf, from its beginning. If buf is too small it takes a new buffer. The body is in the
// slice that it returns.
func (r *Response) ReadInto(buf []byte, limit int) ([]byte, error) {
	if r.conn != nil && r.body.framing == byLength && r.body.left > limit {
		return nil, r.tooLarge(limit)
	}
	if n := min(r.expected(), limit, 1<<20) + 1; cap(buf) < n {
		buf = make([]byte, 0, n)
	}
	buf = buf[:0]
	for {
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case len(buf) > limit:
			return nil, r.tooLarge(limit)
		case errors.Is(err, io.EOF):
			return buf, nil
		case err != nil:
			return nil, err
		}
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
	}
}

// ReadUpTo returns the rest of the body as far as it arrives, cut at limit bytes. It is for refusals, of which a part
// is better than nothing.
func (r *Response) ReadUpTo(limit int) []byte {
	beginning, _ := io.ReadAll(io.LimitReader(r, int64(limit))) // what came before an error is kept
	return beginning
}

// expected is how many bytes the body may still have: as its length says, or a guess.
func (r *Response) expected() int {
	if r.body.framing == byLength {
		return r.body.left
	}
	return 4 << 10
}

func (r *Response) tooLarge(limit int) error {
	r.err = r.call.newError(PhaseBody, r.conn, fmt.Errorf("%w of %d bytes", ErrTooLarge, limit))
	return r.err
}

// Close ends the response. It never blocks and may be called more than once. The connection is kept only if all of
// the body has arrived and was read: a caller tells the engine to stop by closing early.
func (r *Response) Close() {
	if r.conn == nil {
		return
	}
	keep := r.keep && (r.err == nil || errors.Is(r.err, io.EOF)) && r.body.finished()
	r.conn = nil
	r.body = body{}
	r.call.release(keep)
}
