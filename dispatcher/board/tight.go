package board

import (
	"math"
	"time"

	"evenkeel/dispatcher/policy"
)

// Tight ranks. An engine preempts requests when its KV room is used up, so a rank whose engine does so has less room than its capacity
// says. After two preemptions within preemptWithin, the rank is tight for the time tightFor: twice the share of its room that the policy
// keeps empty (its watermark) stays empty, but at most mostEmptyShare of the room.
const (
	preemptWithin  = 10 * time.Second
	tightFor       = time.Minute
	mostEmptyShare = 0.3
)

// recordPreemption records a preemption on the rank. If the last preemption was at most preemptWithin ago, the rank is tight for tightFor
// from now.
func (p *kvPressure) recordPreemption(now time.Time) {
	if !p.lastPreemption.IsZero() && now.Sub(p.lastPreemption) <= preemptWithin {
		p.tightUntil = now.Add(tightFor)
	}
	p.lastPreemption = now
}

// isTight says whether the rank is kept emptier now, because its engine preempted requests.
func (p *kvPressure) isTight(now time.Time) bool { return now.Before(p.tightUntil) }

// scheduleTightEnd sets tightEndsAt, so that the board decides again when the first tight rank has its whole room again. Only the ranks of
// groups that decide now count.
func (b *board) scheduleTightEnd(now time.Time) {
	for _, g := range b.decidingGroups {
		for _, r := range g.steppingRanks {
			if r.pressure.isTight(now) {
				b.tightEndsAt = earlier(b.tightEndsAt, r.pressure.tightUntil)
			}
		}
	}
}

// policyCapacity returns the rank's capacity as policies see it, in KV tokens; 0: unlimited. For a tight rank it is smaller: a policy that
// keeps its share (watermark) of the smaller number empty then keeps twice this share of the true room empty. But a tight rank without
// requests still has room for the longest prompt that waits (longest): a prompt that runs alone is not preempted, and would otherwise wait
// while the rank is tight.
func (r *rank) policyCapacity(watermark float64, now time.Time, longest int64) int64 {
	// Unlimited room cannot be made smaller, and the division below needs a watermark below 1.
	if r.Capacity == 0 || watermark >= 1 || !r.pressure.isTight(now) {
		return r.usableCapacity()
	}
	doubled := max(watermark, min(2*watermark, mostEmptyShare))
	capacity := math.Ceil(float64(r.usableCapacity()) * (1 - doubled) / (1 - watermark))
	if len(r.slots) == 0 {
		capacity = max(capacity, math.Ceil(float64(longest+1)/(1-watermark)))
	}
	return int64(min(max(capacity, 1), float64(r.usableCapacity()))) // 0 would be unlimited
}

// hasSlotAndRoom says whether the rank has a free slot and KV room for a prompt of so many tokens, under a policy that keeps the share
// watermark of the room empty.
func (r *rank) hasSlotAndRoom(prompt int64, watermark float64, now time.Time) bool {
	return r.freeSlots() > 0 && r.kv+prompt <= policy.KVBudget(r.policyCapacity(watermark, now, prompt), watermark)
}

// recordPreemption records that the engine of a worker ran out of KV room and preempted a request. A mixed rank will compute this request's
// prompt again.
func (l *Boards) recordPreemption(worker int32) {
	for _, b := range l.inOrder {
		if r := b.ranks[worker]; r != nil {
			r.pressure.recordPreemption(l.now)
			if r.Mixed { // only of mixed ranks does the board estimate which prompts they compute
				b.requeuePreempted(r)
			}
		}
	}
}

// largestPrompt returns the longest prompt, in tokens, that any rank of the group that is up could take if the rank were idle.
func (g *group) largestPrompt(watermark float64) (most int64) {
	for _, r := range g.steppingRanks {
		if r.Up {
			most = max(most, policy.KVBudget(r.usableCapacity(), watermark))
		}
	}
	return most
}
