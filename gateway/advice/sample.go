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
	prefillIfDecodeSuffices, decodeIfPrefillSuffices float64
}

// needOf computes the needed ranks from a sample. The ranks of a side should be busy to the share target, and serve all waiting requests
// within the time backlogGoal. slotSeconds is how long an answer keeps its slot. A side that is short of ranks holds requests back from the
// other side. Therefore needOf also computes what the other side would need otherwise: its need times the factor by which the ranks of the
// short side must grow.
func needOf(s *Sample, target, slotSeconds float64) need {
	// While hand-offs fill the pool, no prefill begins until a decode rank takes a hand-off. So all requests in the arrival queue then
	// wait for decode ranks, and not for prefill ranks.
	waitForDecode := 0
	if s.PoolFull && s.Decode.Live > 0 {
		waitForDecode = s.Prefill.Requests
	}
	n := need{
		at: s.At, decode: decodeNeed(&s.Decode, waitForDecode, target, slotSeconds),
		prefill: prefillNeed(s, waitForDecode > 0, target),
	}
	n.prefillIfDecodeSuffices = n.prefill * shortage(n.decode, s.Decode.Live)
	n.decodeIfPrefillSuffices = n.decode * shortage(n.prefill, s.Prefill.Live)
	return n
}

// decodeNeed returns how many decode ranks are needed: those that the running requests fill to the share target, and those whose slots
// serve the waiting requests within backlogGoal. Hand-offs in the pool wait, and in addition queued requests. A slot that is free again
// after slotSeconds serves several of them in turn. 0: no rank is live, so nothing is known.
func decodeNeed(d *Decode, queued int, target, slotSeconds float64) float64 {
	if d.Live == 0 {
		return 0
	}
	usedShare := max(share(d.Used, d.Slots), kvShare(d.KVTokens, d.Capacity)) // of slots or of KV memory, whichever is scarcer
	ranks := float64(d.Live) * usedShare / target
	if slotsPerRank := float64(d.Slots) / float64(d.Live); slotsPerRank > 0 {
		slotsPerRequest := min(1, slotSeconds/backlogGoal.Seconds())
		ranks += (float64(d.Pool) + float64(queued)) * slotsPerRequest / slotsPerRank
	}
	return ranks
}

// prefillNeed returns how many prefill ranks are needed: the busy ones and those that do the waiting work within backlogGoal, or those that
// the KV in use fills, if that is more. All of them should be used only to the share target. promptsWaitForDecode says that the waiting
// prompts wait for decode ranks, so that more prefill ranks would not begin them earlier. 0: no rank is live, so nothing is known.
func prefillNeed(s *Sample, promptsWaitForDecode bool, target float64) float64 {
	p := &s.Prefill
	if p.Live == 0 {
		return 0
	}
	busyRanks := float64(p.Busy)
	if !promptsWaitForDecode {
		busyRanks += p.WaitingSeconds / backlogGoal.Seconds()
	}
	ranks := busyRanks / target
	// The KV in use shows the need of prefill ranks only while no hand-off waits in the pool. A waiting hand-off keeps KV on its
	// prefill rank, too, but only because decode ranks are missing.
	if s.Decode.Pool == 0 {
		filledRanks := float64(p.Live) * kvShare(p.KVTokens, p.Capacity) // how many ranks the KV in use would fill
		ranks = max(ranks, filledRanks/target)
	}
	return ranks
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
