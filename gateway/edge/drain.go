package edge

import (
	"context"
	"fmt"
	"time"
)

const (
	drainPoll    = 20 * time.Millisecond
	handlerGrace = 5 * time.Second // for handlers to notice that their connection was cut
)

// Drain accepts no new connections and requests. Running requests may finish until ctx ends. Then
// Drain cuts the remaining connections, which their handlers notice by Gone, and returns an error
// with their number. Call it only once per server.
func Drain(ctx context.Context, s *Server, l *Listener) error {
	s.stopping.Store(true)
	l.closeIdle()
	// A second Shutdown would return nil at once although connections are open.
	if err := s.ShutdownWithContext(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("drain: %w", err)
	}
	// fasthttp stops counting a connection before it closes it, so the listener's count must reach 0,
	// too.
	if awaitIdle(ctx, s, l) {
		return nil
	}
	cut := l.CloseConns()
	// ctx has ended.
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), handlerGrace)
	defer cancel()
	if !awaitIdle(grace, s, l) {
		return fmt.Errorf("drain: %w: %d connections cut, %d handlers still run after %v", ctx.Err(), cut, s.GetCurrentConcurrency(),
			handlerGrace)
	}
	return fmt.Errorf("drain: %w: %d connections cut; allow more time if their requests mattered", ctx.Err(), cut)
}

// awaitIdle waits until no connection is open and no handler runs.
func awaitIdle(ctx context.Context, s *Server, l *Listener) bool {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for l.Stats().Open > 0 || s.GetCurrentConcurrency() > 0 {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
	return true
}
