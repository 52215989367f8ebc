package mooncake

import "time"

// Hold computes until when the prefill engine certainly keeps the KV of a hand-off, as far as a proxy can know. It reads no clock. Its
// owner calls RecordGap for each period in which the core of the decode engine, the process that runs its steps, gave no sign of life, such
// as a token or a gauge that changed.
//
// A prefill engine with NIXL keeps KV for the time of a lease. The decode engine renews the lease by heartbeats. Once per sixth of the
// lease, in a step of its scheduler, it sends a heartbeat for each request whose KV it has not pulled yet. After a heartbeat, the
// prefill engine keeps the KV for two thirds of the lease. The first heartbeat to a prefill engine may renew nothing, because it only
// opens the connection. A core that hangs sends no heartbeats. When the lease is over, the prefill engine gives the blocks to another
// prompt. If the core then runs again, the decode engine reads that prompt's KV, and gets no error. Source: vLLM 0.32,
// nixl/base_scheduler.py and base_worker.py.
type Hold struct {
	keptUntil time.Time // the KV is certainly kept up to this time
	// keptAfterSign is how long the prefill engine keeps the KV after a sign of life of the core, once heartbeats certainly go out. 0: nothing
	// renews the hold.
	keptAfterSign time.Duration
	heartbeat     time.Duration // the time between heartbeats
	signsSince    time.Time     // since this time, the core has given signs of life without a gap
	// nextCountedFrom is the time from which on the next sign of life counts. A sign before it does not show another heartbeat.
	nextCountedFrom time.Time
	signsNeeded     int  // how many more signs of life must count before heartbeats certainly go out
	lost            bool // the KV may have been given to another prompt before it was read
}

// Hold returns the Hold of a hand-off that is sent to a decode engine now. If no heartbeat comes, the prefill engine keeps the KV up to the
// time until. If the profile's engines renew holds by heartbeats, signs of life of the decode engine's core keep the KV for longer. A
// quarter of the hold's margin is subtracted then, for differences between clocks and for heartbeats under way.
func (p *Profile) Hold(now, until time.Time) Hold {
	k := Hold{keptUntil: until, signsSince: now}
	if p.Renews() {
		k.heartbeat = p.KVHoldTimeout / 6
		// A heartbeat keeps the KV for 2/3 of the timeout. At a sign of life, the last heartbeat is at most 1/6 of the timeout old, so at least
		// 1/2 of the timeout is left.
		k.keptAfterSign = p.KVHoldTimeout/2 - p.clockMargin()
		// Heartbeats for this request go out only once the decode engine has accepted it, so the first sign of life counts only
		// after a short delay. Further signs count only if they are one heartbeat interval apart. Between three counted signs there
		// are two such intervals, and in each the core sends a heartbeat. The first one may renew nothing, because it only opens
		// the connection. The second one renews.
		acceptDelay := p.clockMargin() / 6
		k.nextCountedFrom, k.signsNeeded = now.Add(acceptDelay), 3
	}
	return k
}

// HeldUntil returns a Hold that nothing renews: of a hand-off whose KV is kept until this time, or of a request without a hand-off.
func HeldUntil(until time.Time) Hold { return Hold{keptUntil: until} }

// PulledWithin returns how long after a prefill its KV is certainly kept even if nothing renews the hold. If the first event of the decode
// engine's answer comes within this time, the decode engine pulled the right KV.
func (p *Profile) PulledWithin() time.Duration { return p.KVHoldTimeout - p.clockMargin() }

// clockMargin returns the time that is reserved for differences between clocks and for heartbeats under way. It is a quarter of the hold
// margin, the time that a decode engine has to queue a request and pull its KV.
func (p *Profile) clockMargin() time.Duration {
	margin := p.HoldMargin
	if margin == 0 { // none is configured: the default, as in HoldBudget
		margin = min(p.KVHoldTimeout/2, maxHoldMargin)
	}
	return margin / 4
}

// RecordGap records that the decode engine's core gave no sign of life between from, the time of its last sign, and to. Up to from, each
// sign of life renewed the hold, once so many signs had counted that heartbeats certainly went out (afterSigns). In the gap nothing renewed
// it. So the KV counts as lost if the prefill engine did not certainly keep it up to the time to.
func (k *Hold) RecordGap(from, to time.Time) {
	k.keptUntil, k.nextCountedFrom, k.signsNeeded = k.afterSigns(from)
	k.signsSince = to
	k.lost = k.lost || to.After(k.keptUntil)
}

// KeptUntil returns until when the prefill engine certainly keeps the KV, if the core gave signs of life without a gap up to last.
func (k *Hold) KeptUntil(last time.Time) time.Time {
	until, _, _ := k.afterSigns(last)
	return until
}

// afterSigns returns the new values of keptUntil, nextCountedFrom and signsNeeded if the core gave signs of life without a gap up to last.
// A sign renews the hold only if heartbeats certainly go out. This is so after a number of signs (signsNeeded) that are each one heartbeat
// interval apart, because the core sends a heartbeat in each interval. afterSigns first counts such signs, as early as they can count. Once
// signsNeeded is 0, each sign renews the hold: the core's last heartbeat is then at most one interval old.
func (k *Hold) afterSigns(last time.Time) (keptUntil, nextCountedFrom time.Time, signsNeeded int) {
	keptUntil, nextCountedFrom, signsNeeded = k.keptUntil, k.nextCountedFrom, k.signsNeeded
	if k.keptAfterSign == 0 { // nothing renews the hold
		return keptUntil, nextCountedFrom, signsNeeded
	}
	for signsNeeded > 0 {
		sign := k.signsSince // time of the next counted sign: without a gap, the core worked at any time from signsSince to last
		if nextCountedFrom.After(sign) {
			sign = nextCountedFrom
		}
		if sign.After(last) { // too few signs have counted, so it is not certain that heartbeats go out
			return keptUntil, nextCountedFrom, signsNeeded
		}
		nextCountedFrom, signsNeeded = sign.Add(k.heartbeat), signsNeeded-1
	}
	if renewed := last.Add(k.keptAfterSign); renewed.After(keptUntil) {
		keptUntil = renewed
	}
	return keptUntil, nextCountedFrom, signsNeeded
}

// Lost says whether the prefill engine may have given the KV blocks to another prompt before the decode engine read them.
func (k *Hold) Lost() bool { return k.lost }

// MarkLost makes Lost return true, for a caller that knows of a loss by other means.
func (k *Hold) MarkLost() { k.lost = true }

// MaxSilence returns how long the decode engine's core may give no sign of life before the engine gets no more requests; 0: no limit,
// because the engine renews no holds. The limit is two thirds of keptAfterSign, so that it is reached before the KV may be lost.
func (k *Hold) MaxSilence() time.Duration { return k.keptAfterSign * 2 / 3 }
