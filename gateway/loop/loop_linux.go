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
	Buffer [64 << 10]byte // scratch memory for a handler, valid until its call returns
	Out    []byte         // scratch for a handler, until its call returns

	log    *zap.Logger
	base   time.Time
	fd     int // stored, because ep.Fd would make it blocking
	ep     *os.File
	raw    syscall.RawConn
	events [256]unix.EpollEvent

	watches        []*Watch // by Watch.index; nil: the index is free
	nextRound      []*Watch // watches that called CallAgain
	thisRound      []*Watch // those of the round before, called after the sockets that are ready
	free           []uint32 // indexes in watches that are free
	lastGeneration uint32
	wheel          wheel
	expired        []*Watch
	waitEnd        int64 // when Go's poller ends the wait for sockets, in ns since base; 0: never

	mu     sync.Mutex
	posted []func() // functions that the goroutine of run has to call
	closed bool
	done   chan struct{}
}

// A Watch is a socket in a loop. Only the loop's goroutine may use it.
type Watch struct {
	loop       *Loop
	handler    Handler
	fd         int
	index      uint32
	generation uint32 // an event with another number is for an earlier watch of this index
	again      bool   // in nextRound or thisRound, and yet to be called
	ended      bool   // argument ended of the call of Ready that CallAgain has asked for

	at         int64 // when Expired is to be called, in ns since the loop's base; 0: never
	tick       int64 // the tick of its slot in the wheel; 0: the watch is in no slot
	prev, next *Watch
}

// New starts a loop, whose goroutine runs until Close.
func New(log *zap.Logger) (*Loop, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w; raise the limit of open files", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // else os.NewFile does not let Go poll fd
		return nil, errors.Join(err, unix.Close(fd))
	}
	l := &Loop{log: log, base: time.Now(), fd: fd, ep: os.NewFile(uintptr(fd), "epoll"), done: make(chan struct{})}
	l.wheel.cursor = 1 // Watch.tick 0 means no slot
	if l.raw, err = l.ep.SyscallConn(); err != nil {
		return nil, errors.Join(err, l.ep.Close())
	}
	if err := l.ep.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("an epoll instance cannot be watched by Go's poller: %w", err), l.ep.Close())
	}
	go l.run()
	return l, nil
}

// Post makes the loop's goroutine call f, and never blocks. After Close it returns false.
func (l *Loop) Post(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.posted = append(l.posted, f)
	if len(l.posted) == 1 { // else the wait is ended already
		_ = l.ep.SetReadDeadline(longAgo) // cannot fail: the file is open until closed is set
	}
	return true
}

var longAgo = time.Unix(1, 0) // ends a wait at once

// Close waits until the loop has called all posted functions. No handler is called after that; the
// sockets stay open.
func (l *Loop) Close() {
	l.mu.Lock()
	alreadyClosed := l.closed
	l.closed = true
	if !alreadyClosed {
		_ = l.ep.SetReadDeadline(longAgo)
	}
	l.mu.Unlock()
	<-l.done
}

func (l *Loop) run() {
	defer close(l.done)
	defer func() { _ = l.ep.Close() }()
	for {
		l.setWaitEnd() // before the queue is read, so that a later Post ends the wait that follows
		if !l.runPosted() {
			return
		}
		// Read waits whenever pollAndHandle returns false, until a socket is ready, a watch is due, or
		// Post or Close is called.
		err := l.raw.Read(l.pollAndHandle)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // a deadline is no failure
			panic("loop: wait for sockets: " + err.Error()) // cannot happen: only the loop uses the file
		}
		l.callExpired()
	}
}

// runPosted returns false if the loop is closed.
func (l *Loop) runPosted() bool {
	l.mu.Lock()
	todo, closed := l.posted, l.closed
	l.posted = nil
	l.mu.Unlock()
	for _, f := range todo {
		l.guard(f)
	}
	l.shortenWait() // the functions may have called WakeAt after the end of the wait was set
	return !closed
}

// The wait ends when the next watch is due.
func (l *Loop) setWaitEnd() {
	l.wheel.findFirst()
	l.waitEnd = l.wheel.due()
	var at time.Time
	if l.waitEnd != 0 {
		at = l.base.Add(time.Duration(l.waitEnd))
	}
	_ = l.ep.SetReadDeadline(at) // cannot fail: the file is open
}

func (l *Loop) shortenWait() {
	due := l.wheel.due() // 0: never
	endsInTime := l.waitEnd != 0 && l.waitEnd <= due
	if due == 0 || endsInTime {
		return
	}
	l.mu.Lock() // Post and Close set a deadline in the past, which must not be overwritten
	defer l.mu.Unlock()
	if len(l.posted) == 0 && !l.closed {
		l.waitEnd = due
		_ = l.ep.SetReadDeadline(l.base.Add(time.Duration(due))) // cannot fail: the file is open
	}
}

// pollAndHandle calls the handlers of ready sockets, then those of CallAgain. It returns true if
// the loop must not wait, because there may be more to do. The argument is the descriptor, as l.fd.
func (l *Loop) pollAndHandle(uintptr) bool {
	n, interrupted := l.poll()
	if interrupted {
		return true
	}
	now := time.Now()
	l.thisRound, l.nextRound = l.nextRound, l.thisRound[:0] // the watches of thisRound were called
	l.handleReady(n, now)
	l.handleAgain(now)
	moreToCall := len(l.nextRound) > 0
	manyReady := n > len(l.events)/8 // more than 32: their handlers have taken long
	isBusy := manyReady || moreToCall
	if isBusy { // the other goroutines get a turn
		runtime.Gosched()
	}
	l.shortenWait()                      // the handlers may have called WakeAt
	moreMayBeReady := n == len(l.events) // there may be more than there was room for
	return moreMayBeReady || moreToCall
}

