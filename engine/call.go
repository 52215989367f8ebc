package engine

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// Call is one request to one engine; Do may be called once. Only one goroutine may use Do and the Response that it returns. Abort,
// Expire and Disconnect may be called from any goroutine.
type Call struct {
	client      *Client
	target      *Target
	fresh       bool         // Fresh was called: use no idle connection
	mayRepeat   bool         // Repeat was called: the request may be sent twice
	beforeWrite func() error // called right before the request is written; its error ends the call; nil: nothing is called
	onSent      func()       // called once the request is written; nil: nothing is called
	resp        Response

	mu           sync.Mutex
	started      bool               // Do was called
	aborted      bool               // Abort or Disconnect was called
	closeIgnored bool               // the engine did not close its half in time after Disconnect
	cancel       context.CancelFunc // cancels the dial that is in progress; nil: there is none
	conn         *conn              // the connection of the call, from attach until release; nil: it has none

	wrote, read int64 // bytes sent and received (see Bytes), set when the connection is released
}

// NewCall prepares a call; Do sends it.
func (c *Client) NewCall(t *Target) *Call { return &Call{client: c, target: t} }

// Target returns the engine, and the rank if there is one, to which the call goes.
func (k *Call) Target() *Target { return k.target }

// Fresh makes Do dial instead of using an idle connection, which may turn out to be stale (see Error.Stale).
func (k *Call) Fresh() *Call {
	k.fresh = true
	return k
}

// Repeat allows Do to send the request a second time if the connection is stale. The request must do no harm if the engine
// acts on it twice.
func (k *Call) Repeat() *Call {
	k.mayRepeat = true
	return k
}

// Guard makes Do call f once there is a connection, right before it writes the request, and again before it sends the request a
// second time. If f returns an error, Do sends nothing and returns this error.
func (k *Call) Guard(f func() error) { k.beforeWrite = f }

// OnWritten makes Do call f once the request is written, before it waits for the answer, after the functions of earlier calls of OnWritten.
// f must not block.
func (k *Call) OnWritten(f func()) {
	if before := k.onSent; before != nil {
		last := f
		f = func() { before(); last() }
	}
	k.onSent = f
}

// Do sends the request and returns once it has read the head of the response, whatever the status. The caller must Close the
// response. Do does not copy body and does not use it after it returns. Every error that it returns is an *Error.
//
// If an idle connection turns out to be stale, Do sends the request once more on a new connection. It does this only if no byte
// was written, or if a second sending does no harm: a GET, a HEAD, or a call with Repeat.
func (k *Call) Do(method, path string, hdr []Header, body [][]byte, d Deadlines) (*Response, error) {
	if err := k.check(method, path, hdr); err != nil {
		return nil, &Error{Target: k.target.ID, Phase: PhaseRequest, Err: err}
	}
	r, failure := k.attempt(method, path, hdr, body, d, k.fresh)
	harmless := k.mayRepeat || method == http.MethodGet || method == http.MethodHead
	if failure != nil && failure.Stale() && (harmless || !failure.Sent) {
		r, failure = k.attempt(method, path, hdr, body, d, true) // true: on a new connection
	}
	if failure != nil { // a separate return, because a nil *Error in an error would not be nil
		return nil, failure
	}
	return r, nil
}

// check refuses a request whose method, path or headers are not safe to send, and a second use of the call.
func (k *Call) check(method, path string, hdr []Header) error {
	if err := checkRequest(k.target, method, path, hdr); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.started {
		return fmt.Errorf("%w: a call is made once; NewCall for each", ErrRefused)
	}
	k.started = true
	return nil
}

// attempt sends the request once, on a new connection if fresh is set, and reads the response head. body is the body in pieces. If an
// idle connection was stale, attempt also closes the other idle connections to the engine.
func (k *Call) attempt(method, path string, hdr []Header, body [][]byte, d Deadlines, fresh bool) (*Response, *Error) {
	c, err := k.connect(d.Connect, fresh)
	if err != nil {
		return nil, k.newError(PhaseConnect, nil, err)
	}
	if k.beforeWrite != nil {
		if err := k.beforeWrite(); err != nil {
			failure := k.newError(PhaseConnect, nil, err)
			k.release(true) // nothing was written, so the connection can be used again
			return nil, failure
		}
	}
	length := 0
	for _, b := range body {
		length += len(b)
	}
	c.out = appendHead(c.out[:0], k.target, method, path, hdr, length)
	c.onSent = k.onSent
	mayReuse, phase, err := c.exchange(d, c.out, body)
	c.onSent = nil // the connection may outlive the call
	if err != nil {
		failure := k.newError(phase, c, err)
		k.release(false)     // false: the connection is closed
		if failure.Stale() { // most likely the engine has restarted, so all its idle connections are stale
			k.client.idle.closeHost(c.key)
		}
		return nil, failure
	}
	k.resp.open(k, c, method, mayReuse)
	return &k.resp, nil
}

