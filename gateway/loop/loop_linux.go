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
	Out    []byte         // scratch memory for bytes that a handler writes, valid until its call returns

	log    *zap.Logger
	base   time.Time
	fd     int // the descriptor of ep; stored, because a call of ep.Fd would make the descriptor blocking
	ep     *os.File
	raw    syscall.RawConn
	events [256]unix.EpollEvent

	watches        []*Watch // by Watch.index; nil: the index is free
	nextRound      []*Watch // watches that called CallAgain: the next round (call of pollAndHandle) calls them
	thisRound      []*Watch // watches that called CallAgain before this round, which calls them after the sockets that are ready
	free           []uint32 // indexes in watches that are free
	lastGeneration uint32   // the generation of the newest watch
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
	generation uint32 // number of the watch: an event with another number is meant for an earlier watch of this index
	again      bool   // the watch is in the list nextRound or thisRound of the loop, and is yet to be called
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
	if err := unix.SetNonblock(fd, true); err != nil { // needed for os.NewFile to register fd with Go's poller
		return nil, errors.Join(err, unix.Close(fd))
	}
	l := &Loop{log: log, base: time.Now(), fd: fd, ep: os.NewFile(uintptr(fd), "epoll"), done: make(chan struct{})}
	l.wheel.cursor = 1 // because in Watch.tick 0 means that the watch is in no slot
	if l.raw, err = l.ep.SyscallConn(); err != nil {
		return nil, errors.Join(err, l.ep.Close())
	}
	if err := l.ep.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("an epoll instance cannot be watched by Go's poller: %w", err), l.ep.Close())
	}
	go l.run()
	return l, nil
}

// Post makes the loop's goroutine call f. It never blocks. After Close it returns false, and f is not called.
func (l *Loop) Post(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.posted = append(l.posted, f)
	if len(l.posted) == 1 { // for the first function only: the wait is ended already when others follow
		_ = l.ep.SetReadDeadline(longAgo) // ends the wait; cannot fail, because the file is open until closed is set
	}
	return true
}

var longAgo = time.Unix(1, 0) // a deadline that ends a wait at once

// Close ends the loop. It waits until the loop has called all functions that were posted before. No handler is called after that; the
// sockets stay open.
func (l *Loop) Close() {
	l.mu.Lock()
	alreadyClosed := l.closed
	l.closed = true
	if !alreadyClosed {
		_ = l.ep.SetReadDeadline(longAgo) // ends the wait for sockets at once, so that the loop sees closed
	}
	l.mu.Unlock()
	<-l.done
}

// run is the loop's goroutine. In turn, it calls posted functions, the handlers of sockets that are ready, and the handlers whose timers
// have expired.
func (l *Loop) run() {
	defer close(l.done)
	defer func() { _ = l.ep.Close() }() // the descriptor of epoll, which only this goroutine uses
	for {
		l.setWaitEnd() // before the queue is read, so that a later Post ends the wait that follows
		if !l.runPosted() {
			return
		}
		// Read calls pollAndHandle, and whenever it returns false, waits until a socket is ready or the wait's end has come.
		err := l.raw.Read(l.pollAndHandle)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // a deadline means that a watch is due, or Post or Close was called
			panic("loop: wait for sockets: " + err.Error()) // cannot happen, because only the loop uses the file
		}
		l.callExpired()
	}
}

// runPosted calls the posted functions. It returns false if the loop is closed.
func (l *Loop) runPosted() bool {
	l.mu.Lock()
	todo, closed := l.posted, l.closed
	l.posted = nil
	l.mu.Unlock()
	for _, f := range todo {
		l.guard(f)
	}
	l.shortenWait() // the end of the next wait was set before these functions ran, and they may have called WakeAt
	return !closed
}

