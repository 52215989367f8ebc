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
	writePiece = 64 << 10    // bytes under one write deadline: a large answer to a slow but reading client is not cut
	lingerTime = time.Second // how long a refused client may go on sending before its answer is lost to a reset
)

// Conn is an accepted client connection. It closes Gone as soon as the client
// closes, resets or half-closes it, whether or not anyone reads or writes.
//
// A half close (shutdown(SHUT_WR)) counts as gone, as it does in net/http: a
// client that wants its answer keeps its side open.
type Conn struct {
	net.Conn
	*Disconnect
	sock socket.Socket // the socket of Conn, if Conn has one
	ln   *Listener
	id   uint64 // by which the watcher knows the connection; file descriptors are reused, ids are not
	ip   netip.Addr

	writeBy      atomic.Int64 // write deadline in force, Unix ns; 0 none
	lagged       atomic.Int64 // how long this answer's writes have waited for the client, ns
	callersOwn   atomic.Bool  // a caller set a write deadline of its own: do not renew it
	readTimedOut atomic.Bool  // a read has timed out; later errors may hide that
	linger       atomic.Bool
	idle         atomic.Bool // the connection waits for a request behind an Outlet's answer
	closed       atomic.Bool
	counted      atomic.Bool // the connection was counted as cut
}

// ConnOf returns the connection a request came in on, also below TLS. It is
// false for a request that did not come through a Listener.
func ConnOf(ctx *fasthttp.RequestCtx) (*Conn, bool) {
	w := wireOf(ctx)
	if w == nil || w.client == nil {
		return nil, false
	}
	return w.client, true
}

// timedOut says whether the kernel gave the client up in the middle of an
// answer. The kernel reports that only once: here, or to a Write.
func (c *Conn) timedOut() bool {
	return c.awaited() && errors.Is(pendingError(c.Conn), syscall.ETIMEDOUT)
}

// Read notes the errors that end the connection.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.receive(p)
	c.observe(err)
	return n, err
}

func (c *Conn) receive(p []byte) (int, error) {
	if c.sock.Exists() {
		return c.sock.Read(p)
	}
	return c.Conn.Read(p)
}

// Await waits until there are bytes or an error to Read. It returns at once if the connection has no socket.
func (c *Conn) Await() error {
	if !c.sock.Exists() {
		return nil
	}
	err := c.sock.Await()
	c.observe(err)
	return err
}

// observe takes the error of a read: a timeout is noted, and any other error means that the client has left.
func (c *Conn) observe(err error) {
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded):
		c.readTimedOut.Store(true)
	default:
		c.Leave()
	}
}

// Write gives every 64 KiB a deadline of its own, so that a client that never
// reads is let go and one that reads slowly is not, unless the writes of one
// answer have waited longer for it than MaxLag altogether.
func (c *Conn) Write(p []byte) (n int, err error) {
	for {
		began := time.Now()
		if err := c.renewWriteDeadline(began); err != nil {
			return n, err
		}
		k, err := c.send(p[n:min(len(p), n+writePiece)])
		n += k
		took := time.Since(began)
		if took > blocked {
			c.lagged.Add(int64(took))
		}
		if err != nil {
			c.logCut(err, took)
			c.abandon()
			return n, err
		}
		if n == len(p) {
			return n, nil
		}
	}
}

func (c *Conn) send(p []byte) (int, error) {
	if c.sock.Exists() {
		return c.sock.Write(p)
	}
	return c.Conn.Write(p)
}

// blocked is how long a write takes at least if it waited for the client: a write
// into a buffer with room takes microseconds.
const blocked = time.Millisecond

// lagLeft is how long this answer's writes may still wait.
func (c *Conn) lagLeft() time.Duration {
	if c.ln.opt.MaxLag <= 0 {
		return math.MaxInt64
	}
	return max(0, c.ln.opt.MaxLag-time.Duration(c.lagged.Load()))
}

// renewWriteDeadline moves the deadline only when less than 3/4 of it is left:
// a stream writes hundreds of small events per deadline, and setting one costs
// a lock in the runtime's poller.
func (c *Conn) renewWriteDeadline(now time.Time) error {
	timeout := c.ln.opt.WriteTimeout
	if timeout <= 0 || c.callersOwn.Load() {
		return nil
	}
	timeout = min(timeout, c.lagLeft())
	if left := c.writeBy.Load() - now.UnixNano(); left >= int64(timeout)/4*3 && left <= int64(timeout) {
		return nil
	}
	by := now.Add(timeout)
	c.writeBy.Store(by.UnixNano())
	return c.Conn.SetWriteDeadline(by)
}

// logCut counts a client that was cut because it was too slow: for one write, or, if the write
// was cut before WriteTimeout, for all writes of the answer together.
func (c *Conn) logCut(err error, took time.Duration) {
	switch {
	case errors.Is(err, syscall.ETIMEDOUT): // the kernel gave up: it cannot tell a client that takes nothing from one that is gone
		c.countCut(&c.ln.cutStalled)
	case !errors.Is(err, os.ErrDeadlineExceeded) || c.callersOwn.Load():
	case took < c.ln.opt.WriteTimeout/4*3:
		c.countCut(&c.ln.cutLagging)
	default:
		c.countCut(&c.ln.cutStalled)
	}
}

// countCut counts a client once, because several of its writes may fail, and the watcher may see the failure, too.
func (c *Conn) countCut(reason *atomic.Uint64) {
	if !c.counted.Swap(true) {
		reason.Add(1)
	}
}

// abandon gives up on a client that cannot be written to. The bytes that the kernel
// still holds for the client are dropped, not kept until TCP gives up by itself.
func (c *Conn) abandon() {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // a socket that is already gone has nothing to drop
	}
	c.Leave()
}

// SetDeadline sets both deadlines; Write then does not renew the write deadline.
func (c *Conn) SetDeadline(t time.Time) error {
	c.ownWriteDeadline(t)
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline replaces the deadline renewed per write until it is called
// with the zero time. crypto/tls uses it to bound its closing alert.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.ownWriteDeadline(t)
	return c.Conn.SetWriteDeadline(t)
}

func (c *Conn) ownWriteDeadline(t time.Time) {
	c.callersOwn.Store(!t.IsZero())
	c.writeBy.Store(0)
}

// NetConn returns the socket below, as tls.Conn's method of that name does.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Close closes the connection. A client that was refused in the middle of its
// upload gets lingerTime to stop sending; otherwise the reset would overtake the
// answer that says why.
func (c *Conn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return net.ErrClosed
	}
	if c.linger.Load() {
		c.drainInput()
	}
	err := c.Conn.Close()
	c.Leave()
	c.ln.forget(c)
	return err
}

func (c *Conn) drainInput() {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || c.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.Copy(io.Discard, c.Conn) // the copy ends at the deadline at the latest; an error changes nothing
}

// cut closes the socket while another goroutine may use it. The owner of the connection still calls Close.
func (c *Conn) cut() {
	_ = c.Conn.Close() // an error means that it was closed before
	c.Leave()
}
