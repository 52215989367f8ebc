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
	// writePieceSize is in bytes. A slow client that reads this much within one write deadline is not
	// cut.
	writePieceSize = 64 << 10
	lingerTime     = time.Second // for a refused client to go on sending
)

// Conn is an accepted client connection. It closes Gone as soon as the client closes, resets or
// half-closes the connection, even while no goroutine reads or writes it.
//
// A half close (shutdown(SHUT_WR)) counts as leaving, as in net/http, because a client that waits
// for its answer keeps its side open.
type Conn struct {
	net.Conn
	*CloseNotifier
	socket socket.Socket // the socket of the embedded Conn, if it has one (Exists)
	ln     *Listener
	id     uint64 // for the watcher; unlike a file descriptor, an id is never reused
	ip     netip.Addr

	writeDeadline      atomic.Int64 // current write deadline, Unix ns; 0: none
	writeWaitNanos     atomic.Int64 // for the client, in the current answer, ns
	fixedWriteDeadline atomic.Bool  // a caller has set the write deadline, so Write does not renew it
	readTimedOut       atomic.Bool  // even if a later read failed with another error
	linger             atomic.Bool  // the refused client may still be sending, so Close reads on
	waitsForRequest    atomic.Bool  // after the answer of a Hijacked
	closed             atomic.Bool
	cutCounted         atomic.Bool // the connection is counted in CutStalled or CutLagging
}

// ConnOf finds the client connection also below TLS; false: it did not come through a Listener.
func ConnOf(ctx *fasthttp.RequestCtx) (*Conn, bool) {
	h := headConnOf(ctx)
	if h == nil || h.client == nil {
		return nil, false
	}
	return h.client, true
}

// kernelTimedOut says whether the kernel gave up the client in the middle of an answer, because it
// acknowledged nothing. The kernel reports this only once: without a callback, which is set only
// while an answer is made, it is left to a Write.
func (c *Conn) kernelTimedOut() bool {
	return c.hasPendingCallback() && errors.Is(pendingError(c.Conn), syscall.ETIMEDOUT)
}

// Read marks the client as gone after an error other than a timeout.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.receive(p)
	c.recordReadError(err)
	return n, err
}

func (c *Conn) receive(p []byte) (int, error) {
	if c.socket.Exists() {
		return c.socket.Read(p)
	}
	return c.Conn.Read(p)
}

// Await waits until Read would return bytes or an error, or not at all without a socket.
func (c *Conn) Await() error {
	if !c.socket.Exists() {
		return nil
	}
	err := c.socket.Await()
	c.recordReadError(err)
	return err
}

func (c *Conn) recordReadError(err error) {
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded): // slow, but still there
		c.readTimedOut.Store(true)
	default:
		c.MarkGone()
	}
}

// Write sends pieces of 64 KiB, each with a deadline of its own. A client that reads nothing is
// cut, a slow one only when the writes of one answer have waited longer than MaxLag in total.
func (c *Conn) Write(p []byte) (n int, err error) {
	for {
		began := time.Now()
		if err := c.renewWriteDeadline(began); err != nil {
			return n, err
		}
		sent, err := c.send(p[n:min(len(p), n+writePieceSize)])
		n += sent
		took := time.Since(began)
		if took > minCountedWait { // else it only filled the socket's buffer
			c.writeWaitNanos.Add(int64(took))
		}
		if err != nil { // nothing may follow a part of p
			c.countSlowClient(err, took)
			c.dropClient()
			return n, err
		}
		if n == len(p) {
			return n, nil
		}
	}
}

func (c *Conn) send(p []byte) (int, error) {
	if c.socket.Exists() {
		return c.socket.Write(p)
	}
	return c.Conn.Write(p)
}

// A write into a buffer with room takes microseconds.
const minCountedWait = time.Millisecond

