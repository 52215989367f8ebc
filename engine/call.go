package engine

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// Call is one request to one engine; Do may be called once. One goroutine may use Do and the
// Response; Abort, Expire and Disconnect may be called from any.
type Call struct {
	client    *Client
	target    *Target
	fresh     bool // use no idle connection
	mayRepeat bool // the request may be sent twice
	// beforeWrite is called right before each write of the request. Its error ends the call.
	beforeWrite func() error
	onSent      func() // called once the request is written; or nil
	resp        Response

	mu           sync.Mutex
	started      bool
	aborted      bool               // by Abort or Disconnect
	closeIgnored bool               // the engine did not close its half in time after Disconnect
	cancel       context.CancelFunc // ends the dial that is in progress; or nil
	conn         *conn              // from attach until release

	wrote, read int64 // set when the connection is released
}

// NewCall prepares a call; Do sends it.
func (c *Client) NewCall(t *Target) *Call { return &Call{client: c, target: t} }

// Target is the engine, or its rank, to which the call goes.
func (k *Call) Target() *Target { return k.target }

// Fresh makes Do dial: an idle connection may turn out to be stale (see Error.Stale).
func (k *Call) Fresh() *Call {
	k.fresh = true
	return k
}

// Repeat allows Do to send the request a second time if the connection is stale. The request must
// do no harm if the engine acts on it twice.
func (k *Call) Repeat() *Call {
	k.mayRepeat = true
	return k
}

// Guard makes Do call f right before each time that it writes the request. If f fails, Do sends
// nothing and returns the error.
func (k *Call) Guard(f func() error) { k.beforeWrite = f }

// OnWritten makes Do call f once the request is written, after the functions of earlier calls. f
// must not block.
func (k *Call) OnWritten(f func()) {
	if before := k.onSent; before != nil {
		last := f
		f = func() { before(); last() }
	}
	k.onSent = f
}

// Do returns once it has read the head of the response, whatever the status; the caller must Close
// the response. Do does not use body after it returns. Every error is an *Error.
//
// If an idle connection turns out to be stale, Do sends the request once more on a new one, if no
// byte was written or a second sending does no harm: a GET, a HEAD, or a call with Repeat.
func (k *Call) Do(method, path string, hdr []Header, body [][]byte, d Deadlines) (*Response, error) {
	if err := k.check(method, path, hdr); err != nil {
		return nil, &Error{Target: k.target.ID, Phase: PhaseRequest, Err: err}
	}
	r, failure := k.attempt(method, path, hdr, body, d, k.fresh)
	harmless := k.mayRepeat || method == http.MethodGet || method == http.MethodHead
	if failure != nil && failure.Stale() && (harmless || !failure.Sent) {
		r, failure = k.attempt(method, path, hdr, body, d, true)
	}
	if failure != nil { // a nil *Error in an error would not be nil
		return nil, failure
	}
	return r, nil
}

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

func (k *Call) attempt(method, path string, hdr []Header, body [][]byte, d Deadlines, fresh bool) (*Response, *Error) {
	c, err := k.connect(d.Connect, fresh)
	if err != nil {
		return nil, k.newError(PhaseConnect, nil, err)
	}
	if k.beforeWrite != nil {
		if err := k.beforeWrite(); err != nil {
			failure := k.newError(PhaseConnect, nil, err)
			k.release(true) // nothing was written
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
		k.release(false)
		if failure.Stale() { // most likely the engine has restarted
			k.client.idle.closeHost(c.key)
		}
		return nil, failure
	}
	k.resp.open(k, c, method, mayReuse)
	return &k.resp, nil
}

// connect: limit bounds the dial; 0: no bound.
func (k *Call) connect(limit time.Duration, fresh bool) (*conn, error) {
	if k.client.idle.isClosed() {
		return nil, ErrClosed
	}
	if !fresh {
		if c := k.client.idle.take(k.target.key()); c != nil {
			c.attachReader()
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

// release takes the connection away from the call, so that Abort cannot close it while another call
// uses it.
func (k *Call) release(mayReuse bool) {
	k.mu.Lock()
	c := k.conn
	k.conn = nil
	mayReuse = mayReuse && !k.aborted
	if c != nil {
		k.wrote, k.read = c.wrote, c.read
	}
	k.mu.Unlock()
	switch {
	case c == nil:
	case mayReuse && c.br.Buffered() == 0 && c.tlsDrained():
		// Left-over bytes would be read as the next response.
		c.releaseReader()
		k.client.idle.put(c)
	default:
		c.close()
		c.releaseReader()
	}
}

// Bytes returns the bytes sent and received, with heads, without TLS. Only the goroutine that
// called Do may call it, because the counts have no lock.
func (k *Call) Bytes() (sent, received int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn.wrote, k.conn.read
	}
	return k.wrote, k.read
}

// Abort ends the call in any phase; a method that is waiting fails with Error.Aborted. It never
// blocks, and may be called again and from any goroutine.
func (k *Call) Abort() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil {
		k.cancel()
	}
	if k.conn != nil {
		k.conn.close()
		k.conn.notifyLoop() // an event loop that reads the socket must now give it back
	}
}

// Expire ends the waiting read, or else the next one, as if its time were over. It does nothing
// while the call has no connection.
func (k *Call) Expire() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		k.conn.shortenWait(0)
		k.conn.notifyLoop()
	}
}

// Disconnect closes evenkeel's half of the connection, as a client that disconnects. For at most
// limit, the caller can still read, so that an answer on its way is not lost. An engine that
// notices closes its own half, and the stream ends. Without a connection it does the same as Abort.
// It never blocks.
func (k *Call) Disconnect(limit time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aborted = true
	if k.cancel != nil {
		k.cancel()
	}
	if k.conn != nil {
		k.conn.halfClose(limit)
		k.conn.notifyLoop()
	}
}

// newError: after Abort or Disconnect, the error is ErrAborted instead of cause. A timeout after
// Disconnect means that the engine has not closed its half in time. c is nil if there was no
// connection yet.
func (k *Call) newError(phase Phase, c *conn, cause error) *Error {
	failure := &Error{Target: k.target.ID, Phase: phase, Timeout: isTimeout(cause), Err: cause}
	if c != nil {
		failure.Sent, failure.Answered, failure.Reused = c.wrote > 0, c.answered, c.reused
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.aborted {
		// After Abort, too, cause may be a timeout: of a wait that ended right before.
		k.closeIgnored = k.closeIgnored || failure.Timeout && c != nil && c.awaitsClose()
		failure.Aborted, failure.Timeout, failure.Err = true, false, ErrAborted
	}
	return failure
}

// IgnoredClose reports that the engine had not closed its half when the limit of Disconnect was
// over: it may still work on the request.
func (k *Call) IgnoredClose() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.closeIgnored
}
