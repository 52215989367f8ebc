package mooncake

import "time"

// Hold computes until when the prefill engine certainly keeps the KV of a hand-off, as far as a proxy can know.
// It has no clock: its owner calls RecordGap for each period in which the core of the decode engine, the process that
// makes its steps, gave no sign of life.
//
// A prefill engine with NIXL keeps KV for the time of a lease. The decode engine renews the lease by heartbeats: once per
// sixth of the lease, in a step of its scheduler, it sends one for each request whose KV has not come. After a
// heartbeat, the KV is kept for two thirds of the lease. The first heartbeat to a prefill engine possibly renews nothing,
// because it only opens the connection. A core that hangs sends no heartbeats. When the lease is over, the prefill engine
// gives the blocks to another prompt. If the core then runs again, the decode engine reads that prompt's KV, and gets no
// error. Source: vLLM 0.32, nixl/base_scheduler.py and base_worker.py.
type Hold struct {
	keptUntil time.Time // the KV is certainly kept up to this time
	// keptAfterSign is how long the KV is kept after a sign of life, once heartbeats are known to go out; 0: nothing renews the hold.
	keptAfterSign time.Duration
	heartbeat     time.Duration // the time between heartbeats
	signsSince    time.Time     // signs of life have come without a gap since this time
	nextCounted   time.Time     // the next sign of life counts only after this time
	signsNeeded   int           // how many more signs must count before heartbeats are known to go out
	lost          bool          // the KV may have been given to another prompt before it was read
}

// Hold returns the Hold of a hand-off that is sent to a decode engine now. until is how long the prefill engine keeps the KV
// without a heartbeat. A quarter of the hold's margin is reserved for clocks that differ and for the time that a
// heartbeat is on its way.
func (p *Profile) Hold(now, until time.Time) Hold {
	k := Hold{keptUntil: until, signsSince: now}
	if p.Renews() {
		k.heartbeat = p.KVHoldTimeout / 6
		// A heartbeat keeps the KV for 2/3 of the timeout. At a sign of life, the last heartbeat is up to 1/6 old, so 1/2 is left.
		k.keptAfterSign = p.KVHoldTimeout/2 - p.clockMargin()
		// The first sign counts only after a moment in which the decode engine takes the request in. Counted signs are one heartbeat
		// interval apart, so two heartbeats are sent between three of them. The second one surely renews the hold.
		k.nextCounted, k.signsNeeded = now.Add(p.clockMargin()/6), 3
	}
	return k
}

// HeldUntil returns the Hold of a hand-off whose hold nothing renews, or of a request without a hand-off.
func HeldUntil(until time.Time) Hold { return Hold{keptUntil: until} }

// PulledWithin returns how long after a prefill the KV is certainly kept even if nothing renews the hold. If the first event of the
// answer comes within this time, the right KV was pulled.
func (p *Profile) PulledWithin() time.Duration { return p.KVHoldTimeout - p.clockMargin() }

// clockMargin is the time that is reserved for clocks that differ and for the time that a heartbeat is on its way. It is a quarter of the
// hold margin, the time that a decode engine has to queue a request and pull its KV.
func (p *Profile) clockMargin() time.Duration {
	margin := p.HoldMargin
	if margin == 0 {
		margin = min(p.KVHoldTimeout/2, maxHoldMargin)
	}
	return margin / 4
}

// RecordGap records that the decode engine's core gave no sign of life between from, its last sign, and to. The KV counts as lost if it
// was not certainly kept until to.
func (k *Hold) RecordGap(from, to time.Time) {
	k.keptUntil, k.nextCounted, k.signsNeeded = k.afterSigns(from)
	k.signsSince = to
	k.lost = k.lost || to.After(k.keptUntil)
}

// KeptUntil returns the time up to which the KV is certainly kept, if signs of life came without a gap up to last.
func (k *Hold) KeptUntil(last time.Time) time.Time {
	until, _, _ := k.afterSigns(last)
	return until
}

// afterSigns returns the new values of keptUntil, nextCounted and signsNeeded if signs of life came without a gap up to last. When a core
// gives a sign, its last heartbeat is at most one heartbeat interval old, so each sign renews the hold once signsNeeded is 0.
func (k *Hold) afterSigns(last time.Time) (keptUntil, nextCounted time.Time, signsNeeded int) {
	keptUntil, nextCounted, signsNeeded = k.keptUntil, k.nextCounted, k.signsNeeded
	if k.keptAfterSign == 0 { // nothing renews the hold
		return keptUntil, nextCounted, signsNeeded
	}
	for signsNeeded > 0 {
		sign := k.signsSince // the next sign that counts: signs come without a gap, so there is one at any time after signsSince
		if nextCounted.After(sign) {
			sign = nextCounted
		}
		if sign.After(last) {
			return keptUntil, nextCounted, signsNeeded
		}
		nextCounted, signsNeeded = sign.Add(k.heartbeat), signsNeeded-1
	}
	if renewed := last.Add(k.keptAfterSign); renewed.After(keptUntil) {
		keptUntil = renewed
	}
	return keptUntil, nextCounted, signsNeeded
}

// Lost says whether the KV may have been given to another prompt before it was read.
func (k *Hold) Lost() bool { return k.lost }

// MarkLost makes the KV count as lost.
func (k *Hold) MarkLost() { k.lost = true }

// MaxSilence returns how long the core may give no sign of life before its engine gets no more requests; 0: the engine renews no holds.
func (k *Hold) MaxSilence() time.Duration { return k.keptAfterSign * 2 / 3 }
