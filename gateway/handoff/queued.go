package handoff

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/mooncake"
)

// LimitFromSlot ends a call that waits for its first event when its request has had a slot for limit. A hand-off may be
// bound to a rank that has no slot or no KV room for it yet: ahead of a slot that comes free, or at its deadline. Where
// the engine's own queue renews its hold, the time that it waits there does not count.
func LimitFromSlot(slot *dispatcher.Slot, call *engine.Call, limit time.Duration) (stop func()) {
	done := make(chan struct{})
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

// Await begins the wait for the first event of a request that is sent to a rank, with a hand-off or, if h is nil, without
// one. whole: the answer comes in one piece, so nothing but gauges tells what the core does until then.
func (h *Handoff) Await(r *fleet.Rank, now time.Time, whole bool) *engine.Wait {
	switch {
	case h == nil || whole && !(r.Profile.Renews() && r.Signs.Gauged() && r.Heeds(h.Endpoint)):
		return r.Signs.Await(now, mooncake.KeptUntil(now.Add(Forever)))
	case !r.Heeds(h.Endpoint): // the request may be on another rank than the one whose signs these are
		return r.Signs.Await(now, mooncake.KeptUntil(h.PulledBy()))
	}
	return r.Signs.Await(now, r.Profile.Kept(now, h.PulledBy()))
}

// Forever is the limit of a wait that something else ends.
const Forever = 1000 * time.Hour