// setWaitEnd sets the time at which Go's poller ends the next wait for sockets: when the next watch is due in the wheel. Without such a
// watch, the wait has no end.
func (l *Loop) setWaitEnd() {
	l.wheel.findFirst()
	l.waitEnd = l.wheel.due()
	var at time.Time
	if l.waitEnd != 0 {
		at = l.base.Add(time.Duration(l.waitEnd))
	}
	_ = l.ep.SetReadDeadline(at) // cannot fail, because the file is open
}

// shortenWait makes the wait for sockets end earlier if a watch is now due before its end. The wait ends at the read deadline of the epoll
// descriptor (ep).
func (l *Loop) shortenWait() {
	due := l.wheel.due() // 0: no watch is due at any time
	endsInTime := l.waitEnd != 0 && l.waitEnd <= due
	if due == 0 || endsInTime {
		return
	}
	l.mu.Lock() // Post and Close set a deadline in the past, which must not be overwritten
	defer l.mu.Unlock()
	if len(l.posted) == 0 && !l.closed {
		l.waitEnd = due
		_ = l.ep.SetReadDeadline(l.base.Add(time.Duration(due))) // cannot fail, because the file is open
	}
}

// pollAndHandle asks the kernel which sockets are ready, and calls their handlers. After them it calls the handlers that asked for another
// turn (CallAgain). It returns true if the loop must not wait, because there may be more to do. run then calls posted functions and
// handlers whose time has come before pollAndHandle is called once more. RawConn.Read, through which run calls it, passes the descriptor of
// epoll, which l.fd also has.
func (l *Loop) pollAndHandle(uintptr) bool {
	n, interrupted := l.poll()
	if interrupted {
		return true // so that pollAndHandle is called again
	}
	now := time.Now()
	l.thisRound, l.nextRound = l.nextRound, l.thisRound[:0] // the array of thisRound is free, because its watches were called
	l.handleReady(n, now)
	l.handleAgain(now)
	moreToCall := len(l.nextRound) > 0
	manyReady := n > len(l.events)/8 // more than 32 sockets: their handlers have taken long, even if the kernel has reported all
	isBusy := manyReady || moreToCall
	if isBusy { // the other goroutines get a turn between two rounds
		runtime.Gosched()
	}
	l.shortenWait()                      // the end of the wait was set before the handlers ran, and they may have called WakeAt
	moreMayBeReady := n == len(l.events) // the kernel has filled all events, and may have more than there was room for
	return moreMayBeReady || moreToCall
}

// poll asks the kernel which sockets are ready, without waiting. The first n of l.events then say so. interrupted says that a signal came
// first (EINTR), so that nothing is known.
func (l *Loop) poll() (n int, interrupted bool) {
	// With a timeout of 0 the call never blocks, so a raw system call is enough, of which Go's scheduler is not told.
	const timeout, signalMask, maskSize = 0, 0, 0
	ready, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(l.fd), uintptr(unsafe.Pointer(&l.events[0])), uintptr(len(l.events)),
		timeout, signalMask, maskSize)
	if errno != 0 && errno != unix.EINTR {
		panic("loop: epoll_wait: " + errno.Error()) // cannot happen, because only the loop uses the descriptor
	}
	if errno != 0 {
		return 0, true
	}
	return int(ready), false
}

// handleReady calls the handlers of the n sockets that poll has found ready. It leaves out those that handleAgain calls in the same round.
func (l *Loop) handleReady(n int, now time.Time) {
	for i := range l.events[:n] {
		ev := &l.events[i]
		w := l.watches[uint32(ev.Fd)]                   // Fd and Pad have what epollCtl has put there: the index and the generation
		if w == nil || w.generation != uint32(ev.Pad) { // another handler has removed the watch, and a newer one may have its index
			continue
		}
		ended := ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
		if w.again {
			w.ended = w.ended || ended // the kernel reports the end only once, so it is kept for the call
			continue
		}
		l.callReady(w, ended, now)
	}
}

