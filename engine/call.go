package engine

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// Call is one request to one engine, made once. Do and the Response it returns
// belong to one goroutine; Abort may come from any.
type Call struct {
	client    *Client
	target    *Target
	fresh     bool
	mayRepeat bool         // Repeat was called: the request may be sent twice
	guard     func() error // asked right before the request is written; its error ends the call; nil: none
	onSent    func()       // called once the request is written; nil: none
	resp      Response

	mu       sync.Mutex
	made     bool               // Do was called
	aborted  bool               // never unset
	heedless bool               // the engine did not close its side within the time of Leave
	cancel   context.CancelFunc // ends a dial under way
	conn     *conn              // set from the time it is connected until it is released

	wrote, read int64 // bytes of the connection, kept once it is released
}

// NewCall prepares a call; nothing happens before Do.
func (c *Client) NewCall(t *Target) *Call { return &Call{client: c, target: t} }

// Target is the engine that the call goes to.
func (k *Call) Target() *Target { return k.target }

// Fresh makes Do dial instead of taking a kept-alive connection, so that no Error is Stale. It is for a call that
// follows a stale one, and for a call that must not meet a stale connection.
func (k *Call) Fresh() *Call {
	k.fresh = true
	return k
}

// Repeat lets Do send the request a second time after a stale connection, because it does no harm if the engine acts
// on both.
func (k *Call) Repeat() *Call {
	k.mayRepeat = true
	return k
}

// Guard has Do call f once there is a connection, right before the request is written. If f returns an error, the
// call ends with it and nothing is sent.
func (k *Call) Guard(f func() error) { k.guard = f }

// OnWritten has Do call f once the request is written, while the answer is
// waited for. f must not block.
func (k *Call) OnWritten(f func()) { k.onSent = f }

// Do sends the request and returns at the end of the response head, whatever
// its status; the caller must Close the response. Body parts are written as
// they are, in one system call with the head, and not touched after Do. An
// error is always an *Error.
//
// A request on a kept-alive connection that turns out to be stale is sent once more on a new connection, if no byte
// of it was written, or if it does no harm twice: a GET, a HEAD, or a call with Repeat. Nothing else is ever sent
// twice.
func (k *Call) Do(method, path string, hdr []Header, body [][]byte, d Deadlines) (*Response, error) {
	if err := k.check(method, path, hdr); err != nil {
		return nil, &Error{Target: k.target.ID, Phase: PhaseRequest, Err: err}
	}
	r, failure := k.attempt(method, path, hdr, body, d, k.fresh)
	harmless := k.mayRepeat || method == http.MethodGet || method == http.MethodHead
	if failure != nil && failure.Stale() && (harmless || !failure.Sent) {
		r, failure = k.attempt(method, path, hdr, body, d, true)
	}
	if failure != nil { // not returned as it is: a nil *Error would be a non-nil error
		return nil, failure
	}
	return r, nil
}

// check refuses requests that must not be sent, and a second use of the call.
func (k *Call) check(method, path string, hdr []Header) error {
	if err := checkRequest(k.target, method, path, hdr); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.made {
		return fmt.Errorf("%w: a call is made once; NewCall for each", ErrRefused)
	}
	k.made = true
	return nil
}

// attempt sends the request once, on a new connection if fresh, and reads the response head. If it fails after an idle
// connection turned out to be stale, the other idle connections to the engine are closed, too.
func (k *Call) attempt(method, path string, hdr []Header, body [][]byte, d Deadlines, fresh bool) (*Response, *Error) {
	c, err := k.connect(d.Connect, fresh)
	if err != nil {
		return nil, k.newError(PhaseConnect, nil, err)
	}
	if k.guard != nil {
		if err := k.guard(); err != nil {
			failure := k.newError(PhaseConnect, nil, err)
			k.release(true)
			return nil, failure
		}
	}
	length := 0
	for _, b := range body {
		length += len(b)
	}
	c.out = appendHead(c.out[:0], k.target, method, path, hdr, length)
	c.onSent = k.onSent
	keep, phase, err := c.exchange(d, c.out, body)
	c.onSent = nil
	if err != nil {
		failure := k.newError(phase, c, err)
		k.release(false)
		if failure.Stale() {
			k.client.idle.drop(c.key)
		}
		return nil, failure
	}
	k.resp.open(k, c, method, keep)
	return &k.resp, nil
}

