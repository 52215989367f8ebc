package fleet

import (
	"fmt"
	"time"

	"evenkeel/gateway/fleet/roster"
)

// Drain stops new work for an engine, host:port, or for one of its ranks, host:port/rank. If limit is above 0,
// requests that still run after that time go on elsewhere if they can, and end with an error event if they cannot;
// finished prefills are decoded all the same. A second call sets another limit. When Drain returns, no more requests
// are bound there; those bound before count in the status of the drain.
func (f *Fleet) Drain(role, id string, limit time.Duration) error {
	now := time.Now()
	s, err := f.Now().Stop(role, id, now)
	if err != nil {
		return err
	}
	if limit > 0 {
		s.Deadline = now.Add(limit)
	}
	f.apply(roster.Stopped{Stop: s})
	return nil
}

// Undrain lets an engine or rank take work again.
func (f *Fleet) Undrain(role, id string) error {
	engines := f.Now()
	s, err := engines.Stop(role, id, time.Now())
	if err != nil {
		return err
	}
	if !engines.Drains(s.Key()) {
		return fmt.Errorf("%w: %s %s does not drain", ErrNoSuchEngine, s.Role, s.ID)
	}
	f.apply(roster.Resumed{Key: s.Key()})
	return nil
}

// StopTimers stops the timer for deadlines when the proxy itself ends.
func (f *Fleet) StopTimers() { f.tick.Stop() }
