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
	// inlineWrite is the largest request that is written without a second goroutine, in bytes: the send buffer of an
	// idle socket takes it without blocking.
	inlineWrite = 16 << 10
	// lastAnswerWait is how long to wait for an answer that the engine sent before it stopped reading: by then it has
	// arrived, or was lost with the connection.
	lastAnswerWait = time.Second
	maxInterim     = 16 // 1xx heads before the real one
	tlsRecord      = 16 << 10
)

var (
	past       = time.Unix(1, 0) // a deadline in the past, which interrupts at once
	noDeadline time.Time
)

const noSocket = -1

// conn is one connection, with the memory that an exchange on it needs, kept for the next exchange. One call owns it
// at a time; other goroutines may touch only raw.
type conn struct {
	raw     net.Conn      // the socket: closing it ends any phase at once, with TLS or without
	nc      net.Conn      // raw, or TLS over it
	br      *bufio.Reader // nil while parked: an idle connection holds no buffer
	bw      *bufio.Writer // only with TLS, which then gets few large records; a plain socket gets one writev
	sock    socket.Socket // the socket of raw; its zero value if raw has none
	plain   bool          // the connection has no TLS
	key     key
	readers *sync.Pool // of readers, shared by the client's connections
	reused  bool
	idleAt  time.Time // when it was put into the pool

	head     fasthttp.ResponseHeader
	out      []byte      // request head
	parts    [][]byte    // request head and body
	queue    net.Buffers // parts, while writev consumes it
	onSent   func()      // called once parts are written; nil: none
	wrote    int64       // request bytes that the socket has taken
	read     int64       // response bytes
	answered bool        // a response byte came
	readErr  error       // the last read error, which fasthttp's header parser hides

	fd      int    // the socket while an event loop reads it, else noSocket; the call's lock guards it
	touched func() // called when the call is touched while an event loop reads the socket

	mu          sync.Mutex
	readBy      time.Time     // the time until which reads may wait, such as those for the response head; zero: only idle bounds them
	leaving     bool          // leave was called: the field readBy bounds all that is still read
	idle        time.Duration // after the head, how long each read may wait
	deadlineSet time.Time     // the deadline that the socket has; zero: it must be set again
}

// newConn returns a connection over raw; nc is raw itself, or TLS over it. k says which calls may use the connection,
// and spare is the pool that lends it a reader.
func newConn(raw, nc net.Conn, k key, spare *sync.Pool) *conn {
	c := &conn{key: k, readers: spare, fd: noSocket}
	c.setSocket(raw, nc)
	c.wake()
	if raw != nc {
		c.bw = bufio.NewWriterSize(c, tlsRecord)
	}
	return c
}

// setSocket makes c a connection over raw; nc is raw itself, or TLS over it.
func (c *conn) setSocket(raw, nc net.Conn) {
	c.raw, c.nc = raw, nc
	c.sock = socket.Of(raw)
	c.plain = raw == nc && c.sock.Exists()
}

// newReaders returns a pool of readers of a size in bytes.
func newReaders(size int) *sync.Pool {
	return &sync.Pool{New: func() any { return bufio.NewReaderSize(nil, size) }}
}

// wake gives the connection a reader, before a call.
func (c *conn) wake() {
	c.br, _ = c.readers.Get().(*bufio.Reader)
	c.br.Reset(c)
}

// park takes the reader back after the call.
func (c *conn) park() {
	c.br.Reset(nil)
	c.readers.Put(c.br)
	c.br = nil
}