// connect takes an idle connection, unless fresh, or dials one, and lets Abort reach it. limit bounds the dial; 0: no
// bound.
func (k *Call) connect(limit time.Duration, fresh bool) (*conn, error) {
	if k.client.idle.isClosed() {
		return nil, ErrClosed
	}
	if !fresh {
		if c := k.client.idle.take(k.target.key()); c != nil {
			c.wake()
			return c, k.attach(c)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if limit > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, limit)
		defer stop()
	}
	k.mu.Lock()
	k.cancel = cancel
	aborted := k.aborted
	k.mu.Unlock()
	if aborted {
		return nil, ErrAborted
	}
	c, err := k.client.dial(ctx, k.target)
	if err != nil {
		return nil, err
	}
	return c, k.attach(c)
}

// attach makes c the connection of the call, or closes it if the call was aborted meanwhile.
func (k *Call) attach(c *conn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cancel = nil
	if k.aborted {
		c.close()
		return ErrAborted
	}
	k.conn = c
	return nil
}

// release gives the connection back to the pool, or closes it. From then on Abort does not reach it, because it may
// belong to another call.
func (k *Call) release(keep bool) {
	k.mu.Lock()
	c := k.conn
	k.conn = nil
	keep = keep && !k.aborted
	if c != nil {
		k.wrote, k.read = c.wrote, c.read
	}
	k.mu.Unlock()
	switch {
	case c == nil:
	case keep && c.br.Buffered() == 0 && c.drained():
		c.park()
		k.client.idle.put(c)
	default:
		c.close()
		c.park()
	}
}

// Bytes is how many bytes were sent and received, with the heads and without TLS. Only the goroutine that made the
// call may call it.
func (k *Call) Bytes() (sent, received int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn.wrote, k.conn.read
	}
	return k.wrote, k.read
}

// Abort ends the call in any phase: it closes the connection, and the method that waits fails with Error.Aborted. It
// never blocks, may be called more than once, and does nothing once the response is closed.
func (k *Call) Abort() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil {
		k.cancel()
	}
	if k.conn != nil {
		k.conn.close()
		k.conn.touch()
	}
}

// Expire ends a wait for bytes at once, as if its time were over; between two reads, the next read fails. It may be
// called from any goroutine, and does nothing while the call has no connection.
func (k *Call) Expire() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		k.conn.shortenWait(0)
		k.conn.touch()
	}
}

// Leave ends the call as a client that goes away does, but reads what the engine still sends for at most limit. It
// closes our half of the connection. The engine closes its own half once it has noticed, so that the end of what can
// be read shows when that was. An answer that was on its way is not lost. If there is no connection yet, Leave does
// the same as Abort. It never blocks and may be called from any goroutine.
func (k *Call) Leave(limit time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil {
		k.cancel()
	}
	if k.conn != nil {
		k.conn.leave(limit)
		k.conn.touch()
	}
}

// newError makes the Error of a call that failed in a phase; c is nil before there is a connection. After an abort the
// error is ErrAborted, whatever the cause.
func (k *Call) newError(phase Phase, c *conn, cause error) *Error {
	failure := &Error{Target: k.target.ID, Phase: phase, Timeout: isTimeout(cause), Err: cause}
	if c != nil {
		failure.Sent, failure.Answered, failure.Reused = c.wrote > 0, c.answered, c.reused
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.aborted {
		k.heedless = k.heedless || failure.Timeout
		failure.Aborted, failure.Timeout, failure.Err = true, false, ErrAborted
	}
	return failure
}

// Heedless reports that the engine had not closed its side when the time of Leave was over: it may still work on the
// request.
func (k *Call) Heedless() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.heedless
}
