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

// A Socket is the socket of one connection; the zero value has none. One goroutine may read it
// while another writes it.
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

// Exists must be true before any other method is called.
func (s Socket) Exists() bool { return s.raw != nil }

// An ioOp is one operation on a socket. A pool keeps ioOps for later operations.
type ioOp struct {
	kind operation
	// Both call step. A reused ioOp keeps them, because making them anew would allocate.
	stepOrWait func(fd uintptr) bool // argument of RawConn.Read and Write
	stepOnce   func(fd uintptr)      // argument of RawConn.Control

	buf    []byte   // of read and write
	parts  [][]byte // of ask: the request
	onSent func()   // of ask: called once all parts are written

	stepped    bool // step was called before
	hasNoInput bool // result of peek
	n          int
	err        error
}

type operation uint8

const (
	read operation = iota
	write
	await // until there is something to read
	ask   // write the request and wait for the answer
	peek  // whether there is something to read
)

var ioOpPool = sync.Pool{New: func() any {
	t := &ioOp{}
	t.stepOrWait = t.step
	t.stepOnce = func(fd uintptr) { t.step(fd) }
	return t
}}

// recycle clears the ioOp, so that the pool keeps no caller's buffer alive.
func (t *ioOp) recycle() {
	*t = ioOp{stepOrWait: t.stepOrWait, stepOnce: t.stepOnce}
	ioOpPool.Put(t)
}

// step does as much as is possible now. It returns false if the poller must call it again once the
// socket is ready.
func (t *ioOp) step(fd uintptr) (done bool) {
	again := t.stepped // the socket has become ready
	t.stepped = true
	switch t.kind {
	case read:
		t.n, t.err = Read(fd, t.buf)
		return t.n > 0 || t.err != nil
	case write:
		var n int
		n, t.err = Write(fd, t.buf[t.n:])
		t.n += n
		return t.err != nil || t.n == len(t.buf)
	case ask:
		if again { // there is input
			return true
		}
		wroteAll := t.writeRequest(fd)
		return !wroteAll // without the whole request, no answer comes
	case await:
		return again || !hasNoInput(fd)
	case peek:
		t.hasNoInput = hasNoInput(fd)
	}
	return true
}

func (t *ioOp) writeRequest(fd uintptr) (wroteAll bool) {
	size := 0
	for _, p := range t.parts {
		size += len(p)
	}
	t.n, t.err = writev(fd, t.parts)
	if t.err != nil || t.n < size {
		return false
	}
	if t.onSent != nil {
		t.onSent()
	}
	return true
}

// Read waits for at least one byte, and obeys the read deadline.
func (s Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	t := ioOpPool.Get().(*ioOp)
	defer t.recycle()
	t.kind, t.buf = read, p
	if err := s.raw.Read(t.stepOrWait); err != nil {
		return 0, err
	}
	return t.n, t.err
}

// Write writes all of p, and obeys the write deadline.
func (s Socket) Write(p []byte) (int, error) {
	t := ioOpPool.Get().(*ioOp)
	defer t.recycle()
	t.kind, t.buf = write, p
	err := s.raw.Write(t.stepOrWait) // of the poller, such as a deadline that has passed
	if err == nil {
		err = t.err
	}
	return t.n, err
}

// Await waits until Read would not block; it needs no buffer meanwhile.
func (s Socket) Await() error {
	t := ioOpPool.Get().(*ioOp)
	defer t.recycle()
	t.kind = await
	return s.raw.Read(t.stepOrWait)
}

// Ask writes parts, as far as the socket has room. If it could write everything, it calls onSent,
// and waits until Read would not block. n and err are about the writing only: the next Read returns
// an error of the wait. Ask saves one system call over Write and Read: Read would first try to read
// an answer that cannot have come yet.
func (s Socket) Ask(parts [][]byte, onSent func()) (n int, err error) {
	t := ioOpPool.Get().(*ioOp)
	defer t.recycle()
	t.kind, t.parts, t.onSent = ask, parts, onSent
	// RawConn.Read calls step at once, and again when there is input. Go's poller forgets earlier
	// events before the first call, so it notices each answer that comes after the writing, but not
	// bytes that came before. Therefore the caller of Ask must check Quiet first.
	pollerErr := s.raw.Read(t.stepOrWait)
	if neverWritten := !t.stepped; neverWritten { // the poller failed before the first call
		return 0, pollerErr
	}
	return t.n, t.err // pollerErr is only about the wait
}

// Quiet says that there is nothing to read: no bytes, no end of the stream and no error.
func (s Socket) Quiet() bool {
	t := ioOpPool.Get().(*ioOp)
	defer t.recycle()
	t.kind = peek
	// RawConn.Read would fail once a deadline has passed.
	return s.raw.Control(t.stepOnce) == nil && t.hasNoInput
}

// Read reads from a non-blocking socket. It returns 0 and no error if there is nothing to read.
func Read(fd uintptr, p []byte) (int, error) {
	n, errno := call(unix.SYS_RECVFROM, fd, unsafe.Pointer(unsafe.SliceData(p)), len(p), 0)
	switch {
	case errno == unix.EAGAIN:
		return 0, nil
	case errno != 0:
		return 0, os.NewSyscallError("read", errno)
	}
	raceNoteRead(fd)
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Write writes as much of p as the non-blocking socket has room for.
func Write(fd uintptr, p []byte) (n int, err error) {
	raceNoteWrite() // before, so that the race detector orders it before the read on the other side
	for n < len(p) {
		written, errno := call(unix.SYS_SENDTO, fd, unsafe.Pointer(unsafe.SliceData(p[n:])), len(p)-n, unix.MSG_NOSIGNAL)
		switch {
		case errno == unix.EAGAIN: // no room
			return n, nil
		case errno != 0:
			return n, os.NewSyscallError("write", errno)
		}
		n += written
	}
	return n, nil
}

// writev takes at most 16 parts that are not empty, and ignores the others.
func writev(fd uintptr, parts [][]byte) (written int, err error) {
	var list [16]unix.Iovec
	used := 0
	for _, p := range parts {
		if len(p) > 0 && used < len(list) {
			list[used].Base = unsafe.SliceData(p)
			list[used].SetLen(len(p))
			used++
		}
	}
	raceNoteWrite()
	written, errno := call(unix.SYS_WRITEV, fd, unsafe.Pointer(&list[0]), used, 0)
	switch {
	case errno == unix.EAGAIN: // no room
		return 0, nil
	case errno != 0:
		return 0, os.NewSyscallError("writev", errno)
	}
	return written, nil
}

// hasNoInput takes no bytes off the socket. The end of the stream and an error count as input.
func hasNoInput(fd uintptr) bool {
	var b [1]byte
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		if errno != unix.EINTR { // EINTR: a signal interrupted the call
			return errno == unix.EAGAIN
		}
	}
}

// call makes a system call that cannot block, so it does not tell Go's scheduler. The kernel
// handles recvfrom and sendto faster for sockets than read and write.
func call(trap, fd uintptr, p unsafe.Pointer, size int, flags uintptr) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(trap, fd, uintptr(p), uintptr(size), flags, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
