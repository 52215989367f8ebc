//go:build unix

package engine

import (
	"errors"
	"net"
	"syscall"
)

// prober asks a socket whether anything waits to be read, without reading it.
type prober struct {
	sc  syscall.RawConn
	ask func(fd uintptr) // made once: a closure a question would be garbage
	err error
}

func newProber(c net.Conn) *prober {
	s, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	sc, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	p := &prober{sc: sc}
	var b [1]byte
	p.ask = func(fd uintptr) {
		_, _, p.err = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	}
	return p
}

// quiet is false once the peer closed, reset or sent something unasked.
func (p *prober) quiet() bool {
	// Control, not Read: that fails once the last exchange's deadline has passed.
	return p.sc.Control(p.ask) == nil && (errors.Is(p.err, syscall.EAGAIN) || errors.Is(p.err, syscall.EINTR))
}
