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
	// inlineWrite is the size in bytes of the largest request that is written without a second
	// goroutine: it fits into the send buffer of an idle socket, so that the write does not block.
	inlineWrite = 16 << 10
	// lastAnswerWait is how long to wait for an answer after a write has failed: the engine may have
	// answered before it stopped reading.
	lastAnswerWait = time.Second
	maxInterim     = 16       // most response heads with status 1xx before the final one
	tlsRecord      = 16 << 10 // bytes of the largest TLS record, and of the buffer bw
)

var (
	past       = time.Unix(1, 0) // as a deadline, it interrupts a read or write at once
	noDeadline time.Time
)

const noSocket = -1

// conn is one connection with the buffers of its exchanges. One call owns it at a time; other
// goroutines may use only raw and the fields under mu.
type conn struct {
	// raw is the TCP connection. Closing it ends any phase at once, even with TLS.
	raw net.Conn
	nc  net.Conn      // raw itself, or TLS over it
	br  *bufio.Reader // nil while the connection is idle, so that it occupies no buffer
	// bw is only for TLS, to make few large records. A plain socket gets one writev.
	bw             *bufio.Writer
	socket         socket.Socket
	hasPlainSocket bool // no TLS, and raw has a socket: reads and writes may go to it directly
	key            key
	readers        *sync.Pool
	reused         bool
	idleSince      time.Time // when the connection was last put into the idle pool

	head        fasthttp.ResponseHeader
	out         []byte // buffer in which a call builds the request head
	parts       [][]byte
	writevParts net.Buffers // copy of parts that writev consumes
	onSent      func()      // called once all parts are written; nil: nothing is called
	wrote       int64       // request bytes of this exchange that the socket has taken
	read        int64
	answered    bool
	readErr     error // kept because fasthttp's header parser hides it

	// detachedFD is the socket while an event loop reads it (see Response.Detach), else noSocket. The
	// call's lock guards it.
	detachedFD int
	wakeLoop   func() // wakes the event loop that reads the socket; nil: no event loop reads it

	mu              sync.Mutex
	readDeadline    time.Time // until when reads may wait; zero: only idleLimit bounds them
	halfClosed      bool
	idleLimit       time.Duration // longest wait of one read of the body; 0: for ever
	appliedDeadline time.Time     // the deadline that the socket has; zero: it must be set again
}

// newConn makes a connection over raw; nc is raw itself, or TLS over it.
func newConn(raw, nc net.Conn, k key, readers *sync.Pool) *conn {
	c := &conn{key: k, readers: readers, detachedFD: noSocket}
	c.setSocket(raw, nc)
	c.attachReader()
	if raw != nc {
		c.bw = bufio.NewWriterSize(c, tlsRecord)
	}
	return c
}

// setSocket sets raw and nc. Both are nil while an event loop reads the socket.
func (c *conn) setSocket(raw, nc net.Conn) {
	c.raw, c.nc = raw, nc
	c.socket = socket.Of(raw)
	c.hasPlainSocket = raw == nc && c.socket.Exists()
}

// newReaders: size in bytes also bounds a response head.
func newReaders(size int) *sync.Pool {
	return &sync.Pool{New: func() any { return bufio.NewReaderSize(nil, size) }}
}

// attachReader borrows a reader: an idle connection has none, so that it occupies no buffer.
func (c *conn) attachReader() {
	c.br, _ = c.readers.Get().(*bufio.Reader)
	c.br.Reset(c)
}

func (c *conn) releaseReader() {
	c.br.Reset(nil)
	c.readers.Put(c.br)
	c.br = nil
}

// exchange returns once it has read the response head, and does not use body after that. mayReuse
// says that the connection may be used again after the body.
func (c *conn) exchange(d Deadlines, head []byte, body [][]byte) (mayReuse bool, phase Phase, err error) {
	c.reset(d, head, body)
	defer clear(c.parts) // an idle connection must not keep a prompt in memory
	writeErr, readErr := c.sendAndReadHead()
	switch {
	case readErr == nil:
		// This counts even if the write failed, but then the connection is not used again.
		c.awaitBody(d.Idle)
		return writeErr == nil && !hasClose(&c.head), PhaseHead, nil
	case c.answered || writeErr == nil:
		return false, PhaseHead, readErr
	// A deadline of evenkeel stopped the write: sendWhileReadingHead sets it in the past once the read
	// has failed, or the time for the answer is over for both. So the error of the read is the cause.
	case errors.Is(writeErr, os.ErrDeadlineExceeded):
		return false, PhaseWrite, readErr
	default:
		return false, PhaseWrite, writeErr
	}
}

