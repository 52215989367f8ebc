package engine

import (
	"cmp"
	"net"
)

// While an answer streams, an event loop may read its socket instead of a goroutine, which saves
// memory and wake-ups. Detach takes the socket away from Go's poller, which would otherwise also be
// woken for every arrival. Reattach gives it back. In between, the connection has no buffers.

// Detach returns the socket of a response whose body has begun. ok is false, and Read goes on as
// before, if the response has ended, failed or was aborted, if the connection uses TLS, if the body
// is not chunked, if bytes that have arrived were not read yet, or if the socket cannot be copied.
// The caller may read and poll the socket but must not close it. Before Reattach, it may call no
// other method than Unframe. If the call's Abort, Disconnect or Expire is called before Reattach,
// it calls onWake, in the goroutine of its caller. The caller must then call Reattach and continue
// with Read, which returns the error.
func (r *Response) Detach(onWake func()) (fd int, ok bool) {
	if !r.awaitsSocket() {
		return 0, false
	}
	k, c := r.call, r.conn
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.aborted {
		return 0, false
	}
	if fd, ok = dupSocket(c.raw); !ok {
		return 0, false
	}
	c.giveUpSocket(fd, onWake)
	r.body.br = nil // giveUpSocket has released the reader
	return fd, true
}

// awaitsSocket says whether the state of the body allows Detach: the body is chunked and has not
// ended, and no buffer has bytes of it, so that all further bytes come from the socket.
// awaitsSocket reads the lines between two chunks, as far as they have arrived. This does no harm
// if the socket is not detached, because Read goes on after them.
func (r *Response) awaitsSocket() bool {
	c := r.conn
	// The response is closed, or its body has ended or failed.
	over := c == nil || r.err != nil
	if over || c.usesTLS() || r.body.framing != byChunks { // the buffers of TLS cannot be handed over
		return false
	}
	ended := r.body.chunks.readFraming(c.br)
	// Buffered bytes are data that was not read yet.
	return !ended && r.body.chunks.err == nil && c.br.Buffered() == 0
}

// giveUpSocket leaves the socket to an event loop. Until Reattach, the connection has neither a
// socket nor buffers. fd is a copy of the socket's descriptor, which the event loop reads. onWake
// wakes the event loop. The caller holds the call's mu.
func (c *conn) giveUpSocket(fd int, onWake func()) {
	c.close() // this does not end the connection, because fd stays open
	c.detachedFD, c.wakeLoop = fd, onWake
	c.setSocket(nil, nil)
	c.releaseReader()
	// The buffers of the request are not needed while the answer streams.
	c.out, c.parts, c.writevParts = nil, nil, nil
}

// Unframe finds the data in p, bytes that were read from a detached socket. It returns the first
// piece of data, and how many bytes of p it has used. io.EOF says that the body is complete, any
// other error that it is malformed.
func (r *Response) Unframe(p []byte) (data []byte, used int, err error) {
	data, used, err = r.body.chunks.step(p, len(p))
	r.conn.read += int64(used)
	// The caller drops the bytes after the body, and more of them may come.
	if err != nil && used < len(p) {
		r.mayReuse = false
	}
	return data, used, err
}

// Reattach gives the socket back to the connection after Detach, so that Read works again. From
// then on no event loop reads the socket, and Abort, Disconnect and Expire wake none. socketErr is
// an error that the caller's read of the socket returned, which the next Read returns;
// nil: there was none.
func (r *Response) Reattach(socketErr error) {
	k, c := r.call, r.conn
	k.mu.Lock()                       // Abort and Disconnect must not use the socket while it changes
	raw, err := netConn(c.detachedFD) // netConn closes the descriptor; raw has a copy
	c.detachedFD, c.wakeLoop = noSocket, nil
	if err != nil {
		socketErr = cmp.Or(socketErr, err)
		raw, _ = net.Pipe() // a closed pipe in place of the socket makes all reads fail
		_ = raw.Close()
	}
	// Without TLS, the connection itself is the socket; Detach refuses one with TLS.
	c.setSocket(raw, raw)
	k.mu.Unlock()
	c.mu.Lock()
	c.setDeadlineAtNextRead() // the new net.Conn has no deadline yet
	c.mu.Unlock()
	c.attachReader()
	r.body.br = c.br
	if socketErr != nil && r.err == nil {
		r.err = k.newError(PhaseBody, c, socketErr)
	}
}
