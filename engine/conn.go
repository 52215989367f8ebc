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
	// inlineWrite is the size in bytes of the largest request that is written without a second goroutine. Such a write does not
	// block, because it fits into the send buffer of an idle socket.
	inlineWrite = 16 << 10
	// lastAnswerWait is how long to wait for an answer after a write has failed. The engine may have answered before it stopped
	// reading the request. An answer that has not arrived by then is lost.
	lastAnswerWait = time.Second
	maxInterim     = 16       // most response heads with status 1xx before the final one
	tlsRecord      = 16 << 10 // bytes of the largest TLS record, which is also the size of the buffer bw
)

var (
	past       = time.Unix(1, 0) // as a deadline, it interrupts a read or write at once
	noDeadline time.Time
)

const noSocket = -1

// conn is one connection with the buffers that an exchange needs, which are reused by the next exchange. One call owns it
// at a time; other goroutines may use only raw and the fields under mu.
type conn struct {
	raw            net.Conn      // the TCP connection; closing it ends any phase at once, even with TLS
	nc             net.Conn      // raw itself, or TLS over it
	br             *bufio.Reader // nil while the connection is idle, so that it occupies no buffer
	bw             *bufio.Writer // only with TLS, to make few large records; a plain socket needs none, because it gets one writev
	socket         socket.Socket // the socket of raw; its zero value if raw has none
	hasPlainSocket bool          // the connection has no TLS and raw has a socket: reads and writes may go to the socket directly
	key            key
	readers        *sync.Pool // pool of buffered readers, shared by the client's connections
	reused         bool       // an earlier request used the connection
	idleSince      time.Time  // when the connection was last put into the idle pool

	head        fasthttp.ResponseHeader
	out         []byte      // buffer in which a call builds the request head
	parts       [][]byte    // the request head and the parts of the body
	writevParts net.Buffers // copy of parts that writev consumes
	onSent      func()      // called once all parts are written; nil: nothing is called
	wrote       int64       // request bytes of this exchange that the socket has taken
	read        int64       // response bytes of this exchange that were read
	answered    bool        // at least one response byte of this exchange came
	readErr     error       // the last read error; kept because fasthttp's header parser hides it

	detachedFD int    // the socket while an event loop reads it (see Response.Detach), else noSocket; the call's lock guards it
	wakeLoop   func() // wakes the event loop that reads the socket; nil: no event loop reads it

	mu              sync.Mutex
	readDeadline    time.Time     // until when reads may wait, for example for the response head; zero: only idleLimit bounds them
	halfClosed      bool          // halfClose was called, and readDeadline bounds all reads from now on
	idleLimit       time.Duration // longest wait of one read of the body; 0: for ever
	appliedDeadline time.Time     // the deadline that the socket has; zero: it must be set again
}

// newConn returns a connection over raw. nc is raw itself, or TLS over it. k says which calls may use the connection, and readers is the
// pool from which it borrows its reader.
func newConn(raw, nc net.Conn, k key, readers *sync.Pool) *conn {
	c := &conn{key: k, readers: readers, detachedFD: noSocket}
	c.setSocket(raw, nc)
	c.attachReader()
	if raw != nc { // TLS makes a record of each write, so small writes must be joined
		c.bw = bufio.NewWriterSize(c, tlsRecord)
	}
	return c
}

// setSocket makes raw the connection that c uses. nc is raw itself, or TLS over it. Both are nil while an event loop reads the socket.
func (c *conn) setSocket(raw, nc net.Conn) {
	c.raw, c.nc = raw, nc
	c.socket = socket.Of(raw)
	c.hasPlainSocket = raw == nc && c.socket.Exists()
}

// newReaders returns a pool of readers whose buffers have this size in bytes. The size also bounds a response head.
func newReaders(size int) *sync.Pool {
	return &sync.Pool{New: func() any { return bufio.NewReaderSize(nil, size) }}
}

