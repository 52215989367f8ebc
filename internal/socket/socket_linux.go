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

// A Socket is the socket of one connection; the zero value has none. One goroutine may read it while another
// writes it.
type Socket struct{ raw syscall.RawConn }

// Of returns the socket of a connection; Exists is false if the connection has none.
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

// Exists says whether the connection has a socket.
func (s Socket) Exists() bool { return s.raw != nil }

// A turn is one operation on a socket: its arguments and its result.
type turn struct {
	op operation
	// Both functions call step. A turn that is used again keeps them, because making them anew would allocate.
	try  func(fd uintptr) bool // for RawConn.Read and Write
	look func(fd uintptr)      // for RawConn.Control

	p     []byte   // the argument of read and write
	parts [][]byte // the arguments of ask
	sent  func()

	tried bool // step was called before in this turn
	quiet bool // the result of peek: there is nothing to read
	n     int
	err   error
}

type operation uint8

const (
	read operation = iota
	write
	await // see Await
	ask   // see Ask
	peek  // see Quiet
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

// step does as much of the operation as is possible now. It returns false if the poller must call it again once the socket is ready.
func (t *turn) step(fd uintptr) bool {
	again := t.tried
	t.tried = true
	switch t.op {
	case read:
		t.n, t.err = Read(fd, t.p)
		return t.n > 0 || t.err != nil
	case write:
		var n int
		n, t.err = Write(fd, t.p[t.n:])
		t.n += n
		return t.err != nil || t.n == len(t.p)
	case ask:
		return again || t.pose(fd) // the second call means that the answer has come
	case await:
		return again || !quiet(fd)
	case peek:
		t.quiet = quiet(fd)
	}
	return true
}

// pose writes parts. done is false if it could write everything, because the turn must then wait for the answer.
func (t *turn) pose(fd uintptr) (done bool) {
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

// Read does what Read of the connection does.
func (s Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	t := turns.Get().(*turn)
	defer t.end()
	t.op, t.p = read, p
	if err := s.raw.Read(t.try); err != nil {
		return 0, err
	}
	return t.n, t.err
}

// Write does what Write of the connection does.
func (s Socket) Write(p []byte) (int, error) {
	t := turns.Get().(*turn)
	defer t.end()
	t.op, t.p = write, p
	err := s.raw.Write(t.try)
	if err == nil {
		err = t.err
	}
	return t.n, err
}

// Await waits until Read would not block. A caller needs no buffer while it waits so.
func (s Socket) Await() error {
	t := turns.Get().(*turn)
	defer t.end()
	t.op = await
	return s.raw.Read(t.try)
}

// Ask writes parts, as far as the socket has room. If it could write everything, it calls sent, unless sent is nil, and waits
// until Read would not block. n and err are about the writing only: an error that ends the wait is returned by the next Read.
// A Read after a Write would first try to read an answer that cannot have come yet. Ask saves this system call.
func (s Socket) Ask(parts [][]byte, sent func()) (n int, err error) {
	t := turns.Get().(*turn)
	defer t.end()
	t.op, t.parts, t.sent = ask, parts, sent
	// The poller forgets earlier events and then calls step, so it always notices an answer that comes after the writing.
	// It does not notice bytes that came before: the caller must check Quiet first.
	err = s.raw.Read(t.try)
	if t.tried { // it has written, and an error of the poller is about the wait
		err = t.err
	}
	return t.n, err
}

// Quiet says that there is nothing to read: no bytes, no end of the stream and no error.
func (s Socket) Quiet() bool {
	t := turns.Get().(*turn)
	defer t.end()
	t.op = peek
	// Control instead of Read, because Read fails once a deadline has passed.
	return s.raw.Control(t.look) == nil && t.quiet
}

// Read reads from a non-blocking socket. It returns 0 and no error if there is nothing to read, and io.EOF at the end.
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

// Write writes to a non-blocking socket as much of p as it has room for.
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

// writev does what Write does, for several parts in one system call. It ignores parts after the first 16 that are not empty.
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

// quiet says whether there is nothing to read. It takes no bytes off the socket.
func quiet(fd uintptr) bool {
	var b [1]byte
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		if errno != unix.EINTR {
			return errno == unix.EAGAIN
		}
	}
}

// call makes a system call, again if a signal interrupts it. Its callers prefer calls for sockets to read and write, because the
// kernel handles them faster.
func call(trap, fd uintptr, p unsafe.Pointer, size int, flags uintptr) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(trap, fd, uintptr(p), uintptr(size), flags, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
