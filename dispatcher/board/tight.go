package board

import (
	"math"
	"time"

	"evenkeel/dispatcher/policy"
)

// A rank whose engine preempts requests has less KV room than its capacity
// says. After two preemptions within preemptWithin, the rank is kept emptier for tightFor: twice the policy's
// watermark, but at most tightMost, is then the share of its room that stays empty.
const (
	preemptWithin = 10 * time.Second
	tightFor      = time.Minute
	tightMost     = 0.3
)

// preempted records a preemption on the rank. If the one before was no longer ago than preemptWithin, the rank is tight for tightFor.
func (p *pressure) preempted(now time.Time) {
	if !p.last.IsZero() && now.Sub(p.last) <= preemptWithin {
		p.until = now.Add(tightFor)
	}
	p.last = now
}

// tight says whether the rank is kept emptier now, because its engine preempted requests.
func (p *pressure) tight(now time.Time) bool { return now.Before(p.until) }

// findTight makes the board look at the pool again when the first tight rank has its whole room again.
func (b *board) findTight(now time.Time) {
	for _, g := range b.order {
		for _, r := range g.ranks {
			if r.pressure.tight(now) && (b.wakeTight.IsZero() || r.pressure.until.Before(b.wakeTight)) {
				b.wakeTight = r.pressure.until
			}
		}
	}
}

// capacity returns the rank's capacity as policies see it, in KV tokens. For a tight rank it is smaller, so that a policy
// which keeps its watermark's share of it empty keeps twice that share of the true room empty.
// A tight rank on which nothing runs still has room for the longest prompt that waits: a prompt that runs alone
// is not preempted, and would otherwise wait for as long as the rank is tight.
func (r *rank) capacity(watermark float64, now time.Time, longest int64) int64 {
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

// preempted records that the engine of a worker ran out of KV room and preempted a request. On a mixed rank, that request is computed
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

// largest returns the longest prompt, in tokens, that any rank of the group that is up could take if
// it were idle.
func (g *group) largest(watermark float64) (most int64) {
	for _, r := range g.ranks {
		if r.Up {
			most = max(most, policy.KVBudget(r.room(), watermark))
		}
	}
	return most
}