// attachReader borrows a reader with its buffer from the pool, before a call. An idle connection has no reader, so that it occupies no
// buffer.
func (c *conn) attachReader() {
	c.br, _ = c.readers.Get().(*bufio.Reader)
	c.br.Reset(c)
}

// releaseReader returns the reader to the pool after the call, so that an idle connection occupies no buffer.
func (c *conn) releaseReader() {
	c.br.Reset(nil)
	c.readers.Put(c.br)
	c.br = nil
}

// exchange writes the request and returns once it has read the response head. mayReuse says that the connection may be used again after the
// body. After a failure, phase says how far the exchange had come. exchange does not use body after it returns.
func (c *conn) exchange(d Deadlines, head []byte, body [][]byte) (mayReuse bool, phase Phase, err error) {
	c.reset(d, head, body)
	defer clear(c.parts) // an idle connection must not keep a prompt in memory
	writeErr, readErr := c.sendAndReadHead()
	switch {
	case readErr == nil: // the head has come, which counts even if the write failed; but the connection is then not used again
		c.awaitBody(d.Idle)
		return writeErr == nil && !hasClose(&c.head), PhaseHead, nil
	case c.answered || writeErr == nil: // the request was written, or at least the engine has begun to answer it
		return false, PhaseHead, readErr
	// A deadline of evenkeel stopped the write: sendWhileReadingHead sets it in the past once the read has failed, or the time for the
	// answer is over for write and read alike. So the error of the read is the cause.
	case errors.Is(writeErr, os.ErrDeadlineExceeded):
		return false, PhaseWrite, readErr
	default: // no deadline stopped the write, so its own error is the cause
		return false, PhaseWrite, writeErr
	}
}

// sendAndReadHead writes parts, the request, and reads the response head. A large request is written by a second goroutine during the read:
// an engine may answer it (400, 413) without reading it, and such an answer ends the write. A smaller request is written before the read.
func (c *conn) sendAndReadHead() (writeErr, readErr error) {
	size := 0
	for _, b := range c.parts {
		size += len(b)
	}
	switch {
	case size > inlineWrite:
		c.limitWrite()
		return c.sendWhileReadingHead()
	case c.hasPlainSocket: // sendPlain sets the deadline of the write itself, if it needs one
		writeErr = c.sendPlain(size)
	default:
		c.limitWrite()
		writeErr = c.send()
	}
	return writeErr, c.readHead() // the head is read even after a failed write: the engine may have answered before
}

// sendWhileReadingHead reads the response head while a second goroutine writes the request. Once the head has come, or reading has
// failed, it ends the write. writeErr is the error of the write, err that of the read.
func (c *conn) sendWhileReadingHead() (writeErr, err error) {
	written := make(chan error, 1)
	go func() { written <- c.send() }()
	err = c.readHead()
	_ = c.raw.SetWriteDeadline(past) // it fails only on a closed socket, where the write ends anyway
	return <-written, err
}

// reset clears the state of the last exchange and sets the time by which the answer must come. If halfClose was called already, its time
// for all further reads stays.
func (c *conn) reset(d Deadlines, head []byte, body [][]byte) {
	c.wrote, c.read, c.answered, c.readErr = 0, 0, false, nil
	c.parts = append(append(c.parts[:0], head), body...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed { // evenkeel's half of the connection is closed, so the write will fail
		return
	}
	c.readDeadline, c.idleLimit = noDeadline, 0
	if d.FirstByte > 0 {
		c.readDeadline = time.Now().Add(d.FirstByte)
	}
	c.setDeadlineAtNextRead()
}

// setDeadlineAtNextRead makes the next read set the deadline of the socket, even if the socket seems to have the right one already. The
// caller holds mu.
func (c *conn) setDeadlineAtNextRead() { c.appliedDeadline = noDeadline }

// limitWrite sets the write deadline to the time by which the answer must come. It must be called before send, not in it:
// sendWhileReadingHead may end the write by a deadline in the past, which limitWrite would overwrite.
func (c *conn) limitWrite() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.halfClosed { // otherwise the write fails in any case
		_ = c.raw.SetWriteDeadline(c.readDeadline) // it fails only on a closed socket, and then the write fails, too
	}
}

