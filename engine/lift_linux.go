package engine

import (
	"errors"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// dupSocket returns a second file descriptor for the socket of a TCP connection, so that closing
// the connection does not close the socket.
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

// netConn returns a connection that uses a copy of the descriptor fd. It closes fd in any case,
// even after an error.
func netConn(fd int) (net.Conn, error) {
	// A non-blocking fd would make os.NewFile register it needlessly with Go's poller.
	err := syscall.SetNonblock(fd, false)
	f := os.NewFile(uintptr(fd), "socket")
	c, fileErr := net.FileConn(f)
	return c, errors.Join(err, fileErr, f.Close())
}

// shutdownDetached closes evenkeel's half of the connection of a detached socket or, if both is
// true, both halves. It does not close the descriptor.
func (c *conn) shutdownDetached(both bool) {
	how := unix.SHUT_WR
	if both {
		how = unix.SHUT_RDWR
	}
	_ = unix.Shutdown(c.detachedFD, how) // it fails only if the connection has ended already
}