// handleAgain calls the handlers that asked for another turn (CallAgain) before this round. If a handler asks once more, its watch gets
// into the list nextRound, so thisRound does not grow meanwhile.
func (l *Loop) handleAgain(now time.Time) {
	for i, w := range l.thisRound {
		l.thisRound[i] = nil // the array is used again, and must not keep a watch that has ended
		w.again = false
		if w.loop != nil { // nil: another handler has removed the watch
			l.callReady(w, w.ended, now)
		}
	}
}

// callReady calls the handler of a watch whose socket is ready. It recovers a panic of the handler, so that the loop's other watches go on.
func (l *Loop) callReady(w *Watch, ended bool, now time.Time) {
	defer l.recoverAndLog()
	w.handler.Ready(w, ended, now)
}

// callExpired calls Expired of the handlers whose watches are due (WakeAt).
func (l *Loop) callExpired() {
	now := time.Now()
	l.expired = l.wheel.expire(l.expired[:0], int64(now.Sub(l.base)))
	for i, w := range l.expired {
		l.expired[i] = nil
		if w.loop != nil { // nil: another handler has removed the watch
			l.guard(func() { w.handler.Expired(w, now) })
		}
	}
}

// guard calls f, and recovers its panic.
func (l *Loop) guard(f func()) {
	defer l.recoverAndLog()
	f()
}

// recoverAndLog is deferred around a call of a handler. If the handler panics, it logs the panic, and the loop goes on with the others.
func (l *Loop) recoverAndLog() {
	if v := recover(); v != nil {
		l.log.Error("loop: panic in a handler", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
}

// Add watches a non-blocking socket. If write is set, Ready is called when the socket can be written, otherwise when it can be read.
func (l *Loop) Add(fd int, h Handler, write bool) (*Watch, error) {
	w := &Watch{loop: l, handler: h, fd: fd}
	if n := len(l.free); n > 0 { // the index that became free last is used again
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

// epollEvents are the events that epoll reports for a socket that is to be written, or read.
func epollEvents(write bool) uint32 {
	if write {
		return unix.EPOLLOUT
	}
	return unix.EPOLLIN | unix.EPOLLRDHUP
}

// epollCtl tells the kernel what the watch is to report (op). The kernel reports each change only once (EPOLLET), with the index and the
// generation of the watch.
func (w *Watch) epollCtl(op int, events uint32) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(w.index), Pad: int32(w.generation)}
	return unix.EpollCtl(w.loop.fd, op, w.fd, &ev)
}

// Loop is the loop that watches the socket; nil after Remove.
func (w *Watch) Loop() *Loop { return w.loop }

// CallAgain makes the loop call Ready once more, after all sockets that are ready now, even if no more bytes arrive. A handler that leaves
// bytes in the socket must call it, because the kernel reports these bytes only once. ended is the argument of the present call of Ready.
// The next call gets it, too, because the kernel also reports only once that the other side has ended the connection.
func (w *Watch) CallAgain(ended bool) {
	w.ended = ended
	if !w.again {
		w.again = true
		w.loop.nextRound = append(w.loop.nextRound, w)
	}
}

// Pause stops calls of Ready until Resume. Bytes that arrive in the meantime stay in the kernel.
func (w *Watch) Pause() error { return w.epollCtl(unix.EPOLL_CTL_MOD, 0) }

// Resume ends Pause. Ready is called at once if there are bytes to read.
func (w *Watch) Resume() error { return w.epollCtl(unix.EPOLL_CTL_MOD, epollEvents(false)) }

// WakeAt makes the loop call Expired once, at the given time or soon after it. It replaces the time of an earlier WakeAt. With the zero
// time Expired is not called.
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
		_ = w.epollCtl(unix.EPOLL_CTL_DEL, 0) // cannot fail, because the kernel knows the watch
		w.Forget()
	}
}

// Forget is Remove for a socket that was closed, so that the kernel has already ended the watch.
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
