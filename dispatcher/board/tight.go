package board

import (
	"math"
	"time"

	"evenkeel/dispatcher/policy"
)

// Tight ranks. An engine preempts requests when its KV room is used up, so a rank whose engine does so has less room than its capacity
// says. After two preemptions within preemptWithin, the rank is tight for the time tightFor: it is kept emptier. The policy always keeps a
// share of the room empty (its watermark). On a tight rank, this share is doubled, but not to more than mostEmptyShare.
const (
	preemptWithin  = 10 * time.Second
	tightFor       = time.Minute
	mostEmptyShare = 0.3
)

// recordPreemption records that the engine preempted a request. If the last preemption was at most preemptWithin ago, the rank is tight for
// tightFor from now.
func (p *kvPressure) recordPreemption(now time.Time) {
	if !p.lastPreemption.IsZero() && now.Sub(p.lastPreemption) <= preemptWithin {
		p.tightUntil = now.Add(tightFor)
	}
	p.lastPreemption = now
}

// isTight says whether the rank is kept emptier now, because its engine has preempted requests.
func (p *kvPressure) isTight(now time.Time) bool { return now.Before(p.tightUntil) }

// scheduleTightEnd sets keptEmptierUntil, so that the board decides again when the first tight rank may be filled as usual. It looks only
// at the ranks of groups that decide in this turn.
func (b *board) scheduleTightEnd(now time.Time) {
	for _, g := range b.decidingGroups {
		for _, r := range g.steppingRanks {
			if r.pressure.isTight(now) {
				b.keptEmptierUntil = earlier(b.keptEmptierUntil, r.pressure.tightUntil)
			}
		}
	}
}

// policyCapacity returns the rank's capacity as policies see it, in KV tokens; 0: unlimited. A policy keeps the share watermark of this
// capacity empty. It does not know of tight ranks, so the number is smaller for these. A tight rank without requests still has room for the
// longest prompt that waits (longest). A prompt that runs alone is not preempted, and would otherwise wait as long as the rank is tight.
func (r *rank) policyCapacity(watermark float64, now time.Time, longest int64) int64 {
	// Unlimited room (Capacity 0) cannot be made smaller, and the divisions below need a watermark below 1.
	if r.Capacity == 0 || watermark >= 1 || !r.pressure.isTight(now) {
		return r.usableCapacity()
	}
	emptyShare := max(watermark, min(2*watermark, mostEmptyShare)) // never less than the watermark
	mayFill := float64(r.usableCapacity()) * (1 - emptyShare)      // KV tokens with which the policy may fill the rank
	if len(r.slots) == 0 {
		mayFill = max(mayFill, float64(longest+1)) // one token more than the prompt needs, because the policy rounds down
	}
	capacity := math.Ceil(mayFill / (1 - watermark))                 // the policy fills the share 1-watermark of it
	return int64(min(max(capacity, 1), float64(r.usableCapacity()))) // at least 1, because 0 would mean unlimited
}

// hasSlotAndRoom says whether the rank has a free slot, and KV room for a prompt of this many tokens under a policy that keeps the share
// watermark of the room empty.
func (r *rank) hasSlotAndRoom(prompt int64, watermark float64, now time.Time) bool {
	return r.freeSlots() > 0 && r.kv+prompt <= policy.KVBudget(r.policyCapacity(watermark, now, prompt), watermark)
}

// recordPreemption records that the engine of a worker ran out of KV room and preempted a request. If the rank is mixed, it will compute
// the prompt of this request again.
func (l *Boards) recordPreemption(worker int32) {
	for _, b := range l.inOrder {
		if r := b.ranks[worker]; r != nil {
			r.pressure.recordPreemption(l.now)
			if r.Mixed { // the board estimates the progress of prompts only for mixed ranks
				b.requeuePreempted(r)
			}
		}
	}
}

// largestPrompt returns the longest prompt, in tokens, that any rank of the group could take if it were idle. Only ranks that are up count.
// watermark is the share of the room that the policy keeps empty.
func (g *group) largestPrompt(watermark float64) (largest int64) {
	for _, r := range g.steppingRanks {
		if r.Up {
			largest = max(largest, policy.KVBudget(r.usableCapacity(), watermark))
		}
	}
	return largest
}
