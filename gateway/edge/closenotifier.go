package edge

import (
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"
)

// A CloseNotifier reports once that a client has left. Each connection has one. Each part of a request that the proxy has
// split has one, too.
type CloseNotifier struct {
	log *zap.Logger

	mu      sync.Mutex // held while onGone runs
	hasLeft bool
	onGone  func()
	gone    chan struct{}
	goneAt  time.Time // when MarkGone was called first; set before gone is closed
}

// NewCloseNotifier returns the CloseNotifier of a client that has not left. log gets the panics of callbacks.
func NewCloseNotifier(log *zap.Logger) *CloseNotifier {
	return &CloseNotifier{log: log, gone: make(chan struct{})}
}

// Gone returns a channel that is closed when the client leaves, or when the proxy closes the connection.
func (d *CloseNotifier) Gone() <-chan struct{} { return d.gone }

// Left says whether Gone is closed: the client has left, or the proxy has closed the connection.
func (d *CloseNotifier) Left() bool {
	select {
	case <-d.gone:
		return true
	default:
		return false
	}
}

// GoneAt returns the time at which the proxy noticed that the client had left. Call it only after Gone is closed.
func (d *CloseNotifier) GoneAt() time.Time { return d.goneAt }

// OnGone sets f as the callback that runs when the client leaves, in place of an earlier callback. If the client has left already, f runs
// at once. f runs under the lock of the CloseNotifier, usually on the goroutine that watches all connections, so it must not block and must
// not call a method of this CloseNotifier.
//
// After OnGone(nil) has returned, no callback runs any more. Until then, f may run although the engine call that it aborts has ended and
// the call's connection serves another request. The methods of engine.Call do not harm that request.
func (d *CloseNotifier) OnGone(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onGone = f
	if d.hasLeft {
		d.runCallback()
	}
}

// MarkGone closes Gone and calls the callback of OnGone. Further calls do nothing.
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

// runCallback calls onGone, if it is set. The caller holds d.mu.
func (d *CloseNotifier) runCallback() {
	if d.onGone == nil {
		return
	}
	defer func() { // a panic on the watcher's goroutine would end the process
		if v := recover(); v != nil {
			d.log.Error("edge: panic in an OnGone callback", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
		}
	}()
	d.onGone()
}

// hasPendingCallback says whether a callback of OnGone is set that has not run, because the client has not left.
func (d *CloseNotifier) hasPendingCallback() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.onGone != nil && !d.hasLeft
}
