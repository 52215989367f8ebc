package loop

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"evenkeel/internal/socket"
)

// A Loop is one goroutine and the sockets that it watches.
type Loop struct {
	Buffer [64 << 10]byte // scratch memory for handlers, until their call returns
	Out    []byte         // likewise

	log    *zap.Logger
	base   time.Time
	fd     int // the descriptor of ep, because ep.Fd would make it blocking
	ep     *os.File
	raw    syscall.RawConn
	events [256]unix.EpollEvent

	watches []*Watch // by slot; nil: free
	again   []*Watch // watches that called Again: their turn comes after the sockets that are ready
	turn    []*Watch // the list again of the round before, while its watches are called
	free    []uint32
	ages    uint32
	wheel   wheel
	expired []*Watch
	armed   int64 // when Go's poller ends the wait, ns since base; 0: it does not

	mu     sync.Mutex
	posted []func()
	closed bool
	done   chan struct{}
}

// A Watch is a socket in a loop. It belongs to the loop's goroutine.
type Watch struct {
	loop    *Loop
	handler Handler
	fd      int
	index   uint32
	age     uint32 // tells it from an earlier watch in the same place
	again   bool   // it is in the loop's list of that name
	ended   bool   // the value of ended for the Ready call of its next turn

	at         int64 // ns since the loop's base; 0: never
	tick       int64 // the tick of its slot in the wheel; 0: it is in no slot
	prev, next *Watch
}

// New starts a loop.
func New(log *zap.Logger) (*Loop, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w; raise the limit of open files", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // else os.NewFile would not give it to Go's poller
		return nil, errors.Join(err, unix.Close(fd))
	}
	l := &Loop{log: log, base: time.Now(), fd: fd, ep: os.NewFile(uintptr(fd), "epoll"), done: make(chan struct{})}
	l.wheel.cursor = 1
	if l.raw, err = l.ep.SyscallConn(); err != nil {
		return nil, errors.Join(err, l.ep.Close())
	}
	if err := l.ep.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("an epoll instance cannot be watched by Go's poller: %w", err), l.ep.Close())
	}
	go l.run()
	return l, nil
}

// Post has f called on the loop's goroutine. It never blocks. After Close it is false, and f
// is not called.
func (l *Loop) Post(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.posted = append(l.posted, f)
	if len(l.posted) == 1 {
		_ = l.ep.SetReadDeadline(past) // ends the wait; the file is open until closed is set
	}
	return true
}

var past = time.Unix(1, 0)

// Close ends the loop. Its handlers are called no more; sockets stay open.
func (l *Loop) Close() {
	l.mu.Lock()
	closed := l.closed
	l.closed = true
	if !closed {
		_ = l.ep.SetReadDeadline(past)
	}
	l.mu.Unlock()
	<-l.done
}

func (l *Loop) run() {
	defer close(l.done)
	defer func() { _ = l.ep.Close() }() // the loop was its only user
	for {
		l.arm() // before the queue is read, so that a later Post ends the wait that follows
		if !l.drain() {
			return
		}
		err := l.raw.Read(l.poll)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			panic("loop: wait for sockets: " + err.Error()) // no one else uses the file: a bug
		}
		l.expire()
	}
}

// drain calls the functions that were posted; false: the loop is closed.
func (l *Loop) drain() bool {
	l.mu.Lock()
	todo, closed := l.posted, l.closed
	l.posted = nil
	l.mu.Unlock()
	for _, f := range todo {
		l.guard(f)
	}
	l.rearm()
	return !closed
}

// arm sets the time at which Go's poller ends the wait: when the next watch is due.
func (l *Loop) arm() {
	l.wheel.find()
	l.armed = l.wheel.due()
	var at time.Time
	if l.armed != 0 {
		at = l.base.Add(time.Duration(l.armed))
	}
	_ = l.ep.SetReadDeadline(at) // the file is open
}

// rearm ends the wait earlier, if a watch is now due before its end.
func (l *Loop) rearm() {
	due := l.wheel.due()
	if due == 0 || l.armed != 0 && l.armed <= due {
		return
	}
	l.mu.Lock() // Post and Close end the wait at once: that must not be overwritten
	defer l.mu.Unlock()
	if len(l.posted) == 0 && !l.closed {
		l.armed = due
		_ = l.ep.SetReadDeadline(l.base.Add(time.Duration(due)))
	}
}