// connect takes an idle connection, or dials if there is none or if fresh is set. From then on Abort can close the connection.
// limit bounds the dial; 0: no bound.
func (k *Call) connect(limit time.Duration, fresh bool) (*conn, error) {
	if k.client.idle.isClosed() {
		return nil, ErrClosed
	}
	if !fresh {
		if c := k.client.idle.take(k.target.key()); c != nil {
			c.attachReader()
			return c, k.attach(c) // after an error of attach, c is closed
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
	k.cancel = cancel // so that Abort can end the dial
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
	k.cancel = nil // no dial is in progress any more
	if k.aborted {
		c.close()
		return ErrAborted
	}
	k.conn = c
	return nil
}

// release takes the connection away from the call, so that Abort cannot close it while another call uses it. If mayReuse is set, the call
// was not aborted and no unread bytes are left in the connection, release puts it into the pool of idle connections. Otherwise it closes
// the connection.
func (k *Call) release(mayReuse bool) {
	k.mu.Lock()
	c := k.conn
	k.conn = nil
	mayReuse = mayReuse && !k.aborted
	if c != nil { // Bytes must also answer later, without the connection
		k.wrote, k.read = c.wrote, c.read
	}
	k.mu.Unlock()
	switch {
	case c == nil: // the connection was released before
	case mayReuse && c.br.Buffered() == 0 && c.tlsDrained(): // left-over bytes would be read as the next response
		c.releaseReader()
		k.client.idle.put(c)
	default:
		c.close()
		c.releaseReader()
	}
}

// Bytes returns how many bytes were sent and received, including heads, but not counting TLS. While the call has a connection, the
// connection counts them. Only the goroutine that called Do may call Bytes, because the counts have no lock.
func (k *Call) Bytes() (sent, received int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn.wrote, k.conn.read
	}
	return k.wrote, k.read // release has copied them, because another call may use the connection now
}

// Abort ends the call in any phase: it closes the connection, and a method that is waiting fails with Error.Aborted. It
// never blocks, may be called more than once, and does nothing once the response is closed.
func (k *Call) Abort() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil { // a dial may be in progress
		k.cancel()
	}
	if k.conn != nil {
		k.conn.close()
		k.conn.notifyLoop() // an event loop that reads the socket (see Response.Detach) must now give it back
	}
}

// Expire ends a wait for bytes at once, as if its time were over. If no read is waiting, the next read fails. It may be
// called from any goroutine, and does nothing while the call has no connection.
func (k *Call) Expire() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		k.conn.shortenWait(0)
		k.conn.notifyLoop()
	}
}

// Disconnect ends the call in the same way as a client that disconnects: it closes evenkeel's half of the connection. For at most
// limit, the caller can still read what the engine sends, so that an answer on its way is not lost. An engine that notices the
// disconnection closes its own half, and the stream ends. If there is no connection yet, Disconnect does the same as Abort. It never
// blocks and may be called from any goroutine.
func (k *Call) Disconnect(limit time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil { // a dial may be in progress
		k.cancel()
	}
	if k.conn != nil {
		k.conn.halfClose(limit)
		k.conn.notifyLoop()
	}
}

// newError makes the Error of a call that failed in this phase. c is the connection that was used; nil: there was none yet. After Abort or
// Disconnect, the error is ErrAborted instead of cause. If cause is a timeout and Disconnect has closed evenkeel's half of the connection,
// the engine has not closed its own half in time. newError then also sets closeIgnored, which IgnoredClose reports.
func (k *Call) newError(phase Phase, c *conn, cause error) *Error {
	failure := &Error{Target: k.target.ID, Phase: phase, Timeout: isTimeout(cause), Err: cause}
	if c != nil {
		failure.Sent, failure.Answered, failure.Reused = c.wrote > 0, c.answered, c.reused
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.aborted { // Abort or Disconnect was called
		// After Abort, too, cause may be a timeout: of a wait that ended right before.
		k.closeIgnored = k.closeIgnored || failure.Timeout && c != nil && c.awaitsClose()
		failure.Aborted, failure.Timeout, failure.Err = true, false, ErrAborted
	}
	return failure
}

// IgnoredClose reports that the engine had not closed its half of the connection when the limit of Disconnect was over, so that it may
// still work on the request.
func (k *Call) IgnoredClose() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.closeIgnored
}
