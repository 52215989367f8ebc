package request

import "time"

// A hand-off at its deadline may be bound to a rank that has no slot or no KV room for it, where
// the engine's own queue renews its hold. The time that it waits there does not
// count: a first event must come only once the rank has both.

// beyondHeader tells an engine that the request was sent on purpose although the
// rank has no slot or no KV room for it. An engine may ignore it; it helps to read logs.
const beyondHeader = "X-Evenkeel-Beyond-Slots"

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