// sendPlain writes all of parts to a socket without TLS. If the socket takes the whole request at once, Ask calls onSent, and waits until
// an answer, an error or the end of the connection has come. Otherwise send writes the rest, and calls onSent. After a failed write,
// sendPlain shortens the wait of readHead, which its caller calls next. size is the length of parts in bytes.
func (c *conn) sendPlain(size int) error {
	if err := c.armRead(); err != nil { // the read deadline bounds Ask, which also waits for the answer
		return err
	}
	n, err := c.socket.Ask(c.parts, c.onSent)
	c.wrote = int64(n)
	switch {
	case err != nil:
		c.shortenWait(lastAnswerWait) // as in send
		return err
	case n == size: // everything is written, so Ask has called onSent
		return nil
	}
	c.limitWrite()              // the socket's buffer is full, so the rest of the write may block
	for i, b := range c.parts { // cuts the n bytes that the socket has taken off the beginning of parts
		taken := min(n, len(b))
		c.parts[i], n = b[taken:], n-taken
	}
	return c.send()
}

// send writes all of parts and then calls onSent. If the write fails, exchange still reads an answer: the engine may have sent one, such as
// a refusal, before it stopped reading. Such an answer has come already or comes soon, so send shortens the wait for it to lastAnswerWait.
func (c *conn) send() error {
	err := c.write()
	if err != nil {
		c.shortenWait(lastAnswerWait)
	} else if c.onSent != nil {
		c.onSent()
	}
	return err
}

// usesTLS says whether the connection has TLS. Only a connection with TLS has the buffer bw.
func (c *conn) usesTLS() bool { return c.bw != nil }

// write writes parts: by one writev without TLS, in large records with TLS. It counts the written bytes in wrote.
func (c *conn) write() error {
	if !c.usesTLS() {
		c.writevParts = c.parts // a second slice, because WriteTo cuts off what it has written, and the next request reuses parts
		n, err := c.writevParts.WriteTo(c.nc)
		c.wrote += n
		return err
	}
	c.bw.Reset(c) // the buffer is empty now, and writes by c.Write, which counts the bytes in wrote
	for _, b := range c.parts {
		if _, err := c.bw.Write(b); err != nil {
			return err
		}
	}
	return c.bw.Flush()
}

// Write writes to the TLS connection and counts the bytes. It makes conn an io.Writer for the buffer bw.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.nc.Write(p)
	c.wrote += int64(n)
	return n, err
}

// Read sets the read deadline and then reads. It makes conn an io.Reader for the reader br.
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
	if c.hasPlainSocket {
		return c.socket.Read(p)
	}
	return c.nc.Read(p)
}

// armRead sets the deadline of the next read: readDeadline or, within a body, idleLimit from now. Within a body it keeps the old
// deadline while at least 3/4 of idleLimit is left until then. A stream may read hundreds of events in this time, and each new
// deadline costs a lock in the runtime's poller.
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
	if !deadline.IsZero() && deadline.Equal(c.appliedDeadline) { // the socket has this deadline already
		return nil
	}
	c.appliedDeadline = deadline
	return c.raw.SetReadDeadline(deadline)
}

// shortenWait shortens the wait for bytes to d from now, even if a read is waiting already.
func (c *conn) shortenWait(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shortenWaitLocked(d)
}

// shortenWaitLocked is shortenWait for a caller that holds mu. It never makes the wait longer.
func (c *conn) shortenWaitLocked(d time.Duration) {
	by := time.Now().Add(d)
	if c.readDeadline.IsZero() || by.Before(c.readDeadline) { // zero: at most idleLimit bounds the wait so far
		c.readDeadline = by
		if c.raw != nil { // nil: an event loop reads the socket (see Response.Detach), and readDeadline applies after Reattach
			c.appliedDeadline = by
			_ = c.raw.SetReadDeadline(by) // it fails only on a closed socket, where the read ends anyway
		}
	}
}

