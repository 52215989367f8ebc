// Package advice says how many prefill and decode ranks a model needs, and why, from samples of the last minutes. It starts and stops
// nothing; an autoscaler or a person does.
package advice

import (
	"math"
	"time"
)

// Sample is the state of one model's prefill and decode ranks at one instant.
type Sample struct {
	At       time.Time
	Prefill  Prefill
	Decode   Decode
	PoolFull bool // hand-offs fill the pool, so requests in the arrival queue wait for decode, not for prefill
}

// Prefill is the state of the ranks that compute prompts.
type Prefill struct {
	Live     int     // ranks that answer
	Down     int     // ranks that do not
	Busy     int     // live ranks with an unanswered probe
	Requests int     // in the arrival queue
	Waiting  float64 // seconds of prefill for one rank: the arrival queue, and probes that wait behind a running one
	Begun    float64 // seconds of prefill for one rank: the running probes
	KVTokens int64   // held
	Capacity int64   // 0: unknown
}

// Decode is the state of the ranks that generate answers.
type Decode struct {
	Live     int // ranks that answer
	Down     int // ranks that do not
	Slots    int // of all live ranks together
	Used     int
	KVTokens int64
	Capacity int64 // 0: unknown
	Pool     int   // hand-offs that wait for a rank
	Oldest   time.Duration
	Ended    uint64 // answers since the start; each end frees a slot
}

// kvShare returns the used share of the KV budget; 0: the budget is not known.
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

// drain is the time in which waiting requests should be gone. If the ranks would need longer, more ranks are advised.
const drain = time.Minute

// need is how many ranks of each side a sample asks for, as a fraction.
type need struct {
	at              time.Time
	prefill, decode float64
	// The same, if the other side were not short of ranks.
	prefillThen, decodeThen float64
}

// needOf returns how many ranks a sample needs: as many as keep the used share of their capacity at target, and finish the waiting requests
// within drain. serves is how many seconds an answer keeps its slot.
func needOf(s *Sample, target, serves float64) need {
	n := need{at: s.At}
	queued := 0.0 // requests of the arrival queue that wait for decode
	if d := s.Decode; d.Live > 0 {
		perRank := float64(d.Slots) / float64(d.Live)
		used := max(share(d.Used, d.Slots), kvShare(d.KVTokens, d.Capacity))
		if s.PoolFull {
			queued = float64(s.Prefill.Requests)
		}
		more := (float64(d.Pool) + queued) * min(1, serves/drain.Seconds())
		n.decode = float64(d.Live) * used / target
		if perRank > 0 {
			n.decode += more / perRank
		}
	}
	if p := s.Prefill; p.Live > 0 {
		work := float64(p.Busy)
		if queued == 0 {
			work += p.Waiting / drain.Seconds()
		}
		n.prefill = work / target
		if kv := float64(p.Live) * kvShare(p.KVTokens, p.Capacity); s.Decode.Pool == 0 {
			// while hand-offs wait for decode they hold prefill KV, and more prefill ranks would not help
			n.prefill = max(n.prefill, kv/target)
		}
	}
	n.prefillThen = n.prefill * shortage(n.decode, s.Decode.Live)
	n.decodeThen = n.decode * shortage(n.prefill, s.Prefill.Live)
	return n
}

// shortage returns by which factor more requests would get through a side that is short of ranks if it were not; 1: it is not short.
func shortage(need float64, live int) float64 {
	if live == 0 {
		return 1
	}
	return max(1, need/float64(live))
}

func ranks(need float64) int { return max(1, int(math.Ceil(need-1e-9))) }
