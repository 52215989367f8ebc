package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/internal/socket"
)

const (
	// inlineWrite is the largest request written without a goroutine to listen
	// meanwhile: an idle socket's send buffer takes it without blocking.
	inlineWrite = 16 << 10
	// parting is how long an answer may take that was sent before the engine
	// stopped reading: it has arrived by then, or was lost with the connection.
	parting    = time.Second
	maxInterim = 16 // 1xx heads before the real one
	tlsRecord  = 16 << 10
)

var (
	past       = time.Unix(1, 0) // a deadline that interrupts at once
	noDeadline time.Time
)

const noSocket = -1

// conn is one connection and what an exchange on it needs, kept for the next.
// One call owns it at a time; only raw may be touched by another goroutine.
type conn struct {
	raw    net.Conn      // the socket: closing it ends any phase at once, TLS or not
	nc     net.Conn      // raw, or TLS over it
	br     *bufio.Reader // nil while parked: an idle connection holds no buffer
	bw     *bufio.Writer // TLS only: few large records; a plain socket gets one writev
	sock   socket.Socket // of raw; its zero value if it has none
	plain  bool          // the socket carries no TLS
	key    key
	spare  *sync.Pool // of readers, shared by the client's connections
	reused bool
	idleAt time.Time // when it came back to the pool

	head   fasthttp.ResponseHeader
	out    []byte      // request head
	vec    [][]byte    // request head and body
	queue  net.Buffers // vec while writev eats it
	onSent func()      // called once vec is written; nil: by nobody
	wrote  int64       // request bytes the socket took
	read   int64       // response bytes
	got    bool        // a response byte came
	failed error       // last read error: fasthttp's header parser hides it

	fd      int    // of the socket while an event loop reads it, else noSocket; the call's lock guards it
	touched func() // is called then when the call is touched

	mu   sync.Mutex
	by   time.Time     // reads end by then while the head is awaited
	last bool          // we have left: by is for all that is still read
	idle time.Duration // then each read may wait this long
	set  time.Time     // the deadline that the socket has; zero: it is to have another
}

func newConn(raw, nc net.Conn, k key, spare *sync.Pool) *conn {
	c := &conn{key: k, spare: spare, fd: noSocket}
	c.over(raw, nc)
	c.wake()
	if raw != nc {
		c.bw = bufio.NewWriterSize(c, tlsRecord)
	}
	return c
}

// over makes c a connection over raw, or over TLS on it.
func (c *conn) over(raw, nc net.Conn) {
	c.raw, c.nc = raw, nc
	c.sock = socket.Of(raw)
	c.plain = raw == nc && c.sock.Exists()
}

// newReaders returns a pool of readers of a size in bytes.
func newReaders(size int) *sync.Pool {
	return &sync.Pool{New: func() any { return bufio.NewReaderSize(nil, size) }}
}

// wake gives the connection a reader, park takes it back between two calls.
func (c *conn) wake() {
	c.br, _ = c.spare.Get().(*bufio.Reader)
	c.br.Reset(c)
}

func (c *conn) park() {
	c.br.Reset(nil)
	c.spare.Put(c.br)
	c.br = nil
}

// exchange writes the request and returns once the response head is read. On
// failure it says in which phase. A large body is written by a second goroutine
// so that an engine that answers without reading it (400, 413) is heard; the
// answer then ends the write. The caller's body is not touched after exchange.
func (c *conn) exchange(d Deadlines, head []byte, body [][]byte) (keep bool, phase Phase, err error) {
	c.reset(d, head, body)
	defer clear(c.vec) // a pooled connection must not hold on to a prompt
	size := 0
	for _, b := range c.vec {
		size += len(b)
	}
	var unsent error
	switch {
	case size > inlineWrite:
		c.limitWrite()
		unsent, err = c.sendListening()
	case c.plain:
		unsent = c.ask(size)
		err = c.readHead()
	default:
		c.limitWrite()
		unsent = c.send()
		err = c.readHead()
	}
	switch {
	case err == nil:
		c.awaitBody(d.Idle)
		return unsent == nil && !hasClose(&c.head), PhaseHead, nil
	case c.got || unsent == nil:
		return false, PhaseHead, err
	case errors.Is(unsent, os.ErrDeadlineExceeded): // stopped by us: the read knows why
		return false, PhaseWrite, err
	default:
		return false, PhaseWrite, unsent
	}
}

