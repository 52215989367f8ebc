package mooncake

import "time"

// Hold computes until when the prefill engine certainly keeps the KV of a hand-off, as far as a proxy can know. It reads no clock. Its
// owner calls RecordGap for each period in which the core of the decode engine, the process that runs its steps, gave no sign of life, such
// as a token or a gauge that changed. Such a sign is not a heartbeat: the proxy sees no heartbeats, and infers from the signs that the core
// works, and so sends them.
//
// A prefill engine with NIXL keeps KV for the time of a lease. The decode engine renews the lease by heartbeats. Once per sixth of the
// lease, in a step of its scheduler, it sends a heartbeat for each request whose KV it has not pulled yet. After a heartbeat, the
// prefill engine keeps the KV for two thirds of the lease. The first heartbeat to a prefill engine may renew nothing, because it only
// opens the connection. A core that hangs sends no heartbeats. When the lease is over, the prefill engine gives the blocks to another
// prompt. If the core then runs again, the decode engine reads that prompt's KV, and gets no error. Source: vLLM 0.32,
// nixl/base_scheduler.py and base_worker.py.
type Hold struct {
	keptUntil time.Time // the KV is certainly kept up to this time
	unrenewed time.Time // keptUntil as long as nothing has renewed the hold
	// keptAfterSign is how long the prefill engine keeps the KV after a sign of life of the core, once heartbeats certainly go out. 0:
	// nothing renews the hold.
	keptAfterSign time.Duration
	heartbeat     time.Duration // the time between heartbeats
	acceptDelay   time.Duration // how long the decode engine may take to accept a request that was written
	signsSince    time.Time     // since this time, the core has given signs of life without a gap
	// nextCountedFrom is the time from which on the next sign of life counts. A sign before it does not show another heartbeat.
	nextCountedFrom time.Time
	signsNeeded     int  // how many more signs of life must count before heartbeats certainly go out
	lost            bool // the KV may have been given to another prompt before it was read
}

// signsUntilRenewal is how many signs of life must count before the hold is certainly renewed. Counted signs are at least one heartbeat
// interval apart, and in each interval the core sends a heartbeat. Three signs enclose two intervals: the first heartbeat may only open the
// connection, and the second one renews.
const signsUntilRenewal = 3

// Hold returns the Hold of a hand-off that is sent to a decode engine now. p is the profile of the prefill engine. If no heartbeat comes,
// the prefill engine keeps the KV up to the time until. If the engines of both profiles renew holds by heartbeats, signs of life of the
// decode engine's core keep the KV for longer.
func (p *Profile) Hold(now, until time.Time, decode *Profile) Hold {
	k := Hold{keptUntil: until, unrenewed: until}
	if p.Renews() && decode.Renews() {
		k.heartbeat = decode.KVHoldTimeout / 6 // each engine computes with its own timeout
		// A heartbeat keeps the KV for 2/3 of the prefill engine's timeout. At a sign of life, the last heartbeat is at most one
		// interval old. If the intervals are so long that hardly anything is left then, signs count for nothing: they come as
		// seldom as gauges are read, and the decode engine would count as silent between two of them.
		if left := p.KVHoldTimeout*2/3 - k.heartbeat - p.clockMargin(); left >= k.heartbeat/4 {
			k.keptAfterSign = left
		}
		// Heartbeats for this request go out only once the decode engine has accepted it, so the first sign counts only after this
		// delay. A sixth of the clock margin is assumed to be enough for it.
		k.acceptDelay = p.clockMargin() / 6
	}
	k.Sent(now)
	return k
}

// Sent records that the request was written to the decode engine now, if that is later than the call of Profile.Hold. Signs of life from
// before, e.g. while the connection was made, count no longer.
func (k *Hold) Sent(now time.Time) {
	k.keptUntil, k.signsSince = k.unrenewed, now
	k.nextCountedFrom, k.signsNeeded = now.Add(k.acceptDelay), signsUntilRenewal
}

// HeldUntil returns a Hold that nothing renews: of a hand-off whose KV is kept until this time, or of a request without a hand-off.
func HeldUntil(until time.Time) Hold { return Hold{keptUntil: until, unrenewed: until} }

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
// The first signs only count: until signsNeeded of them have come, it is not certain that heartbeats for this request go out. From then on,
// each sign renews the hold, because the core's last heartbeat is at most one interval old.
func (k *Hold) afterSigns(last time.Time) (keptUntil, nextCountedFrom time.Time, signsNeeded int) {
	if k.keptAfterSign == 0 { // nothing renews the hold
		return k.keptUntil, k.nextCountedFrom, k.signsNeeded
	}
	nextCountedFrom, signsNeeded = k.assumeSigns(last)
	keptUntil = k.keptUntil
	renewed := last.Add(k.keptAfterSign)
	if heartbeatsGoOut := signsNeeded == 0; heartbeatsGoOut && renewed.After(keptUntil) {
		keptUntil = renewed
	}
	return keptUntil, nextCountedFrom, signsNeeded
}

// assumeSigns counts signs of life up to last, as many as are still needed. It does not need the times of real signs: without a gap, the
// core worked at any time from signsSince to last, so a sign may be assumed at each of these times. It assumes them as early as possible,
// but one heartbeat interval apart. The results are the new values of nextCountedFrom and signsNeeded.
func (k *Hold) assumeSigns(last time.Time) (nextCountedFrom time.Time, signsNeeded int) {
	nextCountedFrom, signsNeeded = k.nextCountedFrom, k.signsNeeded
	for signsNeeded > 0 {
		sign := k.signsSince
		if nextCountedFrom.After(sign) {
			sign = nextCountedFrom
		}
		if sign.After(last) { // the next sign that would count has not come yet
			break
		}
		nextCountedFrom, signsNeeded = sign.Add(k.heartbeat), signsNeeded-1
	}
	return nextCountedFrom, signsNeeded
}

// StopRenewals makes later signs of life renew nothing, because they may be of another engine. last is the last sign that counts.
func (k *Hold) StopRenewals(last time.Time) {
	k.keptUntil = k.KeptUntil(last)
	k.keptAfterSign = 0
}

// Lost says whether the prefill engine may have given the KV blocks to another prompt before the decode engine read them.
func (k *Hold) Lost() bool { return k.lost }

// MarkLost makes Lost return true, for a caller that knows of a loss by other means.
func (k *Hold) MarkLost() { k.lost = true }

// MaxSilence returns how long the decode engine's core may give no sign of life before the engine gets no more requests; 0: no limit,
// because the engine renews no holds. The limit is two thirds of keptAfterSign, so that it is reached before the KV may be lost.
func (k *Hold) MaxSilence() time.Duration { return k.keptAfterSign * 2 / 3 }
