package fleet

import (
	"fmt"
	"time"

	"evenkeel/gateway/fleet/roster"
)

// Drain stops new work for an engine, host:port, or for one of its ranks,
// host:port/rank. With a limit above 0 what still runs then goes on elsewhere
// where it can, and ends with an error event where it cannot; finished prefills
// are decoded all the same. A second call sets another limit. When it returns
// nothing is bound there any more; what was is among the requests of its status.
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

// Undrain has an engine or rank take work again.
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

// StopTimers ends the wait for deadlines, once the proxy itself ends.
func (f *Fleet) StopTimers() { f.again.Stop() }
