package board

import (
	"math"
	"time"

	"evenkeel/dispatcher/policy"
)

// Tight ranks. A rank whose engine preempts requests has less KV room than its capacity says. After
// two preemptions within preemptWithin, it is tight for tightFor: the share of the room that the
// policy keeps empty (its watermark) is doubled, but not to more than mostEmptyShare.
const (
	preemptWithin  = 10 * time.Second
	tightFor       = time.Minute
	mostEmptyShare = 0.3
)

func (p *kvPressure) recordPreemption(now time.Time) {
	if !p.lastPreemption.IsZero() && now.Sub(p.lastPreemption) <= preemptWithin {
		p.tightUntil = now.Add(tightFor)
	}
	p.lastPreemption = now
}

func (p *kvPressure) isTight(now time.Time) bool { return now.Before(p.tightUntil) }

// scheduleTightEnd makes the board decide again when the first tight rank may be filled as usual.
func (b *board) scheduleTightEnd(now time.Time) {
	for _, g := range b.decidingGroups {
		for _, r := range g.steppingRanks {
			if r.pressure.isTight(now) {
				b.keptEmptierUntil = earlier(b.keptEmptierUntil, r.pressure.tightUntil)
			}
		}
	}
}

// policyCapacity is the rank's capacity as policies see it; 0: unlimited. Policies do not know of
// tight ranks, so it is smaller for these. A tight rank without requests has room for the longest
// prompt that waits: a prompt that runs alone is not preempted, and would otherwise wait as long as
// the rank is tight.
func (r *rank) policyCapacity(watermark float64, now time.Time, longest int64) int64 {
	// The divisions below need a watermark below 1.
	if r.Capacity == 0 || watermark >= 1 || !r.pressure.isTight(now) {
		return r.usableCapacity()
	}
	emptyShare := max(watermark, min(2*watermark, mostEmptyShare))
	mayFill := float64(r.usableCapacity()) * (1 - emptyShare)
	if len(r.slots) == 0 {
		mayFill = max(mayFill, float64(longest+1)) // one token more, because the policy rounds down
	}
	// The policy fills the share 1-watermark of it.
	capacity := math.Ceil(mayFill / (1 - watermark))
	return int64(min(max(capacity, 1), float64(r.usableCapacity()))) // 0 would mean unlimited
}

func (r *rank) hasSlotAndRoom(prompt int64, watermark float64, now time.Time) bool {
	return r.freeSlots() > 0 && r.kv+prompt <= policy.KVBudget(r.policyCapacity(watermark, now, prompt), watermark)
}

func (l *Boards) recordPreemption(worker int32) {
	for _, b := range l.inOrder {
		if r := b.ranks[worker]; r != nil {
			r.pressure.recordPreemption(l.now)
			if r.Mixed {
				b.requeuePreempted(r)
			}
		}
	}
}

// largestPrompt is for the ranks that are up, if they were idle.
func (g *group) largestPrompt(watermark float64) (largest int64) {
	for _, r := range g.steppingRanks {
		if r.Up {
			largest = max(largest, policy.KVBudget(r.usableCapacity(), watermark))
		}
	}
	return largest
}
