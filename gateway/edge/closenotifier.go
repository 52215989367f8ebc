package edge

import (
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"
)

// A CloseNotifier reports once that a client has left. Each connection, and each part of a request
// that was split, has one.
type CloseNotifier struct {
	log *zap.Logger

	mu      sync.Mutex // held while onGone runs
	hasLeft bool
	onGone  func()
	gone    chan struct{}
	goneAt  time.Time // when MarkGone was called first; set before gone is closed
}

// NewCloseNotifier takes a log for the panics of callbacks.
func NewCloseNotifier(log *zap.Logger) *CloseNotifier {
	return &CloseNotifier{log: log, gone: make(chan struct{})}
}

// Gone is closed when the client leaves, or when the proxy closes the connection.
func (d *CloseNotifier) Gone() <-chan struct{} { return d.gone }

// Left says whether Gone is closed.
func (d *CloseNotifier) Left() bool {
	select {
	case <-d.gone:
		return true
	default:
		return false
	}
}

// GoneAt is when the proxy noticed that the client had left. Call it only after Gone is closed.
func (d *CloseNotifier) GoneAt() time.Time { return d.goneAt }

// OnGone sets the callback that runs when the client leaves, or at once if it has left. f runs
// under the lock of the CloseNotifier, usually on the goroutine that watches all connections, so it
// must not block and must not call a method of this CloseNotifier.
//
// After OnGone(nil) has returned, no callback runs any more. Until then, f may run although the
// engine call that it aborts has ended and the call's connection serves another request, which the
// methods of engine.Call do not harm.
func (d *CloseNotifier) OnGone(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onGone = f
	if d.hasLeft {
		d.runCallback()
	}
}

// MarkGone closes Gone and calls the callback of OnGone, once.
func (d *CloseNotifier) MarkGone() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hasLeft {
		return
	}
	d.hasLeft, d.goneAt = true, time.Now()
	close(d.gone)
	d.runCallback()
}

// The caller holds d.mu.
func (d *CloseNotifier) runCallback() {
	if d.onGone == nil {
		return
	}
	defer func() { // on the watcher's goroutine, it would end the process
		if v := recover(); v != nil {
			d.log.Error("edge: panic in an OnGone callback", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
		}
	}()
	d.onGone()
}

func (d *CloseNotifier) hasPendingCallback() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.onGone != nil && !d.hasLeft
}
