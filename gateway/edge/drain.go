package edge

import (
	"context"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"
)

const (
	drainPoll = 20 * time.Millisecond
	cutGrace  = 5 * time.Second // for handlers to notice that their connection was cut
)

// Drain stops s: no new connection, no new request on an open one, and
// whatever runs may finish until ctx ends. What is left then is cut, handlers
// see Gone, and the error says how many there were. Call it once a server.
func Drain(ctx context.Context, s *fasthttp.Server, l *Listener) error {
	// One call only: a second Shutdown answers nil at once although connections are open.
	err := s.ShutdownWithContext(ctx)
	if err == nil || ctx.Err() == nil {
		return err
	}
	cut := l.CloseConns()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), cutGrace)
	defer cancel()
	for s.GetOpenConnectionsCount() > 0 || s.GetCurrentConcurrency() > 0 {
		select {
		case <-grace.Done():
			return fmt.Errorf("drain: %w: %d connections cut, %d handlers still run after %v", err, cut, s.GetCurrentConcurrency(), cutGrace)
		case <-time.After(drainPoll):
		}
	}
	return fmt.Errorf("drain: %w: %d connections cut; allow more time if their requests mattered", err, cut)
}