// sendListening reads the head while a second goroutine writes.
func (c *conn) sendListening() (unsent, err error) {
	sent := make(chan error, 1)
	go func() { sent <- c.send() }()
	err = c.readHead()
	_ = c.raw.SetWriteDeadline(past) // fails only on a closed socket, where the write ends anyway
	return <-sent, err
}

// reset forgets the last exchange.
func (c *conn) reset(d Deadlines, head []byte, body [][]byte) {
	c.wrote, c.read, c.got, c.failed = 0, 0, false, nil
	c.vec = append(append(c.vec[:0], head), body...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last {
		return // the write fails
	}
	c.by, c.idle, c.set = time.Time{}, 0, time.Time{}
	if d.FirstByte > 0 {
		c.by = time.Now().Add(d.FirstByte)
	}
}

// limitWrite has the request written by the time that its answer is due. send does not call
// it: beside sendListening, which stops a send by a deadline in the past, it would undo that.
func (c *conn) limitWrite() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.last {
		_ = c.raw.SetWriteDeadline(c.by) // fails only on a closed socket, and so will the write
	}
}

// ask is send on a plain socket. It returns when there is something to read, or nothing will come.
func (c *conn) ask(size int) error {
	if err := c.armRead(); err != nil {
		return err
	}
	n, err := c.sock.Ask(c.vec, c.onSent)
	c.wrote = int64(n)
	switch {
	case err != nil:
		c.hurry(parting)
		return err
	case n == size:
		return nil
	}
	c.limitWrite() // the engine has not read what was sent before
	for i, b := range c.vec {
		k := min(n, len(b))
		c.vec[i], n = b[k:], n-k
	}
	return c.send()
}

// send writes all of vec. When it fails, the answer that may have been the
// reason is not waited for much longer.
func (c *conn) send() error {
	err := c.write()
	if err != nil {
		c.hurry(parting)
	} else if c.onSent != nil {
		c.onSent()
	}
	return err
}

// write is one writev on a plain socket, whole records in TLS.
func (c *conn) write() error {
	if c.bw == nil {
		c.queue = c.vec
		n, err := c.queue.WriteTo(c.nc)
		c.wrote += n
		return err
	}
	c.bw.Reset(c)
	for _, b := range c.vec {
		if _, err := c.bw.Write(b); err != nil {
			return err
		}
	}
	return c.bw.Flush()
}

// Write counts what TLS took.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.nc.Write(p)
	c.wrote += int64(n)
	return n, err
}

// Read sets the deadline of the read that is about to block, then reads.
func (c *conn) Read(p []byte) (int, error) {
	if err := c.armRead(); err != nil {
		c.failed = err
		return 0, err
	}
	n, err := c.receive(p)
	c.read += int64(n)
	c.got = c.got || n > 0
	if err != nil {
		c.failed = err
	}
	return n, err
}

func (c *conn) receive(p []byte) (int, error) {
	if c.plain {
		return c.sock.Read(p)
	}
	return c.nc.Read(p)
}

// armRead sets the deadline of the next read. That between two reads is moved
// only when less than 3/4 of it is left: a stream reads hundreds of small events
// in that time, and setting one costs a lock in the runtime's poller.
func (c *conn) armRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.by
	if by.IsZero() && c.idle > 0 {
		now := time.Now()
		if c.set.Sub(now) >= c.idle/4*3 {
			return nil
		}
		by = now.Add(c.idle)
	}
	if !by.IsZero() && by.Equal(c.set) {
		return nil
	}
	c.set = by
	return c.raw.SetReadDeadline(by)
}

// hurry shortens the wait for a response head, also one that has begun.
func (c *conn) hurry(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hurryLocked(d)
}

