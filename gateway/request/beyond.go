package request

import "time"

// A hand-off may be bound to a rank that has no slot or no KV room for it yet: ahead of a slot that
// comes free, or at its deadline. Where the engine's own queue renews its hold, the time that it
// waits there does not count: a first event must come only once the rank has both.

// forEver is the limit of a wait that something else ends.
const forEver = 1000 * time.Hour

// watchQueue ends the wait for the first event when the request has had its slot for
// limit.
func (s *stream) watchQueue(limit time.Duration) (stop func()) {
	slot, call, done := s.slot, s.call, make(chan struct{})
	go func() {
		look := time.NewTicker(max(limit/16, time.Millisecond))
		defer look.Stop()
		var since time.Time
		for {
			select {
			case <-done:
				return
			case now := <-look.C:
				switch {
				case slot.Waits():
				case since.IsZero():
					since = now
				case now.Sub(since) >= limit:
					call.Expire()
				}
			}
		}
	}()
	return func() { close(done) }
}
