package board

import (
	"math"
	"time"

	"evenkeel/dispatcher/policy"
)

// Tight ranks. An engine preempts requests when its KV room is used up, so a rank whose engine does so has less room than its capacity
// says. After two preemptions within preemptWithin, the rank is tight for the time tightFor: twice the share of its room that the policy
// keeps empty (its watermark) stays empty, but at most tightMost of the room.
const (
	preemptWithin = 10 * time.Second
	tightFor      = time.Minute
	tightMost     = 0.3
)

// preempted records a preemption on the rank. If the last preemption was at most preemptWithin ago, the rank is tight for tightFor from
// now.
func (p *kvPressure) preempted(now time.Time) {
	if !p.last.IsZero() && now.Sub(p.last) <= preemptWithin {
		p.until = now.Add(tightFor)
	}
	p.last = now
}

// tight says whether the rank is kept emptier now, because its engine preempted requests.
func (p *kvPressure) tight(now time.Time) bool { return now.Before(p.until) }

// findTight sets wakeTight, so that the board looks at the pool when the first tight rank of a group that decides has its whole room again.
func (b *board) findTight(now time.Time) {
	for _, g := range b.order {
		for _, r := range g.ranks {
			if r.pressure.tight(now) && (b.wakeTight.IsZero() || r.pressure.until.Before(b.wakeTight)) {
				b.wakeTight = r.pressure.until
			}
		}
	}
}

// capacity returns the rank's capacity as policies see it, in KV tokens. For a tight rank it is smaller: a policy that keeps its share
// (watermark) of the smaller number empty then keeps twice this share of the true room empty. But a tight rank without requests still has
// room for the longest prompt that waits: a prompt that runs alone is not preempted, and would otherwise wait while the rank is tight.
func (r *rank) capacity(watermark float64, now time.Time, longest int64) int64 {
	// Unlimited room cannot be made smaller, and the division below needs a watermark below 1.
	if r.Capacity == 0 || watermark >= 1 || !r.pressure.tight(now) {
		return r.room()
	}
	doubled := max(watermark, min(2*watermark, tightMost))
	capacity := math.Ceil(float64(r.room()) * (1 - doubled) / (1 - watermark))
	if len(r.slots) == 0 {
		capacity = max(capacity, math.Ceil(float64(longest+1)/(1-watermark)))
	}
	return int64(min(max(capacity, 1), float64(r.room()))) // 0 would be unlimited
}

// fits says whether the rank has a free slot and KV room for a prompt of so many tokens.
func (r *rank) fits(prompt int64, watermark float64, now time.Time) bool {
	return r.free() > 0 && r.kv+prompt <= policy.KVBudget(r.capacity(watermark, now, prompt), watermark)
}

// preempted records that the engine of a worker ran out of KV room and preempted a request. A mixed rank will compute this request's prompt
// again.
func (l *Boards) preempted(worker int32) {
	for _, b := range l.inOrder {
		if r := b.ranks[worker]; r != nil {
			r.pressure.preempted(l.now)
			if r.Mixed {
				b.computeAgain(r)
			}
		}
	}
}

// largest returns the longest prompt, in tokens, that any rank of the group that is up could take if the rank were idle.
func (g *group) largest(watermark float64) (most int64) {
	for _, r := range g.ranks {
		if r.Up {
			most = max(most, policy.KVBudget(r.room(), watermark))
		}
	}
	return most
}
