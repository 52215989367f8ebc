package engine

import (
	"cmp"
	"net"
)

// While an answer streams, an event loop may read its socket instead of a goroutine. Lift takes the socket out of
// Go's poller, which would otherwise be woken for every arrival as well, and Lower puts it back. In between the
// connection has no buffer, nor anything else that only a goroutine needs.

// Lift returns the socket of a response whose body has begun, if the connection has no TLS, the body is chunked, and
// all that has arrived was read. The caller may read and watch the socket, must not close it, and must call Lower
// before any other method but Unframe. touched is called, from any goroutine, if the call is aborted or left or its
// wait is ended meanwhile. The caller must then call Lower and go on reading, which returns the error.
func (r *Response) Lift(touched func()) (fd int, ok bool) {
	c := r.conn
	if c == nil || r.err != nil || c.bw != nil || r.body.framing != byChunks || r.body.chunks.settle(c.br) || r.body.chunks.err != nil ||
		c.br.Buffered() > 0 {
		return 0, false
	}
	k := r.call
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.aborted {
		return 0, false
	}
	if fd, ok = dupSocket(c.raw); !ok {
		return 0, false
	}
	c.close() // the copy of the descriptor keeps the connection open
	c.park()
	c.fd, c.touched, r.body.br = fd, touched, nil
	c.setSocket(nil, nil)
	c.out, c.parts, c.queue = nil, nil, nil
	return fd, true
}

// Unframe finds the data in bytes that were read from a lifted socket. It returns the first piece of data, and how
// many bytes it has used. io.EOF says that the body is complete.
func (r *Response) Unframe(p []byte) (data []byte, used int, err error) {
	data, used, err = r.body.chunks.step(p, len(p))
	r.conn.read += int64(used)
	return data, used, err
}

// Lower makes a lifted response an ordinary one again. socketErr is the error of the socket, if it had one that a
// further read would not return again; nil: there was none.
func (r *Response) Lower(socketErr error) {
	k, c := r.call, r.conn
	k.mu.Lock()
	raw, err := netConn(c.fd)
	c.fd, c.touched = noSocket, nil
	if err != nil {
		socketErr = cmp.Or(socketErr, err)
		raw, _ = net.Pipe() // a closed connection in its place
		_ = raw.Close()
	}
	c.setSocket(raw, raw)
	k.mu.Unlock()
	c.mu.Lock()
	c.deadlineSet = noDeadline // the new net.Conn has no deadline yet
	c.mu.Unlock()
	c.wake()
	r.body.br = c.br
	if socketErr != nil && r.err == nil {
		r.err = k.newError(PhaseBody, c, socketErr)
	}
}
