package gateway

import "time"

// A hand-off at its deadline may be bound to a rank that has no slot for it, where
// the engine's own queue renews its hold. How long it waits there is the queue's
// business: only from when the rank has a slot for it must a first event come.

// beyondHeader tells an engine that the request is one more than the rank's slots by
// intent. Nothing but a log needs to heed it.
const beyondHeader = "X-Evenkeel-Beyond-Slots"

// forEver stands for a wait that something else ends.
const forEver = 1000 * time.Hour

// inQueue has the alarm about ranks with too many requests expect one more.
func (s *stream) inQueue() {
	s.beyond = true
	s.rank.Traffic.Beyond(1)
}

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