// halfClose closes evenkeel's half of the connection. What the engine still sends can be read for at most limit, and the connection
// is never used again. Only the first call has an effect: in a second one CloseWrite might fail, and halfClose would close the whole
// connection.
func (c *conn) halfClose(limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed {
		return
	}
	c.halfClosed = true
	if c.detachedFD != noSocket { // an event loop reads the socket, and raw is nil
		c.shutdownDetached(false) // false: only evenkeel's half
	} else if half, ok := c.raw.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		c.close() // this connection cannot close one half alone
		return
	}
	c.shortenWaitLocked(limit)
}

// awaitsClose says that halfClose was called, so that the engine should close its half of the connection, too.
func (c *conn) awaitsClose() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.halfClosed
}

// awaitBody replaces the deadline of the head by idle, the limit of each read of the body; 0: no limit. If halfClose was called, because
// the client has disconnected, the time that it allows for all further reads stays.
func (c *conn) awaitBody(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halfClosed {
		return
	}
	c.readDeadline, c.idleLimit = noDeadline, idle
	c.setDeadlineAtNextRead()
}

// readHead reads the final response head and skips up to maxInterim interim ones, whose status is 1xx. It refuses an answer that evenkeel
// could not use: with an invalid status, with a switch of protocols, or with a compressed body.
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

// headError returns why reading the head failed. It does not use fasthttp's messages, because they quote bytes of the answer.
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

// checkEncoding refuses a compressed body, which the request did not ask for: evenkeel could not edit its events.
func (c *conn) checkEncoding() error {
	if enc := c.head.ContentEncoding(); len(enc) > 0 && !bytes.EqualFold(enc, []byte("identity")) {
		return fmt.Errorf("%w: body has a Content-Encoding though identity was asked for; turn compression off in front of the engine",
			ErrMalformed)
	}
	return nil
}

// hasClose reports whether the engine announced that it will close the connection. fasthttp alone finds only the
// header value close in lower case, without other words.
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

// hasNoInput reports that since the end of the last exchange no bytes have come, and the engine has not closed the connection. For a
// connection that gives no access to its socket, this cannot be found out, and hasNoInput returns true.
func (c *conn) hasNoInput() bool {
	if c.br != nil && c.br.Buffered() > 0 { // an idle connection has no reader
		return false
	}
	return !c.socket.Exists() || c.socket.Quiet() // a socket that is not quiet has bytes, the end of the stream or an error
}

// tlsDrained reports that the TLS layer has no decrypted bytes that were not read. To find out, it tries to read one byte with a
// deadline in the past, which returns only bytes that are there already. Without TLS it is true.
func (c *conn) tlsDrained() bool {
	if !c.usesTLS() { // only with TLS can there be decrypted bytes
		return true
	}
	c.mu.Lock()
	c.setDeadlineAtNextRead() // the next read through conn must replace the deadline that is set here
	err := c.raw.SetReadDeadline(past)
	c.mu.Unlock()
	if err != nil {
		return false
	}
	var b [1]byte
	n, err := c.nc.Read(b[:])                               // a byte that it reads is lost, but then the connection is not used again
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded) // only the deadline has ended the read
}

// notifyLoop tells the event loop that reads the socket, if there is one, that the call was aborted or its wait was shortened.
func (c *conn) notifyLoop() {
	if c.wakeLoop != nil {
		c.wakeLoop()
	}
}

// close closes the connection. It never blocks.
func (c *conn) close() {
	if c.detachedFD != noSocket { // an event loop reads the socket, and closes the descriptor when it sees the end
		c.shutdownDetached(true) // true: both halves of the connection
		return
	}
	_ = c.raw.Close()
}
