package edge

import (
	"encoding/binary"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watcher notices that clients leave, with one epoll instance for all connections. It waits only
// for RDHUP and never reads, so it notices this even while requests or TLS records of the client
// are unread. It is edge-triggered: each client is reported once. close(2) removes a socket from
// it.
type watcher struct {
	ep, stop int // stop is an eventfd in ep, because closing ep does not end a wait
	onGone   func(id uint64)
}

const stopID = 0

// The watcher calls onGone with the id of each client that leaves.
func newWatcher(onGone func(id uint64)) (*watcher, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(err, unix.Close(ep))
	}
	w := &watcher{ep: ep, stop: stop, onGone: onGone}
	if err := w.addToEpoll(stop, unix.EPOLLIN, stopID); err != nil {
		return nil, errors.Join(err, unix.Close(stop), unix.Close(ep))
	}
	go w.run()
	return w, nil
}

// If the client acknowledges nothing for ackTimeout, the kernel ends the connection, and run
// reports it, too.
func (w *watcher) add(c syscall.Conn, id uint64, ackTimeout time.Duration) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var ctlErr error
	err = rc.Control(func(fd uintptr) {
		if ackTimeout > 0 {
			// It fails for a Unix socket, which needs no such timeout.
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(ackTimeout.Milliseconds()))
		}
		ctlErr = w.addToEpoll(int(fd), unix.EPOLLRDHUP|unix.EPOLLET, id)
	})
	return errors.Join(err, ctlErr)
}

func (w *watcher) addToEpoll(fd int, events uint32, id uint64) error {
	// Fd and Pad together are epoll's 64 bits of user data.
	ev := unix.EpollEvent{Events: events, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
	return unix.EpollCtl(w.ep, unix.EPOLL_CTL_ADD, fd, &ev)
}

func idOf(ev *unix.EpollEvent) uint64 { return uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32 }

func (w *watcher) run() {
	defer func() { // add is not called any more: the listener is closed and has no connections
		_ = unix.Close(w.ep)
		_ = unix.Close(w.stop)
	}()
	var events [128]unix.EpollEvent
	for {
		n, err := unix.EpollWait(w.ep, events[:], -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			// Without the watcher, clients that leave would not be noticed.
			panic("edge: epoll_wait: " + err.Error())
		}
		for i := range max(n, 0) { // n is -1 after a signal (EINTR)
			id := idOf(&events[i])
			if id == stopID {
				return
			}
			w.onGone(id)
		}
	}
}

// close may be called only once.
func (w *watcher) close() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(w.stop, one[:]) // always succeeds: the eventfd is 0
}

// pendingError returns the socket error (SO_ERROR) that no read or write has returned yet, and
// clears it.
func pendingError(c net.Conn) error {
	sock, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	code := 0
	if rc, err := sock.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { code, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) })
	}
	if code == 0 {
		return nil
	}
	return syscall.Errno(code)
}
