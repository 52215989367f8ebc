// Package advice computes how many prefill and decode ranks a model needs, and why,
// from samples of both sides over the last minutes. It only advises: an autoscaler or a person
// adds and removes the ranks.
package advice

import (
	"math"
	"time"
)

// Sample is the load of one model's prefill and decode side at one instant.
type Sample struct {
	At       time.Time
	Prefill  Prefill
	Decode   Decode
	PoolFull bool // hand-offs fill the pool, so requests in the arrival queue wait for decode ranks, too
}

// Prefill is the side that computes prompts.
type Prefill struct {
	Live           int     // ranks that answer and take prompts
	Down           int     // ranks that do not answer
	OutOfService   int     // ranks that answer and take no prompts: they drain, or are halted
	Busy           int     // live ranks with an unanswered probe (the call that computes a prompt)
	Requests       int     // requests in the arrival queue
	WaitingSeconds float64 // seconds that one rank would need for all prompts that no rank has begun
	RunningSeconds float64 // seconds that one rank would need for the prompts that run
	KVTokens       int64   // KV tokens held by all live ranks with a known capacity
	Capacity       int64   // KV tokens for which these ranks have room; 0: unknown
}

// Decode is the side that generates answers.
type Decode struct {
	Live         int // ranks that answer and take requests
	Down         int // ranks that do not answer, or fail their requests
	OutOfService int // ranks that answer and take no requests: they drain, or are halted
	Slots        int // slots of all live ranks; Used, KVTokens and Capacity are sums over these ranks, too
	Used         int
	KVTokens     int64
	Capacity     int64 // KV tokens for which these ranks have room; 0: unknown
	Pool         int   // hand-offs that wait for a rank
	Oldest       time.Duration
	Ended        uint64 // answers that have ended since the start: each one frees a slot
}

// kvShare is the share of the KV capacity in use; 0 if the capacity is not known.
func kvShare(tokens, capacity int64) float64 {
	if capacity <= 0 {
		return 0
	}
	return float64(tokens) / float64(capacity)
}

// share is a part as a share of the whole; 0: the whole is 0.
func share(part, whole int) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// backlogGoal is the time within which waiting requests should be served. More ranks are
// asked for if the present ones need longer.
const backlogGoal = time.Minute

// need is the number of ranks that each side needs. It is rounded up only in the advice.
type need struct {
	at              time.Time
	prefill, decode float64
	// The need of each side if the other side had all the ranks that it needs, and so held no requests back.
	prefillUnthrottled, decodeUnthrottled float64
}

// needOf computes the needed ranks from a sample. The ranks of a side should be busy to the share target, and serve all waiting requests
// within the time backlogGoal. The unthrottled need of a side is its need if the other side were not short of ranks, and so passed on more
// requests. slotSeconds is how long an answer keeps its slot.
func needOf(s *Sample, target, slotSeconds float64) need {
	n := need{at: s.At}
	queued := 0.0 // requests in the arrival queue that wait for decode, because the pool is full
	if d := s.Decode; d.Live > 0 {
		slotsPerRank := float64(d.Slots) / float64(d.Live)
		usedShare := max(share(d.Used, d.Slots), kvShare(d.KVTokens, d.Capacity)) // of slots or of KV memory, whichever is scarcer
		if s.PoolFull {
			queued = float64(s.Prefill.Requests)
		}
		n.decode = float64(d.Live) * usedShare / target // the ranks that the running requests fill to the target
		if slotsPerRank > 0 {                           // a slot that is free again within backlogGoal serves several of the waiting requests
			n.decode += (float64(d.Pool) + queued) * min(1, slotSeconds/backlogGoal.Seconds()) / slotsPerRank
		}
	}
	if p := s.Prefill; p.Live > 0 {
		busyRanks := float64(p.Busy) // and, below, the ranks that would do the waiting work within backlogGoal
		if queued == 0 {             // else the prompts wait for decode ranks, and more prefill ranks would not begin them earlier
			busyRanks += p.WaitingSeconds / backlogGoal.Seconds()
		}
		n.prefill = busyRanks / target
		if s.Decode.Pool == 0 { // waiting hand-offs fill the KV of prefill ranks, but only more decode ranks help
			filledRanks := float64(p.Live) * kvShare(p.KVTokens, p.Capacity) // how many ranks the KV in use would fill
			n.prefill = max(n.prefill, filledRanks/target)
		}
	}
	n.prefillUnthrottled = n.prefill * shortage(n.decode, s.Decode.Live)
	n.decodeUnthrottled = n.decode * shortage(n.prefill, s.Prefill.Live)
	return n
}

// shortage is the factor, 1 or more, by which a side would pass on more requests if it had all ranks that it needs. need is the number of
// ranks that the side needs, and live the number that it has.
func shortage(need float64, live int) float64 {
	if live == 0 { // nothing is known of such a side
		return 1
	}
	return max(1, need/float64(live))
}

// wholeRanks rounds a need up to whole ranks, at least one. The small difference absorbs rounding errors.
func wholeRanks(need float64) int { return max(1, int(math.Ceil(need-1e-9))) }
