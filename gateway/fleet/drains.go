package fleet

import (
	"fmt"
	"time"

	"evenkeel/gateway/fleet/roster"
)

// Drain stops new work for an engine (host:port) or a rank (host:port/rank). After a limit above 0,
// running requests go on elsewhere if they can, and otherwise end with an error event. Finished
// prefills are still decoded. A second call sets another limit. Once Drain has returned, no new
// request is bound there.
func (f *Fleet) Drain(role, id string, limit time.Duration) error {
	now := time.Now()
	drain, err := f.Now().NewDrain(role, id, now)
	if err != nil {
		return err
	}
	if limit > 0 {
		drain.Deadline = now.Add(limit)
	}
	f.apply(roster.Stopped{Drain: drain})
	return nil
}

// Undrain ends a drain, so that the engine or rank takes new work again.
func (f *Fleet) Undrain(role, id string) error {
	engines := f.Now()
	named, err := engines.NewDrain(role, id, time.Now()) // only for its key
	if err != nil {
		return err
	}
	if !engines.HasDrain(named.Key()) {
		return fmt.Errorf("%w: %s %s does not drain", roster.ErrNoSuchEngine, named.Role, named.ID)
	}
	f.apply(roster.Resumed{Key: named.Key()})
	return nil
}

// StopTimers stops the timer of drains and pauses.
func (f *Fleet) StopTimers() { f.timer.Stop() }
