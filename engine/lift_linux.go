package engine

import (
	"errors"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// dupSocket returns another descriptor of a TCP connection's socket.
func dupSocket(c net.Conn) (fd int, ok bool) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return 0, false
	}
	rc, err := t.SyscallConn()
	if err != nil {
		return 0, false
	}
	var dupErr error
	err = rc.Control(func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, err == nil && dupErr == nil
}

// netConn makes a connection of a descriptor. It closes the descriptor in any case.
func netConn(fd int) (net.Conn, error) {
	err := syscall.SetNonblock(fd, false) // else os.NewFile would give the descriptor to Go's poller, which is not needed
	f := os.NewFile(uintptr(fd), "socket")
	c, fileErr := net.FileConn(f)
	return c, errors.Join(err, fileErr, f.Close())
}

// shutdown closes our half of a lifted socket, or both halves.
func (c *conn) shutdown(both bool) {
	how := unix.SHUT_WR
	if both {
		how = unix.SHUT_RDWR
	}
	_ = unix.Shutdown(c.fd, how) // a connection that is gone is shut already
}
