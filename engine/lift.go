package engine

import (
	"cmp"
	"net"
)

// While an answer streams, an event loop may read its socket instead of a goroutine. Lift takes the
// socket out of Go's poller for that, which would otherwise be woken for every arrival as well,
// and Lower gives it back. In between the connection has no buffer, and nothing that only a goroutine needs.

// Lift hands out the socket of a response whose body has begun, if it is plain, chunked and all that has
// arrived was read. The caller may read it and watch it, not close it, and calls Lower before any
// other method but Unframe. touched is called, from any goroutine, when the call is aborted or left or
// its wait is ended meanwhile: the caller is then to call Lower and to read on, which tells the rest.
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
	c.close() // the copy keeps the connection
	c.park()
	c.fd, c.touched, r.body.br = fd, touched, nil
	c.over(nil, nil)
	c.out, c.vec, c.queue = nil, nil, nil
	return fd, true
}

// Unframe finds the data in the bytes that were read from a lifted socket: the first piece of it, and how
// many bytes were used. io.EOF says that the body is whole.
func (r *Response) Unframe(p []byte) (data []byte, used int, err error) {
	data, used, err = r.body.chunks.step(p, len(p))
	r.conn.read += int64(used)
	return data, used, err
}

// Lower makes a lifted response an ordinary one again. failed is the error of the socket, if it had one
// that another read would not repeat.
func (r *Response) Lower(failed error) {
	k, c := r.call, r.conn
	k.mu.Lock()
	raw, err := netConn(c.fd)
	c.fd, c.touched = noSocket, nil
	if err != nil {
		failed = cmp.Or(failed, err)
		raw, _ = net.Pipe() // one that is closed, as this is
		_ = raw.Close()
	}
	c.over(raw, raw)
	k.mu.Unlock()
	c.mu.Lock()
	c.set = noDeadline // the new connection has none
	c.mu.Unlock()
	c.wake()
	r.body.br = c.br
	if failed != nil && r.err == nil {
		r.err = k.fail(PhaseBody, c, failed)
	}
}
