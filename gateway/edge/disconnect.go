package edge

import (
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"
)

// A Disconnect reports, once, that a client has left: one that has a connection, or one that
// shares the connection of another.
type Disconnect struct {
	log *zap.Logger

	mu     sync.Mutex // held while onGone runs
	left   bool
	onGone func()
	gone   chan struct{}
	goneAt time.Time // set before gone is closed
}

// NewDisconnect is that of a client who is there.
func NewDisconnect(log *zap.Logger) *Disconnect {
	return &Disconnect{log: log, gone: make(chan struct{})}
}

// Gone is closed once the client has left or the connection was closed here.
func (d *Disconnect) Gone() <-chan struct{} { return d.gone }

// Left says whether the client has left.
func (d *Disconnect) Left() bool {
	select {
	case <-d.gone:
		return true
	default:
		return false
	}
}

// GoneAt is when the client was seen to leave. Ask once Gone is closed.
func (d *Disconnect) GoneAt() time.Time { return d.goneAt }

// OnGone has f called once the client leaves, at once if it has left already,
// and replaces what was set before. f runs under the lock of the Disconnect, on the
// goroutine that watches all connections: it must neither block nor call a
// method of this Disconnect; closing the upstream connection is what it is for.
//
// No callback runs any more when OnGone(nil) has returned. Call it before the
// upstream connection goes back to its pool, else a late FIN of this client
// closes somebody else's stream.
func (d *Disconnect) OnGone(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onGone = f
	if d.left {
		d.call()
	}
}

// Leave tells everyone who waits that the client is gone. Idempotent.
func (d *Disconnect) Leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left {
		return
	}
	d.left, d.goneAt = true, time.Now()
	close(d.gone)
	d.call()
}

// call runs the callback. The caller holds d.mu.
func (d *Disconnect) call() {
	if d.onGone == nil {
		return
	}
	defer func() { // on the watcher's goroutine a panic would end the process
		if v := recover(); v != nil {
			d.log.Error("edge: panic in an OnGone callback", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
		}
	}()
	d.onGone()
}

// awaited says whether somebody is to be told when the client leaves, which it has not.
func (d *Disconnect) awaited() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.onGone != nil && !d.left
}
