package edge

import (
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/internal/socket"
)

const (
	// writePieceSize is how many bytes get one write deadline. A slow client that reads this much within the deadline is not cut.
	writePieceSize = 64 << 10
	lingerTime     = time.Second // how long a refused client may go on sending before its connection is closed
)

// Conn is an accepted client connection. It closes the channel Gone as soon as the client closes, resets or half-closes the connection,
// even while no goroutine reads or writes the connection.
//
// A half close (shutdown(SHUT_WR)) counts as leaving, as in net/http, because a client that waits for its answer keeps its side open.
type Conn struct {
	net.Conn
	*CloseNotifier
	socket socket.Socket // the socket of the embedded Conn, if it has one (Exists)
	ln     *Listener
	id     uint64 // names the connection for the watcher; unlike a file descriptor, an id is never reused
	ip     netip.Addr

	writeDeadline      atomic.Int64 // current write deadline, Unix ns; 0: none
	writeWaitNanos     atomic.Int64 // how long the writes of the current answer have waited for the client, ns
	fixedWriteDeadline atomic.Bool  // a caller has set the write deadline, so Write does not renew it
	readTimedOut       atomic.Bool  // a read has timed out, even if a later read failed with another error
	linger             atomic.Bool  // the client was refused and may still be sending, so Close reads on for lingerTime
	waitsForRequest    atomic.Bool  // a Hijacked (see Hijack) has written an answer, and the next request has not begun
	closed             atomic.Bool
	cutCounted         atomic.Bool // the connection is counted in CutStalled or CutLagging
}

// ConnOf returns the client connection of a request, even if TLS is above it; false: the request did not come through a Listener.
func ConnOf(ctx *fasthttp.RequestCtx) (*Conn, bool) {
	h := headConnOf(ctx)
	if h == nil || h.client == nil {
		return nil, false
	}
	return h.client, true
}

// kernelTimedOut says whether the kernel gave up the client in the middle of an answer, because the client acknowledged nothing. A callback
// of OnGone is set only while an answer is made. The kernel reports this error only once: either to this call, or to a Write. Without a
// callback, kernelTimedOut therefore does not ask, and leaves the error to a Write.
func (c *Conn) kernelTimedOut() bool {
	return c.hasPendingCallback() && errors.Is(pendingError(c.Conn), syscall.ETIMEDOUT)
}

// Read reads from the client. An error other than a timeout marks the client as gone.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.receive(p)
	c.recordReadError(err)
	return n, err
}

// receive reads from the socket, or from the embedded Conn if it has no socket.
func (c *Conn) receive(p []byte) (int, error) {
	if c.socket.Exists() {
		return c.socket.Read(p)
	}
	return c.Conn.Read(p)
}

// Await waits until Read would return bytes or an error. It returns at once if the connection has no socket; the next Read then waits.
func (c *Conn) Await() error {
	if !c.socket.Exists() {
		return nil
	}
	err := c.socket.Await()
	c.recordReadError(err)
	return err
}

// recordReadError records the error of a read; nil changes nothing. Any error but a timeout means that the client has left,
// so Gone is closed.
func (c *Conn) recordReadError(err error) {
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded): // the client is slow, but still there
		c.readTimedOut.Store(true)
	default:
		c.MarkGone()
	}
}

// Write sends p in pieces of 64 KiB, each with a deadline of its own. A client that reads nothing is cut, but a slow client is cut only
// when the writes of one answer have waited longer than MaxLag in total.
func (c *Conn) Write(p []byte) (n int, err error) {
	for {
		began := time.Now()
		if err := c.renewWriteDeadline(began); err != nil {
			return n, err
		}
		sent, err := c.send(p[n:min(len(p), n+writePieceSize)])
		n += sent
		took := time.Since(began)
		if took > minCountedWait { // a shorter write only filled the socket's buffer, and did not wait for the client
			c.writeWaitNanos.Add(int64(took))
		}
		if err != nil { // the client got only a part of p, so nothing may follow
			c.countSlowClient(err, took)
			c.dropClient()
			return n, err
		}
		if n == len(p) {
			return n, nil
		}
	}
}

// send writes to the socket, or to the embedded Conn if it has no socket.
func (c *Conn) send(p []byte) (int, error) {
	if c.socket.Exists() {
		return c.socket.Write(p)
	}
	return c.Conn.Write(p)
}

// minCountedWait is how long a write must take to count as one that waited for the client. A write into a buffer with room takes
// microseconds.
const minCountedWait = time.Millisecond

// writeWaitLeft returns how long the writes of the current answer may still wait for the client, before MaxLag is reached.
func (c *Conn) writeWaitLeft() time.Duration {
	if c.ln.options.MaxLag <= 0 { // there is no limit
		return math.MaxInt64
	}
	return max(0, c.ln.options.MaxLag-time.Duration(c.writeWaitNanos.Load()))
}

