// Package stand makes the core of a reference engine stand still for a while, as a
// compilation, a stopped process or a stalled host does, while its API server answers on.
package stand

import (
	"context"
	"sync"
	"time"
)

// Gate stops the work of an engine's core: all of it waits there. The zero Gate is open.
type Gate struct {
	mu    sync.Mutex
	until time.Time
	moved chan struct{} // closed when until is another time; nil: nothing waits
}

// Close makes the core stand still for so long from now on. With 0 the core goes on.
func (g *Gate) Close(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.until = time.Now().Add(d)
	if g.moved != nil {
		close(g.moved)
		g.moved = nil
	}
}

// Wait returns when the core does not stand still, or ctx has ended. stood says that it had to
// wait.
func (g *Gate) Wait(ctx context.Context) (stood bool) {
	for {
		left, moved := g.left()
		if left <= 0 || ctx.Err() != nil {
			return stood
		}
		stood = true
		t := time.NewTimer(left)
		select {
		case <-t.C:
		case <-moved:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// Stands says whether the core stands still now.
func (g *Gate) Stands() bool {
	left, _ := g.left()
	return left > 0
}

func (g *Gate) left() (time.Duration, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.until.IsZero() {
		return 0, nil
	}
	if g.moved == nil {
		g.moved = make(chan struct{})
	}
	return time.Until(g.until), g.moved
}