// exchange writes the request and returns once the response head is read. keep says that the connection may be used
// again after the body. After a failure, phase says how far the exchange had come. A large body is written by a second
// goroutine, so that the answer of an engine that does not read the body (400, 413) is read; that answer then ends the
// write. The caller's body is not used after exchange.
func (c *conn) exchange(d Deadlines, head []byte, body [][]byte) (keep bool, phase Phase, err error) {
	c.reset(d, head, body)
	defer clear(c.parts) // a pooled connection must not hold on to a prompt
	size := 0
	for _, b := range c.parts {
		size += len(b)
	}
	var writeErr error
	switch {
	case size > inlineWrite:
		c.limitWrite()
		writeErr, err = c.sendListening()
	case c.plain:
		writeErr = c.sendPlain(size)
		err = c.readHead()
	default:
		c.limitWrite()
		writeErr = c.send()
		err = c.readHead()
	}
	switch {
	case err == nil:
		c.awaitBody(d.Idle)
		return writeErr == nil && !hasClose(&c.head), PhaseHead, nil
	case c.answered || writeErr == nil:
		return false, PhaseHead, err
	case errors.Is(writeErr, os.ErrDeadlineExceeded): // our deadline stopped the write: the read has the cause
		return false, PhaseWrite, err
	default:
		return false, PhaseWrite, writeErr
	}
}

// sendListening reads the response head while a second goroutine writes the request. Once the head has come, or cannot
// come any more, the write is ended. writeErr is the error of the write, err that of the read.
func (c *conn) sendListening() (writeErr, err error) {
	written := make(chan error, 1)
	go func() { written <- c.send() }()
	err = c.readHead()
	_ = c.raw.SetWriteDeadline(past) // fails only on a closed socket, where the write ends anyway
	return <-written, err
}

// reset forgets the exchange before.
func (c *conn) reset(d Deadlines, head []byte, body [][]byte) {
	c.wrote, c.read, c.answered, c.readErr = 0, 0, false, nil
	c.parts = append(append(c.parts[:0], head), body...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving {
		return // leave has closed our half, so the write will fail
	}
	c.readBy, c.idle, c.deadlineSet = time.Time{}, 0, time.Time{}
	if d.FirstByte > 0 {
		c.readBy = time.Now().Add(d.FirstByte)
	}
}

// limitWrite sets the write deadline to the time by which the answer must come. send does not call it, because
// sendListening stops send by a write deadline in the past, which would be undone.
func (c *conn) limitWrite() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.leaving {
		_ = c.raw.SetWriteDeadline(c.readBy) // fails only on a closed socket, and so will the write
	}
}

// sendPlain does on a plain socket what send does. If the socket takes all of the request at once, sendPlain also waits until there is
// something to read, or until nothing will come. size is the length of parts in bytes.
func (c *conn) sendPlain(size int) error {
	if err := c.armRead(); err != nil { // Ask waits for the answer, too
		return err
	}
	n, err := c.sock.Ask(c.parts, c.onSent)
	c.wrote = int64(n)
	switch {
	case err != nil:
		c.shortenWait(lastAnswerWait)
		return err
	case n == size:
		return nil
	}
	c.limitWrite() // the engine has not read the bytes sent so far, so the socket's buffer is full
	for i, b := range c.parts {
		taken := min(n, len(b))
		c.parts[i], n = b[taken:], n-taken
	}
	return c.send()
}

// send writes all of parts. If it fails, the wait for an answer is cut to lastAnswerWait: an answer may be the reason of the
// failure.
func (c *conn) send() error {
	err := c.write()
	if err != nil {
		c.shortenWait(lastAnswerWait)
	} else if c.onSent != nil {
		c.onSent()
	}
	return err
}

// write makes one writev on a plain socket, and writes whole records with TLS.
func (c *conn) write() error {
	if c.bw == nil {
		c.queue = c.parts
		n, err := c.queue.WriteTo(c.nc)
		c.wrote += n
		return err
	}
	c.bw.Reset(c)
	for _, b := range c.parts {
		if _, err := c.bw.Write(b); err != nil {
			return err
		}
	}
	return c.bw.Flush()
}

// Write counts the bytes that the TLS connection takes.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.nc.Write(p)
	c.wrote += int64(n)
	return n, err
}

// Read sets the deadline of the read that is about to block, then reads.
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