// poll asks the kernel without waiting; interrupted (EINTR): nothing is known.
func (l *Loop) poll() (n int, interrupted bool) {
	// With a timeout of 0 the call never blocks, so Go's scheduler need not be told.
	const timeout, signalMask, maskSize = 0, 0, 0
	ready, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(l.fd), uintptr(unsafe.Pointer(&l.events[0])), uintptr(len(l.events)),
		timeout, signalMask, maskSize)
	if errno != 0 && errno != unix.EINTR {
		panic("loop: epoll_wait: " + errno.Error()) // cannot happen: only the loop uses the descriptor
	}
	if errno != 0 {
		return 0, true
	}
	return int(ready), false
}

// It leaves out the watches that handleAgain calls in the same round.
func (l *Loop) handleReady(n int, now time.Time) {
	for i := range l.events[:n] {
		ev := &l.events[i]
		// epollCtl has put the index and the generation there.
		w := l.watches[uint32(ev.Fd)]
		if w == nil || w.generation != uint32(ev.Pad) {
			// Another handler has removed the watch, and a newer one may have its index.
			continue
		}
		ended := ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
		if w.again {
			w.ended = w.ended || ended // the kernel reports the end only once
			continue
		}
		l.callReady(w, ended, now)
	}
}

// If a handler asks once more, its watch gets into nextRound, so thisRound does not grow.
func (l *Loop) handleAgain(now time.Time) {
	for i, w := range l.thisRound {
		l.thisRound[i] = nil // must not keep a watch that has ended
		w.again = false
		if w.loop != nil { // else removed by another handler
			l.callReady(w, w.ended, now)
		}
	}
}

// A panic of the handler must not stop the loop's other watches.
func (l *Loop) callReady(w *Watch, ended bool, now time.Time) {
	defer l.recoverAndLog()
	w.handler.Ready(w, ended, now)
}

func (l *Loop) callExpired() {
	now := time.Now()
	l.expired = l.wheel.expire(l.expired[:0], int64(now.Sub(l.base)))
	for i, w := range l.expired {
		l.expired[i] = nil
		if w.loop != nil { // else removed by another handler
			l.guard(func() { w.handler.Expired(w, now) })
		}
	}
}

func (l *Loop) guard(f func()) {
	defer l.recoverAndLog()
	f()
}

func (l *Loop) recoverAndLog() {
	if v := recover(); v != nil {
		l.log.Error("loop: panic in a handler", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
}

// Add watches a non-blocking socket, for writing if write is set, else for reading.
func (l *Loop) Add(fd int, h Handler, write bool) (*Watch, error) {
	w := &Watch{loop: l, handler: h, fd: fd}
	if n := len(l.free); n > 0 {
		w.index = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		w.index = uint32(len(l.watches))
		l.watches = append(l.watches, nil)
	}
	l.lastGeneration++
	w.generation = l.lastGeneration
	if err := w.epollCtl(unix.EPOLL_CTL_ADD, epollEvents(write)); err != nil {
		l.free = append(l.free, w.index)
		return nil, err
	}
	l.watches[w.index] = w
	return w, nil
}

func epollEvents(write bool) uint32 {
	if write {
		return unix.EPOLLOUT
	}
	return unix.EPOLLIN | unix.EPOLLRDHUP
}

// The kernel reports each change only once (EPOLLET).
func (w *Watch) epollCtl(op int, events uint32) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(w.index), Pad: int32(w.generation)}
	return unix.EpollCtl(w.loop.fd, op, w.fd, &ev)
}

// Loop returns nil after Remove.
func (w *Watch) Loop() *Loop { return w.loop }

// CallAgain makes the loop call Ready once more, after all sockets that are ready now. A handler
// that leaves bytes in the socket must call it, with the ended of the present call, because the
// kernel reports both only once.
func (w *Watch) CallAgain(ended bool) {
	w.ended = ended
	if !w.again {
		w.again = true
		w.loop.nextRound = append(w.loop.nextRound, w)
	}
}

// Pause stops calls of Ready until Resume. Bytes stay in the kernel.
func (w *Watch) Pause() error { return w.epollCtl(unix.EPOLL_CTL_MOD, 0) }

// Resume ends Pause. Ready is called at once if there are bytes to read.
func (w *Watch) Resume() error { return w.epollCtl(unix.EPOLL_CTL_MOD, epollEvents(false)) }

// WakeAt makes the loop call Expired once, at the given time or soon after. It replaces an earlier
// WakeAt; zero: never.
func (w *Watch) WakeAt(at time.Time) {
	w.at = 0
	if at.IsZero() {
		return // the wheel drops the watch at its tick
	}
	w.at = max(1, int64(at.Sub(w.loop.base))) // 0 would mean never
	w.loop.wheel.schedule(w)
}

// Remove ends the watch. The socket stays open.
func (w *Watch) Remove() {
	if w.loop != nil {
		_ = w.epollCtl(unix.EPOLL_CTL_DEL, 0) // cannot fail: the kernel knows the watch
		w.Forget()
	}
}

// Forget is Remove for a closed socket, whose watch the kernel has already ended.
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

// Read returns 0 without an error if there are no bytes now, and io.EOF at the end.
func (w *Watch) Read(p []byte) (int, error) { return socket.Read(uintptr(w.fd), p) }