// hurryLocked needs mu.
func (c *conn) hurryLocked(d time.Duration) {
	by := time.Now().Add(d)
	if c.by.IsZero() || by.Before(c.by) {
		c.by, c.set = by, by
		if c.raw != nil { // else it is lifted, and by holds once it is not any more
			_ = c.raw.SetReadDeadline(by) // fails only on a closed socket, where the read ends anyway
		}
	}
}

// leave closes our half of the connection; what still comes is read for at most
// limit. It is never used again. Only the first leave does anything: the engine may
// have closed its side since, and then the half could not be closed once more.
func (c *conn) leave(limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last {
		return
	}
	c.last = true
	if c.fd != noSocket {
		c.shutdown(false)
	} else if half, ok := c.raw.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		c.close()
		return
	}
	c.hurryLocked(limit)
}

// awaitBody goes from the head's deadline to that between reads.
func (c *conn) awaitBody(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last {
		return
	}
	c.by, c.idle, c.set = time.Time{}, idle, time.Time{}
}

// readHead reads the final response head and skips interim ones.
func (c *conn) readHead() error {
	for range maxInterim {
		if err := c.head.Read(c.br); err != nil {
			return c.explain(err)
		}
		switch code := c.head.StatusCode(); {
		case code == http.StatusSwitchingProtocols:
			return fmt.Errorf("%w: it switches protocols unasked", ErrMalformed)
		case code < 100:
			return fmt.Errorf("%w: status %d", ErrMalformed, code)
		case code >= 200:
			return c.checkEncoding()
		}
	}
	return fmt.Errorf("%w: %d interim responses and no final one", ErrMalformed, maxInterim)
}

// explain finds the cause of a failed head, which fasthttp hides behind texts
// that quote the wire.
func (c *conn) explain(err error) error {
	var small *fasthttp.ErrSmallBuffer
	switch {
	case c.failed != nil:
		return cutOff(c.failed)
	case errors.As(err, &small):
		return fmt.Errorf("%w: response head over %d bytes", ErrTooLarge, c.br.Size())
	default:
		return fmt.Errorf("%w: response head cannot be parsed", ErrMalformed)
	}
}

// checkEncoding refuses a compressed body: we asked for none and edit events.
func (c *conn) checkEncoding() error {
	if enc := c.head.ContentEncoding(); len(enc) > 0 && !bytes.EqualFold(enc, []byte("identity")) {
		return fmt.Errorf("%w: body has a Content-Encoding though identity was asked for; turn compression off in front of the engine",
			ErrMalformed)
	}
	return nil
}

// hasClose reports whether the engine announced that it will close. fasthttp
// knows the word only alone and in lower case.
func hasClose(h *fasthttp.ResponseHeader) bool {
	if h.ConnectionClose() {
		return true
	}
	for token := range bytes.SplitSeq(h.Peek("Connection"), []byte(",")) {
		if bytes.EqualFold(bytes.TrimSpace(token), []byte("close")) {
			return true
		}
	}
	return false
}

// quiet reports that nothing has come, neither bytes nor the end, since the
// last exchange was complete.
func (c *conn) quiet() bool {
	return (c.br == nil || c.br.Buffered() == 0) && (!c.sock.Exists() || c.sock.Quiet())
}

// drained reports that TLS holds no decrypted byte back that bufio had no room for.
func (c *conn) drained() bool {
	if c.bw == nil {
		return true
	}
	c.mu.Lock()
	c.set = noDeadline
	err := c.raw.SetReadDeadline(past)
	c.mu.Unlock()
	if err != nil {
		return false
	}
	var b [1]byte
	n, err := c.nc.Read(b[:])
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}

// touch tells an event loop that reads the socket that something has changed.
func (c *conn) touch() {
	if c.touched != nil {
		c.touched()
	}
}

// close ends the connection without a word: it never blocks.
func (c *conn) close() {
	if c.fd != noSocket {
		c.shutdown(true)
		return
	}
	_ = c.raw.Close()
}