// writeWaitLeft is how long the writes of this answer may still wait before MaxLag.
func (c *Conn) writeWaitLeft() time.Duration {
	if c.ln.options.MaxLag <= 0 {
		return math.MaxInt64
	}
	return max(0, c.ln.options.MaxLag-time.Duration(c.writeWaitNanos.Load()))
}

// renewWriteDeadline keeps the old deadline if at least 3/4 of the time remain: a stream may write
// hundreds of events in that time, and each new deadline costs a lock in the runtime's poller.
func (c *Conn) renewWriteDeadline(now time.Time) error {
	timeout := c.ln.options.WriteTimeout
	if timeout <= 0 || c.fixedWriteDeadline.Load() { // for ever, or set by a caller
		return nil
	}
	timeout = min(timeout, c.writeWaitLeft())
	remaining := c.writeDeadline.Load() - now.UnixNano()
	// More remains only if writeWaitLeft has fallen since.
	farEnough, tooFar := remaining >= int64(timeout)/4*3, remaining > int64(timeout)
	if farEnough && !tooFar {
		return nil
	}
	deadline := now.Add(timeout)
	c.writeDeadline.Store(deadline.UnixNano())
	return c.Conn.SetWriteDeadline(deadline)
}

// Either this write waited for WriteTimeout (cutStalled), or all writes of the answer for MaxLag
// (cutLagging). took is how long the failed write waited. WriteTimeout gives a write at least 3/4
// of its time, so one that timed out earlier was ended by MaxLag.
func (c *Conn) countSlowClient(err error, took time.Duration) {
	leastForTimeout := c.ln.options.WriteTimeout / 4 * 3
	switch {
	case errors.Is(err, syscall.ETIMEDOUT): // by the kernel: the client reads nothing, or is gone
		c.countOnce(&c.ln.cutStalled)
	case !errors.Is(err, os.ErrDeadlineExceeded):
	case c.fixedWriteDeadline.Load():
		// Other code, such as crypto/tls, has set a deadline, which is not for slow clients.
	case took < leastForTimeout:
		c.countOnce(&c.ln.cutLagging)
	default:
		c.countOnce(&c.ln.cutStalled)
	}
}

// Several writes may fail, and the watcher may report the same failure.
func (c *Conn) countOnce(reason *atomic.Uint64) {
	if !c.cutCounted.Swap(true) {
		reason.Add(1)
	}
}

// dropClient closes Gone. When the socket is closed, the kernel drops the bytes that it has not
// sent, and resets the connection.
func (c *Conn) dropClient() {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // fails only if closed already
	}
	c.MarkGone()
}

// SetDeadline also keeps Write from renewing the write deadline.
func (c *Conn) SetDeadline(t time.Time) error {
	c.fixWriteDeadline(t)
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline keeps Write from renewing deadlines, until the zero time is set. crypto/tls
// bounds its closing alert with it.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.fixWriteDeadline(t)
	return c.Conn.SetWriteDeadline(t)
}

func (c *Conn) fixWriteDeadline(t time.Time) {
	c.fixedWriteDeadline.Store(!t.IsZero())
	c.writeDeadline.Store(0)
}

// NetConn is like tls.Conn's method.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Close gives a client that was refused in the middle of its upload lingerTime to stop sending,
// because otherwise the reset would destroy the answer before the client reads it.
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

// drainInput half-closes the connection, which ends the answer, and drops what the client still
// sends.
func (c *Conn) drainInput() {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil { // cannot be half-closed, or is closed already
		return
	}
	if c.SetReadDeadline(time.Now().Add(lingerTime)) != nil { // then the copy could wait for ever
		return
	}
	_, _ = io.Copy(io.Discard, c.Conn)
}

// reset cuts an answer off, so that the client sees an error. The owner of the connection must
// still call Close.
func (c *Conn) reset() {
	c.dropClient()
	c.closeSocket()
}

// closeSocket is for another goroutine than the owner's, which must still call Close. Reads and
// writes then fail.
func (c *Conn) closeSocket() {
	_ = c.Conn.Close() // fails only if closed before
	c.MarkGone()
}
