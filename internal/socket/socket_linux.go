package socket

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Socket is that of one connection; the zero value is that of none. One goroutine may read it while another
// writes it.
type Socket struct{ raw syscall.RawConn }

// Of returns the socket of a connection.
func Of(c net.Conn) Socket {
	t, ok := c.(syscall.Conn)
	if !ok {
		return Socket{}
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return Socket{}
	}
	return Socket{raw}
}

// Exists says whether the connection has one.
func (s Socket) Exists() bool { return s.raw != nil }

// A turn is one use of a socket: what is to be done, and what came of it.
type turn struct {
	what what
	// Both functions call step. They are kept when the turn is used again, because new ones for each use would be garbage.
	try  func(fd uintptr) bool
	look func(fd uintptr)

	p     []byte
	parts [][]byte
	sent  func()

	tried bool // step was called before in this turn
	quiet bool // what peek found: nothing waits to be read
	n     int
	err   error
}

type what uint8

const (
	read what = iota
	write
	await
	ask
	peek
)

var turns = sync.Pool{New: func() any {
	t := &turn{}
	t.try = t.step
	t.look = func(fd uintptr) { t.step(fd) }
	return t
}}

func (t *turn) end() {
	*t = turn{try: t.try, look: t.look}
	turns.Put(t)
}

// step does what can be done now. It returns false if the poller has to call it again once the socket is ready.
func (t *turn) step(fd uintptr) bool {
	again := t.tried
	t.tried = true
	switch t.what {
	case read:
		t.n, t.err = Read(fd, t.p)
		return t.n > 0 || t.err != nil
	case write:
		var n int
		n, t.err = Write(fd, t.p[t.n:])
		t.n += n
		return t.err != nil || t.n == len(t.p)
	case ask:
		return again || t.pose(fd) // the poller calls again when the answer comes
	case await:
		return again || !quiet(fd)
	case peek:
		t.quiet = quiet(fd)
	}
	return true
}

// pose writes the question. It returns false if all of it was written, so that the turn waits for the answer.
func (t *turn) pose(fd uintptr) bool {
	size := 0
	for _, p := range t.parts {
		size += len(p)
	}
	if t.n, t.err = writev(fd, t.parts); t.err != nil || t.n < size {
		return true
	}
	if t.sent != nil {
		t.sent()
	}
	return false
}

// Read is the connection's.
func (s Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	t := turns.Get().(*turn)
	defer t.end()
	t.what, t.p = read, p
	if err := s.raw.Read(t.try); err != nil {
		return 0, err
	}
	return t.n, t.err
}

// Write is the connection's.
func (s Socket) Write(p []byte) (int, error) {
	t := turns.Get().(*turn)
	defer t.end()
	t.what, t.p = write, p
	err := s.raw.Write(t.try)
	if err == nil {
		err = t.err
	}
	return t.n, err
}

// Await waits until Read has something to tell. Whoever waits so needs no buffer meanwhile.
func (s Socket) Await() error {
	t := turns.Get().(*turn)
	defer t.end()
	t.what = await
	return s.raw.Read(t.try)
}

// Ask writes what there is room for. If that is everything, it calls sent, if that is not nil, and waits until Read
// has something to tell. It tells of the writing only: what ends the wait ends the next Read as well. It saves
// the attempt to read what cannot have come yet.
func (s Socket) Ask(parts [][]byte, sent func()) (n int, err error) {
	t := turns.Get().(*turn)
	defer t.end()
	t.what, t.parts, t.sent = ask, parts, sent
	// The poller forgets what it has seen and then calls step, so that an answer to the question is always seen. One
	// that came before the question is not: ask Quiet first.
	err = s.raw.Read(t.try)
	if t.tried {
		err = t.err
	}
	return t.n, err
}

// Quiet says that nothing waits to be read: neither bytes nor an end nor an error.
func (s Socket) Quiet() bool {
	t := turns.Get().(*turn)
	defer t.end()
	t.what = peek
	// Control, not Read: that fails once a deadline has passed.
	return s.raw.Control(t.look) == nil && t.quiet
}

// Read reads from a socket that does not block. It is 0 without an error if nothing is there, and io.EOF at the end.
func Read(fd uintptr, p []byte) (int, error) {
	n, errno := call(unix.SYS_RECVFROM, fd, unsafe.Pointer(unsafe.SliceData(p)), len(p), 0)
	switch {
	case errno == unix.EAGAIN:
		return 0, nil
	case errno != 0:
		return 0, os.NewSyscallError("read", errno)
	}
	if received(fd); n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Write writes as much of p to a socket that does not block as it has room for.
func Write(fd uintptr, p []byte) (n int, err error) {
	written()
	for n < len(p) {
		k, errno := call(unix.SYS_SENDTO, fd, unsafe.Pointer(unsafe.SliceData(p[n:])), len(p)-n, unix.MSG_NOSIGNAL)
		switch {
		case errno == unix.EAGAIN:
			return n, nil
		case errno != 0:
			return n, os.NewSyscallError("write", errno)
		}
		n += k
	}
	return n, nil
}

// writev is one Write of several parts. More than those of a request may be left over.
func writev(fd uintptr, parts [][]byte) (int, error) {
	var list [16]unix.Iovec
	n := 0
	for _, p := range parts {
		if len(p) > 0 && n < len(list) {
			list[n].Base = unsafe.SliceData(p)
			list[n].SetLen(len(p))
			n++
		}
	}
	written()
	k, errno := call(unix.SYS_WRITEV, fd, unsafe.Pointer(&list[0]), n, 0)
	switch {
	case errno == unix.EAGAIN:
		return 0, nil
	case errno != 0:
		return 0, os.NewSyscallError("writev", errno)
	}
	return k, nil
}

// quiet looks for what there is to read, and leaves it there.
func quiet(fd uintptr) bool {
	var b [1]byte
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		if errno != unix.EINTR {
			return errno == unix.EAGAIN
		}
	}
}

// call makes a system call. One for sockets costs less than one for any file: the kernel finds its way at once.
func call(trap, fd uintptr, p unsafe.Pointer, size int, flags uintptr) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(trap, fd, uintptr(p), uintptr(size), flags, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