// renewWriteDeadline sets the write deadline to WriteTimeout from now, or to less if writeWaitLeft is less. It keeps the old deadline if
// that is still at least 3/4 of this time away, but not more than all of it. A stream may write hundreds of events in that time, and each
// new deadline costs a lock in the runtime's poller.
func (c *Conn) renewWriteDeadline(now time.Time) error {
	timeout := c.ln.options.WriteTimeout
	if timeout <= 0 || c.fixedWriteDeadline.Load() { // writes may wait for ever, or a caller has set the deadline
		return nil
	}
	timeout = min(timeout, c.writeWaitLeft())
	remaining := c.writeDeadline.Load() - now.UnixNano()
	// More than timeout remains only if writeWaitLeft has fallen since the deadline was set.
	farEnough, tooFar := remaining >= int64(timeout)/4*3, remaining > int64(timeout)
	if farEnough && !tooFar {
		return nil
	}
	deadline := now.Add(timeout)
	c.writeDeadline.Store(deadline.UnixNano())
	return c.Conn.SetWriteDeadline(deadline)
}

// countSlowClient counts a client if a write to it failed because the client is too slow. Either this write waited for WriteTimeout
// (cutStalled), or all writes of the answer together waited for MaxLag (cutLagging). took is how long the failed write waited. WriteTimeout
// gives each write at least 3/4 of its time. So a write that timed out earlier was ended by what was left of MaxLag.
func (c *Conn) countSlowClient(err error, took time.Duration) {
	leastForTimeout := c.ln.options.WriteTimeout / 4 * 3 // renewWriteDeadline keeps an old deadline only if it is at least so far away
	switch {
	case errors.Is(err, syscall.ETIMEDOUT): // the kernel gave up: the client reads nothing, or is gone
		c.countOnce(&c.ln.cutStalled)
	case !errors.Is(err, os.ErrDeadlineExceeded): // the write failed for another reason
	case c.fixedWriteDeadline.Load(): // other code, such as crypto/tls, has set a deadline of its own, which is not for slow clients
	case took < leastForTimeout:
		c.countOnce(&c.ln.cutLagging)
	default:
		c.countOnce(&c.ln.cutStalled)
	}
}

// countOnce adds a client that was cut to the count reason, but only once, because several writes may fail, and the watcher
// may report the same failure.
func (c *Conn) countOnce(reason *atomic.Uint64) {
	if !c.cutCounted.Swap(true) {
		reason.Add(1)
	}
}

// dropClient gives up a client and closes Gone. When the socket is closed, the kernel drops the bytes that it has not sent,
// and resets the connection.
func (c *Conn) dropClient() {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // an error means that the socket is closed already
	}
	c.MarkGone()
}

// SetDeadline sets the deadlines of reads and writes. Afterwards Write does not renew the write deadline.
func (c *Conn) SetDeadline(t time.Time) error {
	c.fixWriteDeadline(t)
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline sets a fixed write deadline. The zero time makes Write renew deadlines again. crypto/tls uses this method to bound
// the write of its closing alert.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.fixWriteDeadline(t)
	return c.Conn.SetWriteDeadline(t)
}

// fixWriteDeadline records that a caller has set the write deadline to t, so that Write does not renew it. The zero time
// makes Write renew it again.
func (c *Conn) fixWriteDeadline(t time.Time) {
	c.fixedWriteDeadline.Store(!t.IsZero())
	c.writeDeadline.Store(0)
}

// NetConn returns the embedded Conn. tls.Conn has a method of this name, too.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Close closes the connection and marks the client as gone. A client that was refused in the middle of its upload gets lingerTime to stop
// sending, because otherwise the reset would destroy the answer before the client reads it.
func (c *Conn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return net.ErrClosed
	}
	if c.linger.Load() {
		c.drainInput()
	}
	err := c.Conn.Close()
	c.MarkGone()
	c.ln.unregister(c)
	return err
}

// drainInput half-closes the connection, which tells the client that the answer has ended. It then drops what the client still sends, until
// the client stops or lingerTime is over.
func (c *Conn) drainInput() {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil { // it cannot be half-closed, or is closed already
		return
	}
	if c.SetReadDeadline(time.Now().Add(lingerTime)) != nil { // without a deadline, the copy could wait for ever
		return
	}
	_, _ = io.Copy(io.Discard, c.Conn) // the copy ends at the deadline at the latest; an error changes nothing
}

// reset cuts an answer off, so that the client sees an error: it makes the kernel drop the bytes that it has not sent, and closes the
// socket and Gone. As after closeSocket, the owner of the connection must still call Close.
func (c *Conn) reset() {
	c.dropClient()
	c.closeSocket()
}

// closeSocket closes the socket and Gone while another goroutine may use the connection, whose reads and writes then fail. The owner of the
// connection must still call Close.
func (c *Conn) closeSocket() {
	_ = c.Conn.Close() // an error means that it was closed before
	c.MarkGone()
}