// sendAndReadHead writes a large request by a second goroutine during the read: an engine may
// answer it (400, 413) without reading it, and such an answer ends the write.
func (c *conn) sendAndReadHead() (writeErr, readErr error) {
	size := 0
	for _, b := range c.parts {
		size += len(b)
	}
	switch {
	case size > inlineWrite:
		c.limitWrite()
		return c.sendWhileReadingHead()
	case c.hasPlainSocket: // sendPlain sets the deadline itself
		writeErr = c.sendPlain(size)
	default:
		c.limitWrite()
		writeErr = c.send()
	}
	return writeErr, c.readHead() // even after a failed write: the engine may have answered before
}

func (c *conn) sendWhileReadingHead() (writeErr, err error) {
	written := make(chan error, 1)
	go func() { written <- c.send() }()
	err = c.readHead()
	_ = c.raw.SetWriteDeadline(past) // it fails only on a closed socket, where the write ends anyway
	return <-written, err
}

func (c *conn) reset(d Deadlines, head []byte, body [][]byte) {
	c.wrote, c.read, c.answered, c.readErr = 0, 0, false, nil
	c.parts = append(append(c.parts[:0], head), body...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed { // the write will fail
		return
	}
	c.readDeadline, c.idleLimit = noDeadline, 0
	if d.FirstByte > 0 {
		c.readDeadline = time.Now().Add(d.FirstByte)
	}
	c.setDeadlineAtNextRead()
}

// The caller holds mu.
func (c *conn) setDeadlineAtNextRead() { c.appliedDeadline = noDeadline }

// limitWrite must be called before send, not in it: sendWhileReadingHead may end the write by a
// deadline in the past, which limitWrite would overwrite.
func (c *conn) limitWrite() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.halfClosed {
		// It fails only on a closed socket, as the write then does.
		_ = c.raw.SetWriteDeadline(c.readDeadline)
	}
}

// sendPlain writes parts to a socket without TLS. If the socket takes all size bytes at once, Ask
// calls onSent and waits until an answer, an error or the end has come. Otherwise send writes the
// rest.
func (c *conn) sendPlain(size int) error {
	// The read deadline bounds Ask, which also waits for the answer.
	if err := c.armRead(); err != nil {
		return err
	}
	n, err := c.socket.Ask(c.parts, c.onSent)
	c.wrote = int64(n)
	switch {
	case err != nil:
		c.shortenWait(lastAnswerWait) // as in send
		return err
	case n == size: // Ask has called onSent
		return nil
	}
	c.limitWrite() // the socket's buffer is full, so the rest of the write may block
	for i, b := range c.parts {
		taken := min(n, len(b))
		c.parts[i], n = b[taken:], n-taken
	}
	return c.send()
}

// send writes parts and calls onSent. After a failed write an answer, such as a refusal, has come
// already or comes soon, so the wait for it is shortened.
func (c *conn) send() error {
	err := c.write()
	if err != nil {
		c.shortenWait(lastAnswerWait)
	} else if c.onSent != nil {
		c.onSent()
	}
	return err
}

func (c *conn) usesTLS() bool { return c.bw != nil }

func (c *conn) write() error {
	if !c.usesTLS() {
		c.writevParts = c.parts // WriteTo cuts off what it has written, and parts is used again
		n, err := c.writevParts.WriteTo(c.nc)
		c.wrote += n
		return err
	}
	c.bw.Reset(c) // bw writes by c.Write
	for _, b := range c.parts {
		if _, err := c.bw.Write(b); err != nil {
			return err
		}
	}
	return c.bw.Flush()
}

// Write is for the buffer bw. It counts the bytes.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.nc.Write(p)
	c.wrote += int64(n)
	return n, err
}

// Read is for the reader br.
func (c *conn) Read(p []byte) (int, error) {
	if err := c.armRead(); err != nil {
		c.readErr = err
		return 0, err
	}
	n, err := c.receive(p)
	c.read += int64(n)
	c.answered = c.answered || n > 0
	if err != nil {
		c.readErr = err
	}
	return n, err
}

func (c *conn) receive(p []byte) (int, error) {
	if c.hasPlainSocket {
		return c.socket.Read(p)
	}
	return c.nc.Read(p)
}