// poll asks which sockets are ready and calls their handlers, and after them the handlers that had not finished in their last
// turn. It returns true if there may be more to do. Posted functions and expired timers then have their turn first.
func (l *Loop) poll(uintptr) bool {
	ready, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(l.fd), uintptr(unsafe.Pointer(&l.events[0])), uintptr(len(l.events)), 0,
		0, 0)
	if errno != 0 && errno != unix.EINTR {
		panic("loop: epoll_wait: " + errno.Error()) // no one else uses the descriptor: a bug
	}
	if errno != 0 {
		return true // a signal interrupted the call (EINTR), so poll is called again
	}
	n, now := int(ready), time.Now()
	l.turn, l.again = l.again, l.turn[:0]
	for i := range l.events[:n] {
		ev := &l.events[i]
		w := l.watches[uint32(ev.Fd)]
		if w == nil || w.age != uint32(ev.Pad) {
			continue
		}
		ended := ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
		if w.again {
			w.ended = w.ended || ended // its turn comes below
			continue
		}
		l.ready(w, ended, now)
	}
	for i, w := range l.turn {
		l.turn[i] = nil
		if w.again = false; w.loop != nil { // else a handler has removed it
			l.ready(w, w.ended, now)
		}
	}
	if n > len(l.events)/8 || len(l.again) > 0 {
		runtime.Gosched() // many sockets are busy, or one is very busy: the rest of the program has its turn between two rounds
	}
	l.rearm()
	return n == len(l.events) || len(l.again) > 0
}

func (l *Loop) ready(w *Watch, ended bool, now time.Time) {
	defer l.recovered()
	w.handler.Ready(w, ended, now)
}

// expire calls the handlers of watches whose time has come.
func (l *Loop) expire() {
	now := time.Now()
	l.expired = l.wheel.expire(l.expired[:0], int64(now.Sub(l.base)))
	for i, w := range l.expired {
		l.expired[i] = nil
		if w.loop != nil { // else another handler has removed it
			l.guard(func() { w.handler.Expired(w, now) })
		}
	}
}

func (l *Loop) guard(f func()) {
	defer l.recovered()
	f()
}

// recovered logs a panic of a handler, so that the loop goes on with the others.
func (l *Loop) recovered() {
	if v := recover(); v != nil {
		l.log.Error("loop: panic in a handler", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
}

// Add watches a non-blocking socket: for room to write if write is set, else for bytes to read.
func (l *Loop) Add(fd int, h Handler, write bool) (*Watch, error) {
	w := &Watch{loop: l, handler: h, fd: fd}
	if n := len(l.free); n > 0 {
		w.index = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		w.index = uint32(len(l.watches))
		l.watches = append(l.watches, nil)
	}
	l.ages++
	w.age = l.ages
	if err := w.control(unix.EPOLL_CTL_ADD, interest(write)); err != nil {
		l.free = append(l.free, w.index)
		return nil, err
	}
	l.watches[w.index] = w
	return w, nil
}

func interest(write bool) uint32 {
	if write {
		return unix.EPOLLOUT
	}
	return unix.EPOLLIN | unix.EPOLLRDHUP
}

func (w *Watch) control(op int, events uint32) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(w.index), Pad: int32(w.age)}
	return unix.EpollCtl(w.loop.fd, op, w.fd, &ev)
}

// Loop is the loop that watches the socket; nil after Remove.
func (w *Watch) Loop() *Loop { return w.loop }

// Again makes the loop call Ready once more, after all sockets that are ready now, even if nothing else arrives. A handler
// that leaves bytes in the socket asks for it.
func (w *Watch) Again(ended bool) {
	w.ended = ended
	if !w.again {
		w.again = true
		w.loop.again = append(w.loop.again, w)
	}
}

// Pause stops calls of Ready until Resume. Bytes that come in that time stay in the kernel.
func (w *Watch) Pause() error { return w.control(unix.EPOLL_CTL_MOD, 0) }

// Resume undoes Pause. Ready is called at once if bytes are there.
func (w *Watch) Resume() error { return w.control(unix.EPOLL_CTL_MOD, interest(false)) }

// Wake has Expired called once, at a time or soon after it. It replaces the time that was set before.
// The zero time: Expired is not called.
func (w *Watch) Wake(at time.Time) {
	if w.at = 0; at.IsZero() {
		return // the wheel drops the watch when it looks at it
	}
	w.at = max(1, int64(at.Sub(w.loop.base)))
	w.loop.wheel.set(w)
}

// Remove ends the watch. The socket stays open.
func (w *Watch) Remove() {
	if w.loop != nil {
		_ = w.control(unix.EPOLL_CTL_DEL, 0) // the kernel has the watch, so this does not fail
		w.Forget()
	}
}

// Forget is Remove for a socket that was closed: the kernel has ended the watch then.
func (w *Watch) Forget() {
	l := w.loop
	if l == nil {
		return
	}
	l.wheel.remove(w)
	l.watches[w.index] = nil
	l.free = append(l.free, w.index)
	w.loop = nil
}

// Read reads from the socket. It returns 0 without an error if there are no bytes now, and io.EOF at the end.
func (w *Watch) Read(p []byte) (int, error) { return socket.Read(uintptr(w.fd), p) }
