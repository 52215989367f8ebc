package mooncake

import "time"

// Hold computes until when the prefill engine certainly keeps the KV of a hand-off, as far as a proxy can know.
// It has no clock: its owner calls Quiet for each period in which the core of the decode engine, the process that
// makes its steps, gave no sign of life.
//
// A prefill engine with NIXL keeps KV for the time of a lease. The decode engine renews the lease by heartbeats: once per
// sixth of the lease, in a step of its scheduler, it sends one for each request whose KV has not come. After a
// heartbeat, the KV is kept for two thirds of the lease. The first heartbeat to a prefill engine possibly renews nothing,
// because it only opens the connection. A core that hangs sends no heartbeats. When the lease is over, the prefill engine
// gives the blocks to another prompt. If the core then runs again, the decode engine reads that prompt's KV, and gets no
// error. Source: vLLM 0.32, nixl/base_scheduler.py and base_worker.py.
type Hold struct {
	until time.Time // the KV is certainly kept up to this time
	// keptAfterSign is how long the KV is kept after a sign of life, once heartbeats are known to go out; 0: nothing renews the hold.
	keptAfterSign time.Duration
	heartbeat     time.Duration // the time between heartbeats
	begin         time.Time     // signs of life have come without a gap since this time
	nextSign      time.Time     // the next sign of life counts only after this time
	signsLeft     int           // how many more signs must count before heartbeats are known to go out
	lost          bool          // the KV may have been given to another prompt before it was read
}

// Hold returns the Hold of a hand-off that is sent to a decode engine now. until is how long the prefill engine keeps the KV
// without a heartbeat. A quarter of the hold's margin is reserved for clocks that differ and for the time that a
// heartbeat is on its way.
func (p *Profile) Hold(now, until time.Time) Hold {
	k := Hold{until: until, begin: now}
	if p.Renews() {
		k.keptAfterSign, k.heartbeat = p.KVHoldTimeout/2-p.slack(), p.KVHoldTimeout/6
		// The decode engine needs a moment to take the request in. Two heartbeats are sent between three signs.
		k.nextSign, k.signsLeft = now.Add(p.slack()/6), 3
	}
	return k
}

// HeldUntil returns the Hold of a hand-off whose hold nothing renews, or of a request without a hand-off.
func HeldUntil(until time.Time) Hold { return Hold{until: until} }

// PulledWithin returns how long after a prefill the KV is certainly kept even if nothing renews the hold. If the first event of the
// answer comes within this time, the right KV was pulled.
func (p *Profile) PulledWithin() time.Duration { return p.KVHoldTimeout - p.slack() }

// slack is a quarter of the hold margin, the time that a decode engine has to queue a request and pull its KV.
func (p *Profile) slack() time.Duration {
	margin := p.HoldMargin
	if margin == 0 {
		margin = min(p.KVHoldTimeout/2, maxHoldMargin)
	}
	return margin / 4
}

// Quiet records that the decode engine's core gave no sign of life between from, its last sign, and to.
func (k *Hold) Quiet(from, to time.Time) {
	k.until, k.nextSign, k.signsLeft = k.after(from)
	k.begin = to
	k.lost = k.lost || to.After(k.until)
}

// Until returns the time up to which the KV is certainly kept, if signs of life came without a gap up to last.
func (k *Hold) Until(last time.Time) time.Time {
	until, _, _ := k.after(last)
	return until
}

// after returns the new values of until, nextSign and signsLeft if signs of life came without a gap up to last. When a core gives a
// sign, its last heartbeat is at most one heartbeat interval old, so each sign renews the hold once signsLeft is 0.
func (k *Hold) after(last time.Time) (until, next time.Time, left int) {
	until, next, left = k.until, k.nextSign, k.signsLeft
	if k.keptAfterSign == 0 {
		return until, next, left
	}
	for left > 0 {
		sign := k.begin // the time of the next sign that counts: signs come without a gap, so there is one at any time after begin
		if next.After(sign) {
			sign = next
		}
		if sign.After(last) {
			return until, next, left
		}
		next, left = sign.Add(k.heartbeat), left-1
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

// Patience returns how long the core may give no sign of life before its engine gets no more requests; 0: the engine renews no holds.
func (k *Hold) Patience() time.Duration { return k.keptAfterSign * 2 / 3 }
