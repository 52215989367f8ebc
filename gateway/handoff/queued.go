package handoff

import (
	"context"
	"sync"
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
	every := max(limit/16, time.Millisecond)
	var since time.Time
	return Watch(every, func() time.Duration {
		switch now := time.Now(); {
		case slot.Waits():
		case since.IsZero():
			since = now
		case now.Sub(since) >= limit:
			call.Expire()
		}
		return every
	})
}

// Watch has look called after a while, and then again after each time that it returns, until that is 0 or less, or stop is called. look
// does not run any more when stop has returned.
func Watch(after time.Duration, look func() (again time.Duration)) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer // nil: it was stopped
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(after, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer == nil {
			return
		}
		if again := look(); again > 0 {
			timer.Reset(again)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		timer.Stop()
		timer = nil
	}
}

// Patience is how much longer an answer in one piece is waited for, of which so many tokens were asked for at an instant. Nothing
// comes before all of it has. So after limits.probe_timeout it is waited for as long as the core of its rank gives signs of
// life, by events of other streams or by gauges, and at most for as long as its tokens may take.
func Patience(r *fleet.Rank, set *fleet.Settings, asked time.Time, tokens int, now time.Time) time.Duration {
	last := asked.Add(set.Limits.ProbeTimeout)
	most := last.Add(time.Duration(tokens) * slowestToken)
	if alive := r.Signs.Last().Add(set.Limits.EventTimeout); alive.After(last) {
		last = alive
	}
	if last.After(most) {
		last = most
	}
	return last.Sub(now)
}

// slowestToken is longer than any engine takes for a token with which a client is content. It only bounds the wait for an engine
// that has lost one request and goes on with others.
const slowestToken = time.Second

// LimitWhole ends the call of an answer in one piece when that is not waited for any longer.
func LimitWhole(r *fleet.Rank, call *engine.Call, set *fleet.Settings, tokens int) (stop func()) {
	asked := time.Now()
	return Watch(Patience(r, set, asked, tokens, asked), func() time.Duration {
		left := Patience(r, set, asked, tokens, time.Now())
		if left <= 0 {
			call.Expire()
		}
		return left
	})
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

// witness is what a prefill engine had said of its hand-offs when one of them was sent to a decode engine.
type witness struct {
	expired float64 // hand-offs that it had given away before anything had fetched them
	known   bool
	before  int // hand-offs of ours that were left to the engine and that it had given away
}

// Witness notes what the prefill engine says of hand-offs that it has given away.
func (h *Handoff) Witness(m Monitor) {
	h.seen.expired, h.seen.known = m.Expired(h.Lease.Candidate.Instance)
	held, ever := h.Lease.Unfetched()
	h.seen.before = ever - held
}

// Refuted says that the first event of an answer has come, and that the prefill engine may have given the KV away before. It
// is asked where only renewals can have kept the KV: has it given away more, since the hand-off was sent, than what was
// left to it? An engine that does not say refutes nothing. What another proxy left to it looks the same; the prompt is
// prefilled once more then.
func (h *Handoff) Refuted(ctx context.Context, m Monitor, w *engine.Wait, now time.Time) bool {
	if h == nil || !h.seen.known || !w.Renewed(now) {
		return false
	}
	n, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, ever := h.Lease.Unfetched()
	if !known || n-h.seen.expired <= float64(ever-h.seen.before) {
		return false
	}
	w.Resalt() // the decode engine may have cached it
	return true
}
