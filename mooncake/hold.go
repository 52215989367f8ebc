package mooncake

import "time"

// Hold says until when the prefill engine certainly keeps the KV of a hand-off, as far as this can be known from outside.
// It is a value: its owner calls Quiet for each time in which the core of the decode engine gave no sign of life.
//
// A prefill engine of NIXL keeps KV for the time of its lease. The decode engine prolongs this time by heartbeats: every
// sixth of the lease, in a step of its scheduler, it sends one for every request whose KV has not come. From each heartbeat
// on, the KV is kept for two thirds of the lease. The first heartbeat to a prefill engine may only open the connection. A
// core that stands still sends none. The prefill engine then gives the blocks to another prompt, and the decode engine
// reads them without an error when it goes on. Source: vLLM 0.32, nixl/base_scheduler.py and base_worker.py.
type Hold struct {
	until time.Time // the KV is certainly kept up to then
	// for so long after a sign of life the KV is kept, once heartbeats are known to go out; 0: nothing renews the hold
	keptAfterSign time.Duration
	heartbeat     time.Duration // the time between heartbeats
	begin         time.Time     // since when signs have come without a gap
	nextSign      time.Time     // the first sign after this counts as the next one
	signsLeft     int           // so many more signs must count before heartbeats are known to go out
	lost          bool          // the KV may have been given to another prompt before it was read
}

// Hold returns the Hold of a hand-off that is sent to a decode engine now. If no heartbeat
// renews the hold, the prefill engine keeps the KV until the time until. A quarter of the hold's margin is left for clocks that
// differ and for the way of a heartbeat.
func (p *Profile) Hold(now, until time.Time) Hold {
	k := Hold{until: until, begin: now}
	if p.Renews() {
		k.keptAfterSign, k.heartbeat = p.KVHoldTimeout/2-p.slack(), p.KVHoldTimeout/6
		k.nextSign, k.signsLeft = now.Add(p.slack()/6), 3 // a moment to take the request in; between three signs lie two heartbeats
	}
	return k
}

// HeldUntil returns the Hold of a hand-off whose hold nothing renews, or of a request without a hand-off.
func HeldUntil(until time.Time) Hold { return Hold{until: until} }

// PulledWithin is how long after a prefill a first event still proves that the right KV was pulled, if no decode engine renews the hold.
func (p *Profile) PulledWithin() time.Duration { return p.KVHoldTimeout - p.slack() }

// slack is a quarter of the time that a decode engine has to queue and pull.
func (p *Profile) slack() time.Duration {
	margin := p.HoldMargin
	if margin == 0 {
		margin = min(p.KVHoldTimeout/2, maxHoldMargin)
	}
	return margin / 4
}

// Quiet says that the decode engine's core gave no sign of life between two signs, or since the last one.
func (k *Hold) Quiet(from, to time.Time) {
	k.until, k.nextSign, k.signsLeft = k.after(from)
	k.begin = to
	k.lost = k.lost || to.After(k.until)
}

// Until returns until when the KV is certainly kept, if last is the last sign of life and no sign was missing before it.
func (k *Hold) Until(last time.Time) time.Time {
	until, _, _ := k.after(last)
	return until
}

// after returns what until, next and left are after signs without a gap up to last. A core that makes steps has sent a
// heartbeat at most one beat before each of its signs.
func (k *Hold) after(last time.Time) (until, next time.Time, left int) {
	until, next, left = k.until, k.nextSign, k.signsLeft
	if k.keptAfterSign == 0 {
		return until, next, left
	}
	for left > 0 {
		at := k.begin
		if next.After(at) {
			at = next
		}
		if at.After(last) {
			return until, next, left
		}
		next, left = at.Add(k.heartbeat), left-1
	}
	if renewed := last.Add(k.keptAfterSign); renewed.After(until) {
		until = renewed
	}
	return until, next, left
}

// Lost says whether the KV may have been given to another prompt before it was read.
func (k *Hold) Lost() bool { return k.lost }

// Lose makes the KV count as lost.
func (k *Hold) Lose() { k.lost = true }

// Patience is how long the core may be quiet until its engine gets no more requests; 0: the engine renews no holds.
func (k *Hold) Patience() time.Duration { return k.keptAfterSign * 2 / 3 }