// receive reads from the socket, or from TLS over it.
func (c *conn) receive(p []byte) (int, error) {
	if c.plain {
		return c.sock.Read(p)
	}
	return c.nc.Read(p)
}

// armRead sets the deadline of the next read. The deadline between two reads of a body is moved only if less than 3/4
// of its time is left: a stream reads hundreds of small events in that time, and setting a deadline costs a lock in
// the runtime's poller.
func (c *conn) armRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	deadline := c.readBy
	if deadline.IsZero() && c.idle > 0 {
		now := time.Now()
		if c.deadlineSet.Sub(now) >= c.idle/4*3 {
			return nil
		}
		deadline = now.Add(c.idle)
	}
	if !deadline.IsZero() && deadline.Equal(c.deadlineSet) {
		return nil
	}
	c.deadlineSet = deadline
	return c.raw.SetReadDeadline(deadline)
}

// shortenWait shortens the wait for bytes to d, also a wait that has begun.
func (c *conn) shortenWait(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shortenWaitLocked(d)
}

// shortenWaitLocked is shortenWait; mu must be held.
func (c *conn) shortenWaitLocked(d time.Duration) {
	by := time.Now().Add(d)
	if c.readBy.IsZero() || by.Before(c.readBy) {
		c.readBy, c.deadlineSet = by, by
		if c.raw != nil { // else the socket is lifted: readBy will hold once it is lowered
			_ = c.raw.SetReadDeadline(by) // fails only on a closed socket, where the read ends anyway
		}
	}
}

// leave closes our half of the connection. What the engine still sends is read for at most limit, and the connection
// is never used again. Only the first call does anything: the engine may have closed its side since, and then our
// half could not be closed a second time.
func (c *conn) leave(limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving {
		return
	}
	c.leaving = true
	if c.fd != noSocket {
		c.shutdown(false)
	} else if half, ok := c.raw.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		c.close()
		return
	}
	c.shortenWaitLocked(limit)
}

// awaitBody replaces the deadline of the head by the limit between two reads of the body.
func (c *conn) awaitBody(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving {
		return
	}
	c.readBy, c.idle, c.deadlineSet = time.Time{}, idle, time.Time{}
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

// explain finds the cause of a failed head. fasthttp hides it behind texts that quote the bytes of the answer.
func (c *conn) explain(err error) error {
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

// checkEncoding refuses a compressed body, because the request asked for none and the proxy edits events.
func (c *conn) checkEncoding() error {
	if enc := c.head.ContentEncoding(); len(enc) > 0 && !bytes.EqualFold(enc, []byte("identity")) {
		return fmt.Errorf("%w: body has a Content-Encoding though identity was asked for; turn compression off in front of the engine",
			ErrMalformed)
	}
	return nil
}

// hasClose reports whether the engine announced that it will close the connection. fasthttp finds the word close only
// if it stands alone and in lower case.
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

// quiet reports that neither bytes nor the end of the connection have come since the last exchange was complete.
func (c *conn) quiet() bool {
	return (c.br == nil || c.br.Buffered() == 0) && (!c.sock.Exists() || c.sock.Quiet())
}

// drained reports that TLS holds back no decrypted bytes for which the reader had no room.
func (c *conn) drained() bool {
	if c.bw == nil {
		return true
	}
	c.mu.Lock()
	c.deadlineSet = noDeadline
	err := c.raw.SetReadDeadline(past)
	c.mu.Unlock()
	if err != nil {
		return false
	}
	var b [1]byte
	n, err := c.nc.Read(b[:])
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}

// touch tells the event loop that reads the socket, if there is one, that the call has changed.
func (c *conn) touch() {
	if c.touched != nil {
		c.touched()
	}
}

// close ends the connection at once: it never blocks.
func (c *conn) close() {
	if c.fd != noSocket {
		c.shutdown(true)
		return
	}
	_ = c.raw.Close()
}