// armRead sets the deadline of the next read. Within a body it keeps the old one while at least 3/4
// of idleLimit is left: a stream may read hundreds of events in this time, and each new deadline
// costs a lock in the runtime's poller.
func (c *conn) armRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	deadline := c.readDeadline
	if deadline.IsZero() && c.idleLimit > 0 {
		now := time.Now()
		if c.appliedDeadline.Sub(now) >= c.idleLimit/4*3 {
			return nil
		}
		deadline = now.Add(c.idleLimit)
	}
	if !deadline.IsZero() && deadline.Equal(c.appliedDeadline) {
		return nil
	}
	c.appliedDeadline = deadline
	return c.raw.SetReadDeadline(deadline)
}

// shortenWait also ends a read that is waiting already.
func (c *conn) shortenWait(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shortenWaitLocked(d)
}

// The caller holds mu.
func (c *conn) shortenWaitLocked(d time.Duration) {
	by := time.Now().Add(d)
	if c.readDeadline.IsZero() || by.Before(c.readDeadline) {
		c.readDeadline = by
		if c.raw != nil { // nil: an event loop reads the socket, and readDeadline applies after Reattach
			c.appliedDeadline = by
			_ = c.raw.SetReadDeadline(by) // it fails only on a closed socket
		}
	}
}

// halfClose closes evenkeel's half of the connection. What the engine still sends can be read for
// at most limit. Only the first call has an effect: in a second one CloseWrite might fail, which
// would close the whole connection.
func (c *conn) halfClose(limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed {
		return
	}
	c.halfClosed = true
	if c.detachedFD != noSocket { // raw is nil
		c.shutdownDetached(false) // false: only evenkeel's half
	} else if half, ok := c.raw.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		c.close() // one half alone cannot be closed
		return
	}
	c.shortenWaitLocked(limit)
}

func (c *conn) awaitsClose() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.halfClosed
}

// awaitBody makes idle the limit of each read of the body; 0: no limit. After halfClose its time
// stays.
func (c *conn) awaitBody(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed {
		return
	}
	c.readDeadline, c.idleLimit = noDeadline, idle
	c.setDeadlineAtNextRead()
}

// readHead skips up to maxInterim interim heads. It refuses an answer that evenkeel could not use.
func (c *conn) readHead() error {
	for range maxInterim {
		if err := c.head.Read(c.br); err != nil {
			return c.headError(err)
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

// headError does not use fasthttp's messages, because they quote bytes of the answer.
func (c *conn) headError(err error) error {
	var small *fasthttp.ErrSmallBuffer
	switch {
	case c.readErr != nil:
		return cutOff(c.readErr)
	case errors.As(err, &small):
		return fmt.Errorf("%w: response head over %d bytes", ErrTooLarge, c.br.Size())
	default:
		return fmt.Errorf("%w: response head cannot be parsed", ErrMalformed)
	}
}

// checkEncoding refuses a compressed body: evenkeel could not edit its events.
func (c *conn) checkEncoding() error {
	if enc := c.head.ContentEncoding(); len(enc) > 0 && !bytes.EqualFold(enc, []byte("identity")) {
		return fmt.Errorf("%w: body has a Content-Encoding though identity was asked for; turn compression off in front of the engine",
			ErrMalformed)
	}
	return nil
}

// hasClose: fasthttp alone finds only the header value close in lower case, without other words.
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

// hasNoInput reports that nothing has come since the last exchange, not even the end. Without
// access to the socket it returns true.
func (c *conn) hasNoInput() bool {
	if c.br != nil && c.br.Buffered() > 0 {
		return false
	}
	return !c.socket.Exists() || c.socket.Quiet()
}

// tlsDrained reports that TLS has no decrypted bytes left. It tries to read one with a deadline in
// the past, which returns only bytes that are there already.
func (c *conn) tlsDrained() bool {
	if !c.usesTLS() {
		return true
	}
	c.mu.Lock()
	c.setDeadlineAtNextRead() // the next read through conn must replace this deadline
	err := c.raw.SetReadDeadline(past)
	c.mu.Unlock()
	if err != nil {
		return false
	}
	var b [1]byte
	// A byte that it reads is lost, but then the connection is not used again.
	n, err := c.nc.Read(b[:])
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}

// notifyLoop tells the event loop that the call was aborted or its wait was shortened.
func (c *conn) notifyLoop() {
	if c.wakeLoop != nil {
		c.wakeLoop()
	}
}

// close never blocks.
func (c *conn) close() {
	// The event loop closes the descriptor when it sees the end.
	if c.detachedFD != noSocket {
		c.shutdownDetached(true) // true: both halves
		return
	}
	_ = c.raw.Close()
}
