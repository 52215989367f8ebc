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
	PoolFull bool // so the arrival queue waits for decode ranks, too
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

func kvShare(tokens, capacity int64) float64 {
	if capacity <= 0 {
		return 0
	}
	return float64(tokens) / float64(capacity)
}

func share(part, whole int) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// backlogGoal is the time within which waiting requests should be served.
const backlogGoal = time.Minute

// need is the number of ranks that each side needs, not rounded.
type need struct {
	at              time.Time
	prefill, decode float64
	// The same if the other side had all ranks that it needs, and so held no requests back.
	prefillIfDecodeSuffices, decodeIfPrefillSuffices float64
}

// needOf: the ranks of a side should be busy to the share target, and serve all waiting requests
// within backlogGoal. A short side holds requests back from the other, whose need otherwise is
// larger by the factor by which the short side must grow.
func needOf(s *Sample, target, slotSeconds float64) need {
	// While hand-offs fill the pool, no prefill begins until a decode rank takes one, so the arrival
	// queue waits for decode ranks.
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

// decodeNeed counts the ranks that the running requests fill to the share target, and those whose
// slots serve the waiting ones within backlogGoal. A slot is free again after slotSeconds. 0: no
// rank is live, so nothing is known.
func decodeNeed(d *Decode, queued int, target, slotSeconds float64) float64 {
	if d.Live == 0 {
		return 0
	}
	usedShare := max(share(d.Used, d.Slots), kvShare(d.KVTokens, d.Capacity)) // whichever is scarcer
	ranks := float64(d.Live) * usedShare / target
	if slotsPerRank := float64(d.Slots) / float64(d.Live); slotsPerRank > 0 {
		slotsPerRequest := min(1, slotSeconds/backlogGoal.Seconds())
		ranks += (float64(d.Pool) + float64(queued)) * slotsPerRequest / slotsPerRank
	}
	return ranks
}

// prefillNeed counts the busy ranks and those that do the waiting work within backlogGoal or, if
// more, those that the KV in use fills. If promptsWaitForDecode, more prefill ranks would not begin
// the waiting prompts earlier. 0: no rank is live, so nothing is known.
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
	// A hand-off that waits in the pool keeps KV on its prefill rank, too, but only because decode
	// ranks are missing.
	if s.Decode.Pool == 0 {
		filledRanks := float64(p.Live) * kvShare(p.KVTokens, p.Capacity)
		ranks = max(ranks, filledRanks/target)
	}
	return ranks
}

// shortage is the factor, 1 or more, by which a side would pass on more requests if it had all
// ranks that it needs.
func shortage(need float64, live int) float64 {
	if live == 0 { // nothing is known
		return 1
	}
	return max(1, need/float64(live))
}

// The small difference absorbs rounding errors.
func wholeRanks(need float64) int { return max(1, int(math.Ceil(need-1e-9))) }
